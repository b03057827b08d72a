"""What the TPUs' attention kernel (splash attention) does in one execution, and the cycles it takes at least.

The compiler has no cycles for it. But it schedules bundles of instructions, of which a core starts one in a
cycle: `scripts/attention_blocks.py` counts those of each kernel by its blocks, as libtpu 0.0.51 schedules
them, and writes `attention_cycles.json`. What a kernel waits for is not in it (docs/compiled_step.md).
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from maxbatch.estimate.attention_blocks import USUAL, attention_block, joint_block
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.hlo import ArrayShape, Computation, Instruction

FILE = pathlib.Path(__file__).with_name("attention_cycles.json")

# Matrix products per kernel. fwd: logits, weighted values. dq: logits, gradient of the weights,
# gradient of the queries. dkv: logits, gradient of the weights, gradients of keys and values.
SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# A backward kernel may have the name of dkv but give the queries' gradient too, in parts by blocks of
# keys: logits and gradient of the weights are then formed once.
JOINT_SPLASH_PRODUCTS = 5

_NAME = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_BLOCK = re.compile(r'block_(q|kv)(?:_(dq|dkv))?(_compute)?\\*": ?(\d+)')


Blocks = tuple[int, int, int]
"""Queries and keys of a block, and the keys that are multiplied at once."""


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
  """One execution of a kernel on a device."""

  kernel: str
  """fwd, dq, dkv, or fused: the backward pass in one."""
  blocks: Blocks
  width: int
  """Of a head."""
  heads: float
  """Heads of queries, of all samples."""
  samples: float
  steps: float
  """Of the grid of blocks, for one head."""
  visits: float
  """Blocks of which the mask leaves some, likewise."""
  ends: float
  """Rows of blocks that begin and end, likewise: of keys where the kernel gives their gradients."""

  @property
  def pairs(self) -> float:
    """Returns the pairs of query and key that it computes, of all heads."""
    return self.heads * self.visits * math.prod(self.blocks[:2])

  def seconds(self, chip: Chip) -> float:
    """Returns the least seconds of its instructions; 0 of chips without a count.

    Of backward kernels one sample occupies one core."""
    counts = _counts().get(chip.generation, {}).get(self.kernel)
    if not counts:
      return 0.0
    width = min((each for each in counts if each >= self.width), default=max(counts))
    known = counts[width]
    wanted = math.prod(self.blocks[:2])

    def distance(one: Blocks) -> tuple[float, bool, bool]:
      size = abs(math.log(math.prod(one[:2]) / wanted))
      return size, one[:2] != self.blocks[:2], one != self.blocks

    blocks = min(known, key=distance)
    step, block, ends = known[blocks]
    # Of blocks that were not counted: as many instructions for a pair of query and key.
    block *= wanted / math.prod(blocks[:2]) * max(1.0, self.width / width)
    cycles = self.steps * step + self.visits * block + self.ends * ends
    cores = chip.tensor_cores if self.kernel == "fwd" or self.samples > 1 else 1
    return self.heads * cycles / cores / chip.clock


@dataclasses.dataclass(frozen=True)
class Heads:
  """What a device's attention is of."""

  width: int
  """Of a head."""
  number_bytes: int
  """Of the computation's format."""
  heads: float
  """Of queries, in all samples."""
  samples: float
  """As the kernels divide them over cores."""


def layer_seconds(chip: Chip, length: int, window: int, of: Heads, *, again: bool) -> float:
  """Returns the seconds of the kernels of a layer, in both passes.

  Args:
    length: tokens of a row, a multiple of 128.
    window: keys that a query sees; 0: all before it.
    again: whether the backward pass computes the forward pass again.
  """
  asked = chip.device_kind, length, length, window, of.width * of.number_bytes
  block, joint = attention_block(*asked), joint_block(*asked)
  kernels = [("fwd", block, 2.0 if again else 1.0), ("dq", block, 1.0), ("dkv", block, 1.0)]
  if joint:
    kernels[1:] = [("fused", joint, 1.0)]
  if chip.is_gpu:
    # Two products forward and five backward, as cuDNN's kernels and the published rates count them.
    backward = 7 / 5 * chip.attention_share(True, of.width)
    shares = {"fwd": chip.attention_share(False, of.width), "dq": backward, "dkv": backward}
    kernels = [(kernel, block, times / shares[kernel]) for kernel, block, times in kernels]
  seconds = 0.0
  for kernel, size, times in kernels:
    one = causal_kernel(kernel, size, length, window, of)
    count = JOINT_SPLASH_PRODUCTS if kernel == "fused" else SPLASH_PRODUCTS[kernel]
    products = count * 2 * one.pairs * chip.padded(of.width) / chip.peak_flops
    seconds += times * max(products, one.seconds(chip))
  return seconds


def causal_kernel(kernel: str, block: int, length: int, window: int, of: Heads) -> AttentionKernel:
  """Returns what our step does of a kernel, in blocks as wide as high, of rows of `length` tokens, a multiple
  of `block`."""
  rows = length // block
  # Blocks that a block of queries meets: on and below the diagonal, or as far as the window reaches.
  reach = min(rows, -(-(window - 1) // block) + 1) if window else rows
  visits = reach * rows - reach * (reach - 1) / 2
  blocks = block, block, block if kernel == "dq" else min(block, USUAL)
  return AttentionKernel(kernel, blocks, of.width, of.heads, of.samples, rows * reach, visits, rows)


@functools.cache
def _counts() -> Mapping[str, Mapping[str, Mapping[int, Mapping[Blocks, Sequence[int]]]]]:
  """Returns bundles of a step of the grid, a visit and the ends of a row, by generation, kernel, width and
  blocks."""
  return {
    generation: {
      kernel: {
        int(width): {_blocks(text): bundles for text, bundles in by_blocks.items()}
        for width, by_blocks in by_width.items()
      }
      for kernel, by_width in kernels.items()
    }
    for generation, kernels in json.loads(FILE.read_text(encoding="utf-8")).items()
  }


def _blocks(text: str) -> Blocks:
  queries, keys, at_once = map(int, text.split("/"))
  return queries, keys, at_once


@dataclasses.dataclass(frozen=True)
class Splash:
  """What HLO says of a kernel: its products and the shapes that they have."""

  count: int
  """Matrix products of a pair of query and key."""
  queries: ArrayShape
  """(B, N, T, H)"""
  whole: int
  """Keys."""
  counted: float
  """The share of all pairs that causal attention needs."""
  computed: float
  """The share that the kernel computes."""
  kernel: AttentionKernel | None
  """None where its blocks are not named."""


def read_splash(within: Computation, one: Instruction) -> Splash | None:
  """Returns what a custom call does, if it is such a kernel: queries (B, N, T, H) and keys (B, K, S, H) are
  its first two float operands, and the grid is the shape of the first."""
  name = _NAME.search(f"{one.name} {one.op_name}")
  shapes = [shape for each in one.operands for shape in within.instructions[each].shapes]
  floats = [shape for shape in shapes if shape.dtype in ("bf16", "f32", "f16")]
  if name is None or len(floats) < 2:
    return None
  queries, keys = floats[:2]
  is_joint = any(len(shape.dims) > len(queries.dims) for shape in one.shapes)
  (*lead, length, width), whole = queries.dims, keys.dims[-2]
  grids = [shape.dims[-2:] for shape in shapes if shape.dtype[0] == "s" and len(shape.dims) == 3]
  rows, columns = grids[0] if grids else (1, 1)
  counted, computed = splash_share(length, whole, rows, columns, is_joint=is_joint)
  kernel, suffix = ("fused" if is_joint else name[1]), ("" if name[1] == "fwd" else name[1])
  named = {
    side + compute: int(size)
    for side, of, compute, size in _BLOCK.findall(one.attributes)
    if of == suffix
  }
  known = None
  if {"q", "kv"} <= set(named):
    q, kv = named["q"], named["kv"]
    # All blocks, under a causal mask.
    if length == whole and rows * columns * q * kv == length * whole:
      met = sum(-(-(row + 1) * q // kv) for row in range(length // q))
      counted, computed = 0.5, met * q * kv / (length * whole)
    known = AttentionKernel(
      kernel,
      (q, kv, named.get("kv_compute", kv)),
      width=width,
      heads=math.prod(lead),
      samples=math.prod(lead[:-1]),
      steps=rows * columns,
      visits=length * whole * computed / (q * kv),
      ends=length / q if suffix in ("", "dq") else whole / kv,
    )
  count = JOINT_SPLASH_PRODUCTS if is_joint else SPLASH_PRODUCTS[name[1]]
  return Splash(count, queries, whole, counted, computed, known)


def splash_share(
  length: int, whole: int, rows: int, columns: int, *, is_joint: bool = False
) -> tuple[float, float]:
  """Returns the shares of all pairs of query and key that count, and that splash attention computes.

  The kernel visits the blocks of a grid. One of all blocks is causal: half of the pairs count, and of the
  blocks those on and below the diagonal are visited. So it is where the queries are a device's part of a
  row, if they stand in zigzag order. A sliding window makes the grid narrower; all of its blocks then count.

  Args:
    length: queries.
    whole: keys.
    rows: blocks of queries in the grid.
    columns: blocks of keys.
    is_joint: whether the kernel gives all gradients; its grid has all blocks, which may be wider than high.
  """
  shorter, longer = sorted((rows, columns))
  if is_joint or shorter * whole == longer * length:
    across = columns if is_joint else longer
    return 0.5, (across + 1) / (2 * across)
  is_part = length < whole
  share = min(1.0, columns * length / (rows * whole)) if is_part else shorter / longer
  return share, share
