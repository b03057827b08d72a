"""Parses the text of a compiled HLO module, without jax or protobuf.

The format is that of `jax.stages.Compiled.as_text()`; see openxla.org/xla/operation_semantics and
openxla.org/xla/hlo_dumps. The TPU's backend_config and memory spaces, S(n) after a layout, are not
documented; their meaning here is inferred from compiled programs.

Parses the replica groups of a collective, which HLO writes in three formats.

Explicit lists {{0,1},{2,3}}; a reshaped and transposed iota, [2,2]<=[4] or [2,2]<=[2,2]T(1,0); and
axes of a mesh, mesh['a'=2,'b'=2] {'b'}.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"(?:replica_groups=|device_ids=\(?)\[([\d,]+)\](?:<=\[([\d,]+)\])?")
_TRANSPOSE = re.compile(r"(?:<=)?\[[\d,]+\]\)?\s*T\(([\d,]+)\)")
_MESH = re.compile(r"replica_groups=@?\w*mesh\w*\[([^\]]*)\](.*?)\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
  """Groups of device numbers; the devices of a group communicate with each other."""

  groups: tuple[tuple[int, ...], ...]

  @property
  def size(self) -> int:
    """Devices of the largest group."""
    return max((len(group) for group in self.groups), default=1)

  def crosses(self, devices_per_slice: int) -> bool:
    """Returns whether any group spans two slices; devices are numbered slice by slice."""
    return any(len({one // devices_per_slice for one in group}) > 1 for group in self.groups)


def parse_groups(attributes: str, num_devices: int) -> ReplicaGroups:
  """Returns the groups in a collective's attributes; absent or empty groups mean all devices."""
  if result := _PAIRS.search(attributes):
    return ReplicaGroups(_lists(result[1]))
  if result := _MESH.search(attributes):
    return ReplicaGroups(_mesh_groups(*result.groups()))
  if result := _IOTA.search(attributes):
    permutation = _TRANSPOSE.search(attributes, result.start())
    return ReplicaGroups(
      _iota_groups(result[1], result[2] or "", permutation[1] if permutation else "")
    )
  result = _LISTS.search(attributes)
  groups = _lists(result[1]) if result else ()
  return ReplicaGroups(groups or (tuple(range(num_devices)),))


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(number) for number in text.split(",") if number)


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
  return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text))


def _iota_groups(shape: str, source: str, permutation: str) -> tuple[tuple[int, ...], ...]:
  """Returns [number of groups, size of each] over a transposed iota."""
  sizes = _numbers(shape)
  devices = _transposed(_numbers(source) or (math.prod(sizes),), _numbers(permutation))
  return _split(devices, sizes[-1])


def _mesh_groups(mesh: str, order: str, used: str) -> tuple[tuple[int, ...], ...]:
  """Returns groups along the axes `used`, over the devices of the mesh in row-major order.

  An axis may be used in part, 'a':(p)s. It is then split into three axes, of p, s and the remaining
  devices, of which the middle one is used.
  """
  parts: list[int] = []
  inside: list[int] = []
  chosen = {name: (before, size) for name, before, size in _USED.findall(used)}
  for name, size in _AXIS.findall(mesh):
    before, part = chosen.get(name, ("", ""))
    if not part:
      inside += [len(parts)] if name in chosen else []
      parts.append(int(size))
      continue
    inside.append(len(parts) + 1)
    parts += [int(before), int(part), int(size) // (int(before) * int(part))]
  outside = [axis for axis in range(len(parts)) if axis not in inside]
  places = _transposed(parts, [*outside, *inside])
  devices = _device_order(order, math.prod(parts))
  return _split([devices[place] for place in places], math.prod(parts[axis] for axis in inside))


def _device_order(text: str, count: int) -> Sequence[int]:
  """Returns the mesh's devices in row-major order: 0, 1, 2, … unless device_ids are given."""
  result = _IOTA.search(text)
  if result is None:
    return range(count)
  permutation = _TRANSPOSE.search(text, result.start())
  return _transposed(
    _numbers(result[2] or result[1]), _numbers(permutation[1]) if permutation else ()
  )


def _transposed(sizes: Sequence[int], permutation: Sequence[int]) -> list[int]:
  """Returns iota(sizes).transpose(permutation), flattened; no permutation leaves the order."""
  strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
  axes = permutation or range(len(sizes))
  steps = ([strides[axis] * place for place in range(sizes[axis])] for axis in axes)
  return [sum(offsets) for offsets in itertools.product(*steps)]


def _split(devices: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
  return tuple(tuple(devices[at : at + size]) for at in range(0, len(devices), size))


_BITS = re.compile(r"(?:s|u|f|bf|c)(\d+)")
_BODY_START = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*|.*-> .*)?\{")
_BODY_END = re.compile(r"\}(?:, execution_thread.*)?")
_ASSIGNED = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_BRACKET = re.compile(r"[()]")
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_NESTING = re.compile(r"[()\[\]{},]")
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
  r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_MICROSECONDS = re.compile(r'"exec_time_us":([\d.e+-]+)[^{}]*"name":"sol"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_COST = re.compile(r'"?cost_estimate"?[:=]\{([^}]*)\}')
_NUMBER = re.compile(r'"?(\w+)"?[:=]"?(\d+)')
_PARTITIONS = re.compile(r"(?:num_partitions|replica_count)=(\d+)")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
  """An array's element type, dimensions and memory space (0: HBM)."""

  dtype: str
  dims: tuple[int, ...]
  space: int = 0

  @property
  def elements(self) -> int:
    """Number of elements; 1 for a scalar."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Size without the padding of a tiled layout; 0 for HLO tokens and opaque values."""
    # f8e4m3 and similar types begin with their width.
    result = _BITS.match(self.dtype)
    bits = int(result[1]) if result else 8 * (self.dtype == "pred")
    return -(-self.elements * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of HLO."""

  name: str
  opcode: str
  shapes: tuple[ArrayShape, ...]
  """The arrays of the result; nested tuples are flattened."""
  operands: tuple[str, ...]
  """Names, within the same computation."""
  arguments: str
  """The text in the parentheses: a constant's value, a parameter's number."""
  attributes: str
  """The text after the parentheses."""
  called: Mapping[str, tuple[str, ...]]
  """Computations by the attribute that names them: calls, to_apply, body, condition, …"""
  op_name: str
  """jax's path of named scopes and transformations; empty if unknown."""
  cycles: float | None
  """The compiler's own estimate of one execution, in cycles of a TPU or microseconds of a GPU; None if it
  has none."""
  target: str
  """custom_call_target; empty for other instructions."""

  @property
  def bytes(self) -> int:
    """Bytes of the whole result."""
    return sum(shape.bytes for shape in self.shapes)

  @property
  def computations(self) -> tuple[str, ...]:
    """All computations it calls."""
    return tuple(name for names in self.called.values() for name in names)

  @property
  def cost_estimate(self) -> Mapping[str, int]:
    """A custom call's cost_estimate: flops, transcendentals, bytes_accessed; empty if absent."""
    result = _COST.search(self.attributes)
    return {key: int(n) for key, n in _NUMBER.findall(result[1])} if result else {}

  @property
  def known_trip_count(self) -> int | None:
    """A while loop's trip count, if the compiler recorded it."""
    result = _TRIPS.search(self.attributes)
    return int(result[1]) if result else None

  @property
  def index(self) -> int | None:
    """The element that a get-tuple-element takes."""
    result = re.search(r"\bindex=(\d+)", self.attributes)
    return int(result[1]) if result else None


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions by name, in the order of the text."""

  name: str
  instructions: Mapping[str, Instruction]
  root: str

  def __iter__(self) -> Iterator[Instruction]:
    return iter(self.instructions.values())

  def operand(self, instruction: Instruction, number: int) -> Instruction | None:
    """Returns the instruction that defines an operand; None if there is no such operand."""
    if number >= len(instruction.operands):
      return None
    return self.instructions.get(instruction.operands[number])

  def parameters(self) -> list[Instruction]:
    """Returns the parameters in order of their numbers."""
    results = [one for one in self if one.opcode == "parameter"]
    return sorted(results, key=lambda one: int(one.arguments))


@dataclasses.dataclass(frozen=True)
class HloModule:
  """A compiled HLO module."""

  computations: Mapping[str, Computation]
  entry: str
  num_devices: int
  """Devices that run it together: replicas times partitions."""

  def called_by(self, instruction: Instruction) -> list[Computation]:
    """Returns the computations an instruction calls."""
    return [self.computations[name] for name in instruction.computations]

  def groups(self, instruction: Instruction) -> ReplicaGroups:
    """Returns the replica groups of a collective."""
    return parse_groups(instruction.attributes, self.num_devices)


def parse(text: str) -> HloModule:
  """Parses the text of `compiled.as_text()`.

  Raises:
    ValueError: the text is no HLO module or has no entry computation.
  """
  computations: dict[str, Computation] = {}
  entry = ""
  for is_entry, name, lines in _bodies(text):
    computations[name] = _computation(name, lines)
    entry = name if is_entry else entry
  if not entry:
    raise ValueError("not HLO text: there is no ENTRY computation")
  devices = math.prod(map(int, _PARTITIONS.findall(text.partition("\n")[0])))
  return HloModule(computations, entry, devices)


def _bodies(text: str) -> Iterator[tuple[bool, str, list[str]]]:
  """Yields (is entry, name, instructions) of each computation; a kernel's metadata may span
  lines."""
  head: tuple[bool, str] | None = None
  lines: list[str] = []
  for line in text.splitlines():
    if head is None:
      start = _BODY_START.fullmatch(line.rstrip())
      if start and start[2] != "HloModule":
        head, lines = (bool(start[1]), start[2]), []
    elif _BODY_END.fullmatch(line):
      yield *head, lines
      head = None
    elif _ASSIGNED.match(line):
      lines.append(line)
    elif lines:
      lines[-1] += line


def _computation(name: str, lines: list[str]) -> Computation:
  instructions: dict[str, Instruction] = {}
  types: dict[str, str] = {}
  root = ""
  for line in lines:
    result = _ASSIGNED.match(line)
    assert result is not None
    one = _instruction(result[2], line[result.end() :])
    for operand in one.operands:
      for each in _elements(operand, types):
        instructions[each.name] = each
    instructions[one.name], types[one.name] = one, line[result.end() :]
    root = one.name if result[1] else root
  return Computation(name, instructions, root or next(reversed(instructions), ""))


def _elements(operand: str, types: dict[str, str]) -> Iterator[Instruction]:
  """Yields the get-tuple-elements, under the names they are used by, that an operand `x#3` stands
  for.

  So writes the compiler of jax 0.12; `x#3#1` is an element of an element. Earlier ones write an
  instruction of its own: `%y = type get-tuple-element(%x), index=3`.

  Args:
    types: of what is defined so far, each the beginning of the text; the elements' are added.

  Raises:
    ValueError: there is no such element.
  """
  source, mark, number = operand.rpartition("#")
  if not mark or operand in types:
    return
  yield from _elements(source, types)
  inner = _types_in_tuple(types.get(source, ""))
  if int(number) >= len(inner):
    raise ValueError(f"not HLO text: there is no element {number} of %{source}")
  types[operand] = inner[int(number)]
  yield _instruction(operand, f"{types[operand]} get-tuple-element(%{source}), index={number}")


def _types_in_tuple(text: str) -> list[str]:
  """Returns the types in a tuple type, (f32[8,128]{1,0}, (s32[], s32[])); none for another type."""
  if not text.startswith("("):
    return []
  depth, starts, ends = 0, [1], []
  for mark in _NESTING.finditer(text, 0, _closing(text, 0)):
    depth += (mark[0] in "([{") - (mark[0] in ")]}")
    if mark[0] == "," and depth == 1:
      ends.append(mark.start())
      starts.append(mark.end())
  ends.append(_closing(text, 0) - 1)
  inner = (text[start:end] for start, end in zip(starts, ends, strict=True))
  return [re.sub(r"/\*.*?\*/", "", each).strip() for each in inner]


def _instruction(name: str, text: str) -> Instruction:
  """Parses `type opcode(arguments), attributes`."""
  end_of_type = _closing(text, 0) if text.startswith("(") else text.find(" ")
  opcode = _OPCODE.match(text, end_of_type)
  if opcode is None:
    raise ValueError(f"not an HLO instruction: %{name} = {text[:80]}")
  end = _closing(text, opcode.end() - 1)
  arguments, attributes = text[opcode.end() : end - 1], text[end:]
  op_name = _OP_NAME.search(attributes)
  cycles = _CYCLES.search(attributes) or _MICROSECONDS.search(attributes)
  target = _TARGET.search(attributes)
  return Instruction(
    name,
    opcode[1],
    _shapes(text[:end_of_type]),
    () if opcode[1] in ("constant", "parameter") else tuple(_OPERAND.findall(arguments)),
    arguments,
    attributes,
    {key: tuple(re.findall(r"[\w.\-]+", names)) for key, names in _CALLED.findall(attributes)},
    op_name[1] if op_name else "",
    float(cycles[1]) if cycles else None,
    target[1] if target else "",
  )


def _closing(text: str, start: int) -> int:
  """Returns the index after the parenthesis that closes the one at `start`."""
  depth = 0
  for bracket in _BRACKET.finditer(text, start):
    depth += 1 if bracket[0] == "(" else -1
    if depth == 0:
      return bracket.end()
  raise ValueError(f"not HLO text: unclosed parenthesis in {text[:80]}")


def _shapes(text: str) -> tuple[ArrayShape, ...]:
  """Returns the arrays in a type such as f32[8,128]{1,0:T(8,128)S(1)} or a tuple of them."""
  shapes = []
  for dtype, dims, layout in _ARRAY.findall(text):
    space = _SPACE.search(layout)
    sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
    shapes.append(ArrayShape(dtype, sizes, int(space[1]) if space else 0))
  return tuple(shapes)
