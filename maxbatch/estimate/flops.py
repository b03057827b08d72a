"""FLOPs of matrix products: dots, convolutions, library calls and attention kernels.

A multiplication and its addition are two FLOPs. Everything else a program computes is left out:
it does not run on the matrix units that a chip's peak is about.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from maxbatch.estimate.hlo import ArrayShape, Computation, HloModule, Instruction

_CONTRACTED = re.compile(r"lhs_contracting_dim(?:s|ensions)\"?[=:][{\[]([\d,\"]*)[}\]]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")
_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:matmul|gemm)|__onednn\$matmul|EigenMatMul")
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")

# Products of two tokens' vectors that each kernel forms: logits and weighted values; logits again,
# gradient of the weights and of the queries; and for keys and values one more.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}


@dataclasses.dataclass(frozen=True)
class Products:
  """Matrix products of one execution of an instruction."""

  flops: int = 0
  """What the mathematics needs: of causal attention the half below the diagonal."""
  executed: int = 0
  """What is computed: kernels also do the upper half of the blocks on the diagonal."""
  width: int = 0
  """Of attention kernels: the width of a head. A matrix unit wider than this is not filled."""

  def __add__(self, other: "Products") -> "Products":
    return Products(
      self.flops + other.flops, self.executed + other.executed, max(self.width, other.width)
    )


def products(program: HloModule, within: Computation, one: Instruction) -> Products:
  """Matrix products of one execution of `one`, those of the computations it calls included."""
  if one.opcode == "dot":
    return _plain(_dot_flops(within, one))
  if one.opcode == "convolution":
    return _plain(_convolution_flops(within, one))
  if one.opcode == "custom-call":
    return _custom_call(within, one)
  total = Products()
  for called in program.called_by(one):
    for inner in called:
      total += products(program, called, inner)
  return total


def _plain(flops: int) -> Products:
  return Products(flops, flops)


def _dot_flops(within: Computation, one: Instruction) -> int:
  left = within.operand(one, 0)
  found = _CONTRACTED.search(one.attributes)
  if left is None:
    return 0
  dims = left.shapes[0].dims
  # A library's matrix product without a list multiplies along the last dimension.
  axes = [int(axis) for axis in re.findall(r"\d+", found[1])] if found else [len(dims) - 1]
  return 2 * one.shapes[0].elements * math.prod(dims[axis] for axis in axes)


def _convolution_flops(within: Computation, one: Instruction) -> int:
  """Of the multiplications that meet data, not padding.

  A TPU writes every dot as a convolution: batch dimensions become places of a window that slides
  over padding and holes, so that of all places of window and result few multiply anything.
  """
  labels = _LABELS.search(one.attributes)
  left, right = within.operand(one, 0), within.operand(one, 1)
  if labels is None or left is None or right is None:
    return 0
  data = dict(zip(labels[1], left.shapes[0].dims, strict=True))
  kernel = dict(zip(labels[2], right.shapes[0].dims, strict=True))
  result = dict(zip(labels[3], one.shapes[0].dims, strict=True))
  window = _window(one)
  places = math.prod(
    _overlaps(
      data[axis], kernel[axis], result[axis], {key: v[int(axis)] for key, v in window.items()}
    )
    for axis in labels[3]
    if axis.isdigit()
  )
  groups = _BATCH_GROUPS.search(one.attributes)
  rows = data["b"] // (int(groups[1]) if groups else 1)
  return 2 * rows * result["f"] * kernel["i"] * places


def _window(one: Instruction) -> Mapping[str, list[tuple[int, ...]]]:
  """stride=1x2, pad=0_0x11_11, … by name, one entry for each spatial dimension."""
  found = _WINDOW.search(one.attributes)
  fields = (field.split("=") for field in found[1].split()) if found else ()
  return {
    name: [tuple(map(int, size.split("_"))) for size in sizes.split("x")] for name, sizes in fields
  }


def _overlaps(data: int, kernel: int, result: int, window: Mapping[str, tuple[int, ...]]) -> int:
  """Pairs of places, in kernel and result, between which there is a datum."""
  stride, step = window.get("stride", (1,))[0], window.get("rhs_dilate", (1,))[0]
  holes, padding = window.get("lhs_dilate", (1,))[0], window.get("pad", (0, 0))[0]
  end = (data - 1) * holes + 1
  count = 0
  for place in range(kernel):
    offset = place * step - padding
    count += sum(
      0 <= at < end and at % holes == 0 for at in range(offset, offset + result * stride, stride)
    )
  return count


def _custom_call(within: Computation, one: Instruction) -> Products:
  """A kernel's own figure if it states one; else what its name and shapes tell."""
  if stated := one.cost_estimate.get("flops"):
    return _plain(stated)
  if _GEMM.search(one.target):
    return _plain(_dot_flops(within, one))
  if splash := _SPLASH.search(f"{one.name} {one.op_name}"):
    return _splash(within, one, _SPLASH_PRODUCTS[splash[1]])
  return Products()


def _splash(within: Computation, one: Instruction, count: int) -> Products:
  """Splash attention: queries (B, N, T, H) and keys (B, K, S, H) are its first two float operands.

  The kernel visits blocks of a grid (queries, keys), which is the shape of its first operands. A
  square grid is causal: half of all pairs count, and the visited blocks are those on the diagonal
  and below it. A window makes the grid narrower; all of what is left is then counted.
  """
  shapes = list(_operand_shapes(within, one))
  floats = [shape for shape in shapes if shape.dtype in ("bf16", "f32", "f16")]
  if len(floats) < 2:
    return Products()
  queries, keys = floats[:2]
  every = 2 * count * queries.elements * keys.dims[-2]
  grids = [shape.dims[-2:] for shape in shapes if shape.dtype[0] == "s" and len(shape.dims) == 3]
  rows, columns = grids[0] if grids else (1, 1)
  width = queries.dims[-1]
  if rows == columns:
    return Products(every // 2, every * (rows + 1) // (2 * rows), width)
  share = every * min(rows, columns) // max(rows, columns)
  return Products(share, share, width)


def _operand_shapes(within: Computation, one: Instruction) -> Iterator[ArrayShape]:
  for name in one.operands:
    yield from within.instructions[name].shapes
