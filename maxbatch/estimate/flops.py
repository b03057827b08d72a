"""FLOPs of matrix products: dots, convolutions, library calls and attention kernels.

A multiply-add is two FLOPs. Other computations are not counted: they do not run on the matrix units
to which a chip's peak refers.

Trip counts of while loops, where they are static.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal

from maxbatch.estimate.attention_kernels import AttentionKernel, read_splash
from maxbatch.estimate.hlo import Computation, HloModule, Instruction

_DIRECTION = re.compile(r"direction=(L[TE]|G[TE]|NE)")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
_SAME_VALUE = ("copy", "convert", "bitcast", "reshape", "broadcast", "copy-done", "copy-start")


@dataclasses.dataclass(frozen=True)
class Frame:
  """A call frame: a computation, the instruction that calls it, and the caller's frame."""

  computation: Computation
  caller: Instruction | None = None
  outer: "Frame | None" = None

  def inner(self, computation: Computation, caller: Instruction) -> "Frame":
    """Returns the frame of a computation that `caller`, an instruction of this frame, calls."""
    return Frame(computation, caller, self)


TripCount = int | Literal["data", "unreadable"]
"""data: the bound is no constant, as for the loop over microbatches. unreadable: it may well be one,
but this file does not understand the condition or the counter."""


def trip_count(program: HloModule, frame: Frame, loop: Instruction) -> TripCount:
  """Returns the trip count of `loop`, an instruction of `frame`.

  Some platforms record it. Elsewhere the condition compares a counter with a constant, which may
  be passed into the loop from outside; the counter goes up or down.
  """
  if loop.known_trip_count is not None:
    return loop.known_trip_count
  condition = frame.inner(program.computations[loop.called["condition"][0]], loop)
  return _trips_while_true(
    program, condition, condition.computation.instructions[condition.computation.root]
  )


def _trips_while_true(program: HloModule, frame: Frame, test: Instruction) -> TripCount:
  """Returns the number of iterations for which the comparison `test` holds."""
  if test.opcode == "fusion":
    called = frame.inner(program.called_by(test)[0], test)
    return _trips_while_true(
      program, called, called.computation.instructions[called.computation.root]
    )
  direction = _DIRECTION.search(test.attributes)
  left, right = (frame.computation.operand(test, number) for number in (0, 1))
  if test.opcode != "compare" or direction is None or left is None or right is None:
    return "unreadable"
  # Either side may be the counter: 5 > i is i < 5.
  bound = _value(program, frame, right)
  if bound is not None:
    return _trips(program, frame, left, bound, direction[1])
  bound = _value(program, frame, left)
  return "data" if bound is None else _trips(program, frame, right, bound, _MIRRORED[direction[1]])


def _trips(
  program: HloModule, frame: Frame, counter: Instruction, bound: int, relation: str
) -> TripCount:
  """Counts iterations until `counter`, which the loop carries, is not in `relation` to `bound`."""
  source = _loop_carry_of(frame, counter)
  carried = _initial_value(*source) if source else None
  if source is None or carried is None:
    return "unreadable"
  first, step = _value(program, *carried), _increment(program, *source)
  if first is None:
    return "data"
  distance = bound - first
  if relation.startswith("G"):
    distance, step = -distance, -step if step else step
  distance += relation in ("LE", "GE")
  if relation != "NE" and distance <= 0:
    return 0
  # What never ends, or would by the counter's overflow alone, was not understood.
  if not step or distance / step < 0 or (relation == "NE" and distance % step):
    return "unreadable"
  return -(-distance // step)


def _loop_carry_of(frame: Frame, one: Instruction) -> tuple[Frame, Instruction] | None:
  """Returns the get-tuple-element that reads `one` from a loop's carry, with its frame."""
  while one.opcode in _SAME_VALUE and one.operands:
    one = frame.computation.instructions[one.operands[0]]
  if one.opcode == "parameter" and frame.caller and frame.outer:
    outer = frame.outer.computation.operand(frame.caller, int(one.arguments))
    return _loop_carry_of(frame.outer, outer) if outer else None
  return (frame, one) if one.opcode == "get-tuple-element" else None


def _increment(program: HloModule, frame: Frame, counter: Instruction) -> int | None:
  """Returns what one iteration adds to the counter, negative if it counts down; None if it cannot
  be read."""
  if frame.caller is None or frame.outer is None or counter.index is None:
    return None
  body = frame.outer.inner(program.computations[frame.caller.called["body"][0]], frame.caller)
  root = body.computation.instructions[body.computation.root]
  new = body.computation.operand(root, counter.index) if root.opcode == "tuple" else None
  added = _added_to_carry(program, body, new, counter.index) if new else None
  if added is None:
    return None
  # An unsigned counter goes down by one when 2^32 - 1 is added.
  half = 2 ** (8 * counter.bytes - 1)
  return (added + half) % (2 * half) - half


def _added_to_carry(program: HloModule, frame: Frame, one: Instruction, index: int) -> int | None:
  """Returns how much `one` exceeds the carry element `index` of its iteration; None if not
  static."""
  source = _loop_carry_of(frame, one)
  if source:
    return 0 if source[1].index == index else None
  if one.opcode == "fusion":
    called = frame.inner(program.called_by(one)[0], one)
    root = called.computation.instructions[called.computation.root]
    return _added_to_carry(program, called, root, index)
  if one.opcode not in ("add", "subtract"):
    return None
  left, right = (frame.computation.instructions[name] for name in one.operands)
  before, value = _added_to_carry(program, frame, left, index), _value(program, frame, right)
  if one.opcode == "add" and (before is None or value is None):
    before, value = _added_to_carry(program, frame, right, index), _value(program, frame, left)
  if before is None or value is None:
    return None
  return before + (value if one.opcode == "add" else -value)


def _value(program: HloModule, frame: Frame, one: Instruction) -> int | None:
  """Returns the value of a scalar integer that is the same in all iterations of the enclosing
  loops."""
  if one.opcode == "constant":
    return int(one.arguments) if re.fullmatch(r"-?\d+", one.arguments) else None
  if one.opcode in _SAME_VALUE and one.operands:
    return _value(program, frame, frame.computation.instructions[one.operands[0]])
  if one.opcode == "parameter" and frame.caller and frame.caller.opcode != "while" and frame.outer:
    outer = frame.outer.computation.operand(frame.caller, int(one.arguments))
    return _value(program, frame.outer, outer) if outer else None
  if one.opcode != "get-tuple-element" or not _is_loop_invariant(program, frame, one):
    return None
  carried = _initial_value(frame, one)
  return _value(program, *carried) if carried else None


def _initial_value(frame: Frame, one: Instruction) -> tuple[Frame, Instruction] | None:
  """Returns the initial value, from outside the loop, of the carry element that `one` reads."""
  source = frame.computation.operand(one, 0)
  if one.opcode != "get-tuple-element" or source is None or source.opcode != "parameter":
    return None
  if frame.caller is None or frame.outer is None or frame.caller.opcode != "while":
    return None
  initial = frame.outer.computation.operand(frame.caller, 0)
  if initial is None or initial.opcode != "tuple" or one.index is None:
    return None
  element = frame.outer.computation.operand(initial, one.index)
  return (frame.outer, element) if element else None


def _is_loop_invariant(program: HloModule, frame: Frame, one: Instruction) -> bool:
  """Returns whether the loop's body passes on the carry element that `one` reads unchanged."""
  if frame.caller is None or frame.caller.opcode != "while" or one.index is None:
    return False
  body = program.computations[frame.caller.called["body"][0]]
  root = body.instructions[body.root]
  new = body.operand(root, one.index) if root.opcode == "tuple" else None
  return new is not None and new.opcode == "get-tuple-element" and new.index == one.index


_CONTRACTED = re.compile(r"lhs_contracting_dim(?:s|ensions)\"?[=:][{\[]([\d,\"]*)[}\]]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")
_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:matmul|gemm)|__onednn\$matmul|EigenMatMul")
_CUDNN = re.compile(r"__cudnn\$fmha\w*?(Backward)?(?:F8)?$")
_LOGITS = re.compile(r'"intermediate_tensor_shape": ?\{[^{}]*?"dimensions": ?\[([^\]]*)\]')
_SLIDING = re.compile(r'"sliding_window_length": ?"?(\d+)')

CUDNN_PRODUCTS = {"forward": 2, "backward": 5}
"""Those of cuDNN's attention; its backward pass forms logits and gradient of the weights once."""


def tokens_seen(window: int, length: int) -> float:
  """Returns how many tokens a token of a row of `length` sees on average, half of itself; window 0: all."""
  window = min(window or length, length)
  return window - window * (window - 1) / (2 * length) - 0.5


def attention_pairs(queries: int, keys: int, window: int) -> float:
  """Returns the pairs of query and key that causal attention multiplies: half, or those in a window."""
  half = queries * keys / 2
  return min(half, window * queries - window * window / 2) if window else half


@dataclasses.dataclass(frozen=True)
class Products:
  """Matrix products of one execution of an instruction."""

  flops: int = 0
  """As the mathematics needs; for causal attention only the half below the diagonal."""
  executed: int = 0
  """As computed; kernels also compute the upper half of the blocks on the diagonal."""
  width: int = 0
  """Attention kernels: head_dim, which fills only part of a wider matrix unit; 0 for others."""
  backward: bool = False
  """Of GPUs' attention kernels, whether it is the backward pass."""
  attention: AttentionKernel | None = None
  """Of the TPUs', what the kernel does."""

  def __add__(self, other: "Products") -> "Products":
    return Products(
      self.flops + other.flops,
      self.executed + other.executed,
      max(self.width, other.width),
      self.backward or other.backward,
      self.attention or other.attention,
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
  if cudnn := _CUDNN.search(one.target):
    return _cudnn(within, one, backward=bool(cudnn[1]))
  if splash := read_splash(within, one):
    every = 2 * splash.count * splash.queries.elements * splash.whole
    shares = round(every * splash.counted), round(every * splash.computed)
    return Products(*shares, splash.queries.dims[-1], attention=splash.kernel)
  return Products()


def _cudnn(within: Computation, one: Instruction, *, backward: bool) -> Products:
  """Counts the products of cuDNN's attention, whose configuration has the shape of the logits.

  Queries, of any layout, are the first operand; masks other than causal ones are taken for such.
  """
  logits, window = _LOGITS.search(one.attributes), _SLIDING.search(one.attributes)
  queries = within.operand(one, 0)
  if logits is None or queries is None:
    return Products()
  batch, heads, rows, columns = (int(size) for size in re.findall(r"\d+", logits[1]))
  width = queries.shapes[0].elements // (batch * heads * rows)
  pairs = attention_pairs(rows, columns, int(window[1]) if window else 0)
  count = CUDNN_PRODUCTS["backward" if backward else "forward"]
  flops = int(2 * count * batch * heads * pairs * width)
  return Products(flops, flops, width, backward)
