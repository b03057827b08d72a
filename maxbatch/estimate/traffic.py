"""Bytes that an instruction reads from HBM and writes to it.

Operands and results in other memories, such as a TPU's vector memory S(1), are not counted. Slices
read, and in-place updates write, only their own part of an array.
"""

from maxbatch.estimate.hlo import ArrayShape, Computation, HloModule, Instruction

FREE = frozenset(
  (
    "parameter",
    "recv",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
    "partition-id",
    "replica-id",
    "add-dependency",
    "domain",
    "while",
    "call",
    "conditional",
  )
)
"""Opcodes that read and write nothing themselves."""

_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_MOVES = ("copy-start", "slice-start")
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)


def traffic(program: HloModule, within: Computation, one: Instruction) -> int:
  """Returns bytes read and written in one execution of `one`."""
  if one.opcode in FREE or one.opcode.endswith("-done"):
    return 0
  if one.opcode in _MOVES:
    # The smaller of source and target, once for each that is in HBM.
    ends = one.shapes[:2]
    return min(end.bytes for end in ends) * sum(end.space == 0 for end in ends)
  if one.opcode == "send":
    return within.instructions[one.operands[0]].bytes
  if one.opcode == "async-start":
    bodies = program.called_by(one)
    return sum(traffic(program, body, inner) for body in bodies for inner in body)
  if one.opcode == "fusion":
    return _fusion(program, within, one)
  operands = [within.instructions[name] for name in one.operands]
  read = sum(_read(program, one, number, operand) for number, operand in enumerate(operands))
  return read + _written(within, one, one.shapes)


def _read(program: HloModule, user: Instruction, number: int, operand: Instruction) -> int:
  """Returns bytes that `user` reads of its operand `number`."""
  if user.opcode in _SLICES and number == 0:
    return sum(shape.bytes for shape in user.shapes if operand.shapes[0].space == 0)
  if user.opcode in _UPDATES and number == 0:
    return 0
  return _in_main_memory(operand.shapes)


def _in_main_memory(shapes: tuple[ArrayShape, ...]) -> int:
  return sum(shape.bytes for shape in shapes if shape.space == 0)


def _written(within: Computation, one: Instruction, places: tuple[ArrayShape, ...]) -> int:
  """Returns bytes that `one` writes to its results at `places`."""
  if one.opcode not in _UPDATES:
    return _in_main_memory(places)
  update = within.operand(one, 2 if one.opcode == "scatter" else 1)
  return sum(shape.bytes for shape in update.shapes) if update and places[0].space == 0 else 0


def _fusion(program: HloModule, within: Computation, one: Instruction) -> int:
  """Returns bytes of a fusion's inputs and outputs; intermediate values do not reach HBM."""
  body = program.called_by(one)[0]
  total = 0
  for parameter, name in zip(body.parameters(), one.operands, strict=True):
    shapes = within.instructions[name].shapes
    if any(shape.space == 0 for shape in shapes):
      total += min(_bytes_read(program, body, parameter), sum(shape.bytes for shape in shapes))
  for result, place in zip(_results(body), one.shapes, strict=False):
    total += _bytes_written(program, body, result, place)
  return total


def _bytes_read(program: HloModule, body: Computation, value: Instruction) -> int:
  """Returns bytes of `value`, in HBM, that its users in a fusion read."""
  total = 0
  users = (
    (user, number)
    for user in body
    for number, name in enumerate(user.operands)
    if name == value.name
  )
  for user, number in users:
    if user.opcode == "bitcast":
      total += _bytes_read(program, body, user)
    elif user.opcode == "fusion":
      inner = program.called_by(user)[0]
      total += _bytes_read(program, inner, inner.parameters()[number])
    elif user.opcode in _SLICES and number == 0:
      total += user.bytes
    elif not (
      # Passed on, updated in place or sent.
      user.opcode == "tuple"
      or user.opcode in COLLECTIVES
      or (user.opcode in _UPDATES and number == 0)
    ):
      return value.bytes
  return total


def _results(body: Computation) -> list[Instruction]:
  root = body.instructions[body.root]
  if root.opcode == "tuple":
    return [body.instructions[name] for name in root.operands]
  return [root]


def _bytes_written(
  program: HloModule, body: Computation, result: Instruction, place: ArrayShape
) -> int:
  """Returns bytes written at `place` by the instruction in a fusion that computes `result`."""
  while result.opcode == "bitcast":
    result = body.instructions[result.operands[0]]
  if result.opcode == "fusion":
    inner = program.called_by(result)[0]
    return _bytes_written(program, inner, inner.instructions[inner.root], place)
  if result.opcode == "parameter" or result.opcode in COLLECTIVES:
    return 0
  return _written(body, result, (place,))
