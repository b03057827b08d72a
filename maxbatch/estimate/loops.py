"""Trip counts of while loops, where they are static."""

import dataclasses
import re
from typing import Literal

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
