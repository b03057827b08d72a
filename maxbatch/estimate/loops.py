"""Trip counts of while loops, where they are static."""

import dataclasses
import re

from maxbatch.estimate.hlo import Computation, HloModule, Instruction

_SAME_VALUE = ("copy", "convert", "bitcast", "reshape", "broadcast", "copy-done", "copy-start")


@dataclasses.dataclass(frozen=True)
class Frame:
  """A call frame: a computation, the instruction that calls it, and the caller's frame."""

  computation: Computation
  caller: Instruction | None = None
  outer: "Frame | None" = None

  def inner(self, computation: Computation, caller: Instruction) -> "Frame":
    """The frame of a computation that `caller`, an instruction of this frame, calls."""
    return Frame(computation, caller, self)


def trip_count(program: HloModule, frame: Frame, loop: Instruction) -> int | None:
  """The trip count of `loop`; None if it depends on data, as for the loop over microbatches.

  Some platforms record it. Elsewhere the condition compares a counter with a constant, which may
  be passed into the loop from outside.
  """
  if loop.known_trip_count is not None:
    return loop.known_trip_count
  condition = frame.inner(program.computations[loop.called["condition"][0]], loop)
  return _trips_while_true(
    program, condition, condition.computation.instructions[condition.computation.root]
  )


def _trips_while_true(program: HloModule, frame: Frame, test: Instruction) -> int | None:
  """The number of iterations for which the comparison `test` holds; None if it depends on data."""
  if test.opcode == "fusion":
    called = frame.inner(program.called_by(test)[0], test)
    return _trips_while_true(
      program, called, called.computation.instructions[called.computation.root]
    )
  if test.opcode != "compare":
    return None
  up = "direction=L" in test.attributes
  counter, limit = (
    frame.computation.operand(test, number) for number in ((0, 1) if up else (1, 0))
  )
  source = _loop_carry_of(frame, counter) if counter else None
  last = _value(program, frame, limit) if limit else None
  if source is None or last is None:
    return None
  loop, taken = source
  carried = _initial_value(loop, taken)
  first = _value(program, *carried) if carried else None
  if first is None:
    return None
  last += "direction=LE" in test.attributes or "direction=GE" in test.attributes
  return max(0, -(-(last - first) // _increment(program, loop, taken)))


def _loop_carry_of(frame: Frame, one: Instruction) -> tuple[Frame, Instruction] | None:
  """The get-tuple-element that reads `one` from a loop's carry, with its frame."""
  while one.opcode in _SAME_VALUE and one.operands:
    one = frame.computation.instructions[one.operands[0]]
  if one.opcode == "parameter" and frame.caller and frame.outer:
    outer = frame.outer.computation.operand(frame.caller, int(one.arguments))
    return _loop_carry_of(frame.outer, outer) if outer else None
  return (frame, one) if one.opcode == "get-tuple-element" else None


def _increment(program: HloModule, frame: Frame, counter: Instruction) -> int:
  """What one trip adds to the counter; 1 unless the loop was unrolled."""
  assert frame.caller is not None
  assert frame.outer is not None
  assert counter.index is not None
  body = frame.outer.inner(program.computations[frame.caller.called["body"][0]], frame.caller)
  new = body.computation.operand(
    body.computation.instructions[body.computation.root], counter.index
  )
  if new is None or new.opcode != "add":
    return 1
  added = (body.computation.instructions[name] for name in new.operands)
  return next((value for one in added if (value := _value(program, body, one))), 1)


def _value(program: HloModule, frame: Frame, one: Instruction) -> int | None:
  """The value of a scalar integer that is the same in all iterations of the enclosing loops."""
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
  """The initial value, from outside the loop, of the carry element that `one` reads."""
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
  """Whether the loop's body passes on the carry element that `one` reads unchanged."""
  if frame.caller is None or frame.caller.opcode != "while" or one.index is None:
    return False
  body = program.computations[frame.caller.called["body"][0]]
  root = body.instructions[body.root]
  new = body.operand(root, one.index) if root.opcode == "tuple" else None
  return new is not None and new.opcode == "get-tuple-element" and new.index == one.index
