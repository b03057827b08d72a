"""FLOPs of matrix products: dots, convolutions, library calls and attention kernels.

A multiply-add is two FLOPs. Other computations are not counted: they do not run on the matrix units
to which a chip's peak refers.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from maxbatch.estimate.hlo import Computation, HloModule, Instruction

_CONTRACTED = re.compile(r"lhs_contracting_dim(?:s|ensions)\"?[=:][{\[]([\d,\"]*)[}\]]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")
_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:matmul|gemm)|__onednn\$matmul|EigenMatMul")
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")

# Matrix products per kernel. fwd: logits, weighted values. dq: logits, gradient of the weights,
# gradient of the queries. dkv: logits, gradient of the weights, gradients of keys and values.
SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# The fused backward kernel has the name of dkv but gives the queries' gradient too, in parts by blocks
# of keys: logits and gradient of the weights are then formed once.
_FUSED_SPLASH_PRODUCTS = 5


@dataclasses.dataclass(frozen=True)
class Products:
  """Matrix products of one execution of an instruction."""

  flops: int = 0
  """As the mathematics needs; for causal attention only the half below the diagonal."""
  executed: int = 0
  """As computed; kernels also compute the upper half of the blocks on the diagonal."""
  width: int = 0
  """Attention kernels: head_dim, which fills only part of a wider matrix unit; 0 for others."""

  def __add__(self, other: "Products") -> "Products":
    return Products(
      self.flops + other.flops, self.executed + other.executed, max(self.width, other.width)
    )


def products(program: HloModule, within: Computation, one: Instruction) -> Products:
  """Returns the matrix products of one execution of `one`, including the computations it calls."""
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
  result = _CONTRACTED.search(one.attributes)
  if left is None:
    return 0
  dims = left.shapes[0].dims
  # A library call without contracting dimensions contracts the last one.
  axes = [int(axis) for axis in re.findall(r"\d+", result[1])] if result else [len(dims) - 1]
  return 2 * one.shapes[0].elements * math.prod(dims[axis] for axis in axes)


def _convolution_flops(within: Computation, one: Instruction) -> int:
  """Returns FLOPs of the multiplications with data, not with padding.

  The TPU compiler writes every dot as a convolution. Batch dimensions become spatial dimensions,
  with a window over padding and dilation, so that few of its positions meet any data.
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
  """Returns the window's fields (stride=1x2, pad=0_0x11_11, …), with one entry per spatial
  dimension."""
  result = _WINDOW.search(one.attributes)
  fields = (field.split("=") for field in result[1].split()) if result else ()
  return {
    name: [tuple(map(int, size.split("_"))) for size in sizes.split("x")] for name, sizes in fields
  }


def _overlaps(data: int, kernel: int, result: int, window: Mapping[str, tuple[int, ...]]) -> int:
  """Counts pairs of positions in kernel and result that multiply data rather than padding or
  holes."""
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
  """Returns the kernel's own cost estimate if it states one, else one derived from its name and
  shapes."""
  if stated := one.cost_estimate.get("flops"):
    return _plain(stated)
  if _GEMM.search(one.target):
    return _plain(_dot_flops(within, one))
  if splash := _SPLASH.search(f"{one.name} {one.op_name}"):
    return _splash(within, one, SPLASH_PRODUCTS[splash[1]])
  return Products()


def _splash(within: Computation, one: Instruction, count: int) -> Products:
  """Counts the products of splash attention: queries (B, N, T, H) and keys (B, K, S, H) are its
  first two float operands.

  The kernel visits the blocks of a grid (queries, keys), the shape of its first operands. A square
  grid is causal: it visits the blocks on and below the diagonal, and half of all pairs count. A
  sliding window makes the grid narrower; all of its blocks then count.
  """
  shapes = [shape for name in one.operands for shape in within.instructions[name].shapes]
  floats = [shape for shape in shapes if shape.dtype in ("bf16", "f32", "f16")]
  if len(floats) < 2:
    return Products()
  queries, keys = floats[:2]
  if any(len(shape.dims) > len(queries.dims) for shape in one.shapes):
    count = _FUSED_SPLASH_PRODUCTS
  every = 2 * count * queries.elements * keys.dims[-2]
  grids = [shape.dims[-2:] for shape in shapes if shape.dtype[0] == "s" and len(shape.dims) == 3]
  rows, columns = grids[0] if grids else (1, 1)
  width = queries.dims[-1]
  if rows == columns:
    return Products(every // 2, every * (rows + 1) // (2 * rows), width)
  share = every * min(rows, columns) // max(rows, columns)
  return Products(share, share, width)
