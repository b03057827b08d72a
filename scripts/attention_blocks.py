"""Ranks block sizes of the TPUs' attention kernel by the instructions its compiler schedules; no TPU is needed.

  python scripts/attention_blocks.py [--slices v5e-4 v6e-4] [--lengths 2048 8192] [--head-dim 128] [--blocks …] [--write]

Compiles each kernel of splash attention alone, forward and backward, and reads the compiler's dump of the
program: a core starts one bundle of instructions in a cycle. A bundle counts as often as the grid of blocks
has it executed: in each step of the grid, for each block that the causal mask leaves, and where a row of
blocks begins or ends. What a kernel waits for is not in it, neither for memory nor for what
units take beyond their schedule: the cycles are a lower bound, to be compared among themselves. Beside them
stands the least time for the bytes that each step reads and writes.

Blocks are queries/keys/keys at once. The flags of the dump are undocumented; they were found with libtpu
0.0.51. To check the count, the script does the same with a kernel that multiplies matrices, for
which the compiler estimates its own program (--check).
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import SingleDeviceSharding

from maxbatch.estimate.attention_kernels import FILE
from maxbatch.estimate.chips import CHIPS, Chip
from maxbatch.hardware.devices import topology_devices

PASS = "packed-bundles-post-ra"
"""The dump whose bundles are cycles: in the final one, bundles that only wait are fields of others."""
LENGTH, HEADS, TRIED = 4096, 2, 512
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4, "fused": 5}
DEFAULT = "512/512/512 1024/512/512 512/1024/512 1024/1024/512 1024/1024/1024 1024/2048/512"
Blocks = tuple[int, int, int]
Shape = tuple[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class Bundles:
  """Bundles of the parts of a kernel that has one loop over its grid."""

  step: int
  """In each step of the grid."""
  block: int
  """Where the mask leaves some of a block."""
  ends: int
  """Where a row of blocks begins or ends."""


def read_bundles(text: str) -> Bundles:
  """Returns the bundles of the loop's parts: what branches jump over, the longest of which is the block.

  Raises:
    SystemExit: there are several loops.
  """
  starts, branches = [], []
  for line in text.splitlines():
    if number := re.match(r"\s*(0x[0-9a-f]+)\s", line):
      at = int(number[1], 16)
      starts += [at] if re.match(r"\s*\S+\s+LB\b", line) else []
      branches += [
        (at, int(to)) for to in re.findall(r"sbr\.rel[^;]*?target bundleno = (\d+)", line)
      ]
  if len(starts) != 1:
    raise SystemExit(
      f"expected one loop in the dump, found {len(starts)}: is libtpu another version?"
    )
  end = max(at for at, to in branches if to == starts[0]) + _DELAY
  ahead = [(at, to) for at, to in branches if starts[0] <= at < to <= end]
  innermost = [
    (at, to) for at, to in ahead if not any(at < low and high <= to for low, high in ahead)
  ]
  sizes = sorted(to - at - _DELAY for at, to in innermost)
  return Bundles(end - starts[0] - sum(sizes), sizes[-1], sum(sizes[:-1]))


_DELAY = 5
"""Bundles of a branch with those that are executed whether or not it jumps."""


def compiled(function: Callable[..., Any], shapes: Sequence[Shape], device: Any) -> str:
  """Returns the text of a function's program for a device."""
  placed = SingleDeviceSharding(device)
  arrays = [jax.ShapeDtypeStruct(dims, dtype, sharding=placed) for dims, dtype in shapes]
  return jax.jit(function, out_shardings=placed).lower(*arrays).compile().as_text() or ""


def bundles_of(
  function: Callable[..., Any],
  shapes: Sequence[Shape],
  device: Any,
  folder: pathlib.Path,
  name: str,
) -> Bundles | None:
  """Returns those of the kernel called `name`; None: its blocks do not fit into vector memory."""
  for old in folder.iterdir():
    old.unlink()
  try:
    compiled(function, shapes, device)
  except jax.errors.JaxRuntimeError as error:
    if "vmem" not in str(error):
      raise
    return None
  (dump,) = (p for p in folder.glob(f"*{name}*-{PASS}.txt") if "schedule-analysis" not in p.name)
  return read_bundles(dump.read_text(encoding="utf-8"))


def attention(which: str, blocks: Blocks, H: int) -> tuple[Callable[..., Any], Sequence[Shape]]:
  """Returns attention, or what needs one kernel of its backward pass, and its arguments' shapes."""
  N, (queries, keys, at_once) = HEADS, blocks
  T = LENGTH if LENGTH % queries == LENGTH % keys == 0 else math.lcm(queries, keys, TRIED)
  names = ["block_q", "block_kv", "block_kv_compute"]
  names += ["block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
  names += ["block_q_dq", "block_kv_dq"] if which != "fused" else []
  sizes: dict[str, Any] = dict.fromkeys(names, TRIED)
  suffix = {"fwd": "", "dq": "_dq"}.get(which, "_dkv")
  sizes |= {f"block_q{suffix}": queries, f"block_kv{suffix}": keys}
  if which != "dq":
    sizes[f"block_kv{suffix}_compute"] = at_once
  kernel = splash.make_splash_mha(
    splash.MultiHeadMask([splash.CausalMask((T, T))] * N),
    block_sizes=splash.BlockSizes(**sizes, use_fused_bwd_kernel=which == "fused"),
    head_shards=1,
    q_seq_shards=1,
  )

  def forward(q: Any, k: Any, v: Any, ids: Any) -> Any:
    attend: Any = jax.vmap(kernel)
    return attend(q, k, v, splash.SegmentIds(ids, ids))

  def backward(q: Any, k: Any, v: Any, ids: Any, d_out: Any) -> Any:
    d_q, d_k, d_v = jax.vjp(lambda q, k, v: forward(q, k, v, ids), q, k, v)[1](d_out)
    return {"dq": d_q, "dkv": (d_k, d_v), "fused": (d_q, d_k, d_v)}[which]

  heads: Shape = (1, N, T, H), jnp.bfloat16
  shapes: list[Shape] = [heads, heads, heads, ((1, T), jnp.int32)]
  return (forward, shapes) if which == "fwd" else (backward, [*shapes, heads])


def head_cycles(which: str, blocks: Blocks, parts: Bundles, T: int) -> float:
  """Returns a core's cycles for a head of a causal row of T tokens."""
  queries, keys, _ = blocks
  rows, columns = T // queries, T // keys
  visited = sum(-(-(row + 1) * queries // keys) for row in range(rows))
  ends = rows if which in ("fwd", "dq") else columns
  return rows * columns * parts.step + visited * parts.block + ends * parts.ends


def head_bytes(which: str, blocks: Blocks, T: int, H: int) -> float:
  """Returns the bytes that a head reads and writes: of each block visited, and of each row of blocks.

  Segment ids and positions are 4 bytes in 128 lanes for a query, in 8 rows for a key, as are sums and maxima.
  """
  queries, keys, _ = blocks
  visited = sum(-(-(row + 1) * queries // keys) for row in range(T // queries))
  if which in ("fwd", "dq"):
    own = 4 * H + 3 * 512 if which == "fwd" else 6 * H + 2 * 512 + 64
    return visited * keys * (4 * H + 32) + T * own
  parts = 2 * H * T * T // keys if which == "fused" else 0
  return visited * queries * (4 * H + 96) + T * 8 * H + parts


def check(device: Any, chip: Chip, folder: pathlib.Path) -> str:
  """Returns the cycles of a product of [2048, 4096] by [4096, 4096], by a kernel and by the compiler."""
  M, K, N, m, k, n = 2048, 4096, 4096, 512, 1024, 1024

  def kernel(x: Any, matrix: Any, out: Any, total: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
      total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(x[...], matrix[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == K // k - 1)
    def _() -> None:
      out[...] = total[...].astype(out.dtype)

  product = pl.pallas_call(
    kernel,
    grid=(M // m, N // n, K // k),
    in_specs=[
      pl.BlockSpec((m, k), lambda i, j, s: (i, s)),
      pl.BlockSpec((k, n), lambda i, j, s: (s, j)),
    ],
    out_specs=pl.BlockSpec((m, n), lambda i, j, s: (i, j)),
    out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    name="product_of_blocks",
  )
  shapes = [((M, K), jnp.bfloat16), ((K, N), jnp.bfloat16)]
  parts = bundles_of(product, shapes, device, folder, "product_of_blocks")
  assert parts is not None
  steps = M // m * N // n
  ours = steps * (K // k * parts.step + parts.block + parts.ends) // chip.tensor_cores
  estimate = re.search(r'"estimated_cycles":"(\d+)"', compiled(jnp.dot, shapes, device))
  assert estimate is not None
  least = 2 * M * K * N / chip.peak_flops * chip.clock
  return f"{ours:,} in bundles, {int(estimate[1]):,} by the compiler, {least:,.0f} at the peak"


def cell(chip: Chip, which: str, blocks: Blocks, parts: Bundles, T: int, H: int) -> str:
  """Returns a head's cycles for rows of T tokens, their share of the peak, and cycles that its bytes take."""
  if T % blocks[0] or T % blocks[1]:
    return ""
  cycles = head_cycles(which, blocks, parts, T)
  clock = chip.clock * chip.tensor_cores
  share = PRODUCTS[which] * H * T * T / chip.peak_flops * clock / cycles
  memory = head_bytes(which, blocks, T, H) / chip.hbm_bandwidth * clock
  return f"{cycles:,} ({share:.0%} of the peak; memory {memory:,.0f})"


def write(blocks: str, parts: Bundles, *place: str) -> None:
  """Puts a kernel's bundles into the table of the estimates, at its generation, name and width."""
  known: Any = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
  within = known
  for key in place:
    within = within.setdefault(key, {})
  within[blocks] = [parts.step, parts.block, parts.ends]
  text = json.dumps(known, indent=2, sort_keys=True)
  text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text)
  FILE.write_text(text + "\n", encoding="utf-8")


def table(arguments: argparse.Namespace, name: str, folder: pathlib.Path) -> None:
  """Prints a row for each kernel and its blocks, with a cell for each length; writes what estimates use."""
  device, H = topology_devices(name)[0], arguments.head_dim
  chip = CHIPS[name.partition("-")[0]]
  if arguments.check:
    print(f"{name}: a product takes {check(device, chip, folder)}", flush=True)
  for which in arguments.kernels:
    for words in arguments.blocks:
      queries, keys, at_once = map(int, words.split("/"))
      if which == "dq" and at_once != min(keys, TRIED):
        continue  # It multiplies all keys of a block at once.
      blocks = queries, keys, at_once
      kernel = "_dkv_" if which == "fused" else f"_{which}_"
      parts = bundles_of(*attention(which, blocks, H), device, folder, kernel)
      cells = ["does not fit"] * len(arguments.lengths)
      if parts is not None:
        cells = [cell(chip, which, blocks, parts, T, H) for T in arguments.lengths]
        if arguments.write:
          at_once = keys if which == "dq" else at_once
          write(f"{queries}/{keys}/{at_once}", parts, chip.generation, which, str(H))
      print("| " + " | ".join([name, which, words, *cells]) + " |", flush=True)


def main() -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(description="Ranks blocks of the TPUs' attention kernel.")
  parser.add_argument("--slices", nargs="+", default=["v5e-4", "v6e-4", "v5p-8"])
  parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
  parser.add_argument("--head-dim", type=int, default=128)
  parser.add_argument("--kernels", nargs="+", default=["fwd", "dq", "dkv"], choices=list(PRODUCTS))
  parser.add_argument("--blocks", nargs="+", default=DEFAULT.split())
  parser.add_argument("--write", action="store_true", help=f"into {FILE.name}, for estimates")
  parser.add_argument("--check", action="store_true", help="compare a product with its estimate")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^{PASS}"
    os.environ["LIBTPU_INIT_ARGS"] = flags
    print(
      "| slice | kernel | blocks | " + " | ".join(f"{T:,} tokens" for T in arguments.lengths) + " |"
    )
    print("|---" * (3 + len(arguments.lengths)) + "|")
    for name in arguments.slices:
      table(arguments, name, pathlib.Path(folder))


if __name__ == "__main__":
  main()
