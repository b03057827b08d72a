"""The operations of a compiled program as a flat list, with FLOPs, bytes and executions of each.

To which part of the model an operation belongs: by jax's named scopes.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from maxbatch.estimate.flops import Frame, Products, products, trip_count
from maxbatch.estimate.gpu_corrections import is_placeholder, overcharge
from maxbatch.estimate.hlo import Computation, HloModule, Instruction, ReplicaGroups
from maxbatch.estimate.traffic import COLLECTIVES, FREE, traffic

SCOPES = ("attention", "mlp", "norm", "embedding", "head", "optimizer")
"""The model's parts, by jax.named_scope."""
OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Naming:
  """What in a program's names stands for which part of the model."""

  words: Mapping[str, str]
  """Parts by a word of jax's path of scopes; the innermost counts."""

  def of(self, one: Instruction) -> str:
    """Returns the part that an instruction's own names say, without what it calls; or "other".

    transpose(jvp(mlp)) is mlp; splash attention needs no scope.
    """
    words = re.findall(r"\w+", one.op_name or one.name)
    named = [self.words[word] for word in words if word in self.words]
    if named:
      return named[-1]
    return "attention" if any("splash_m" in word for word in words) else OTHER


OURS = Naming({scope: scope for scope in SCOPES} | {"experts": "mlp"})


def scope_of(
  naming: Naming, program: HloModule, one: Instruction, called: Sequence[Computation], around: str
) -> str:
  """Returns an instruction's innermost scope, else the called code's most frequent, else `around`."""
  own = naming.of(one)
  if own != OTHER:
    return own
  inner = [naming.of(each) for body in called for each in _inner(program, body)]
  return max(SCOPES, key=inner.count) if set(inner) - {OTHER} else around


def _inner(program: HloModule, body: Computation) -> Iterator[Instruction]:
  for inner in body:
    yield inner
    for called in program.called_by(inner):
      yield from _inner(program, called)


Kind = Literal["products", "kernels", "relayouts", "slices", "copies", "elementwise"]
"""products: matrix products, with what is fused with them. kernels: custom calls, such as attention's.
relayouts: transposes and copies into another layout, with casts. slices: parts taken out of arrays or
written into them. copies: asynchronous ones between memories. elementwise: the rest, reductions too."""

_PRODUCTS = ("dot", "convolution")
_ASYNCHRONOUS = ("copy-start", "slice-start", "async-start", "dynamic-slice-start")
_RELAYOUTS = ("copy", "transpose", "reshape")
_SLICES = (
  "dynamic-slice",
  "dynamic-update-slice",
  "slice",
  "concatenate",
  "pad",
  "gather",
  "scatter",
)
_NEUTRAL = (
  "parameter",
  "constant",
  "bitcast",
  "tuple",
  "get-tuple-element",
  "convert",
  "broadcast",
  "fusion",
  "call",
)
_NO_OPS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding")
"""Custom calls that are compiler annotations and do no work."""
_WRAPPERS = ("fusion", "async-start", "call-start")


def kind_of(program: HloModule, one: Instruction) -> Kind:
  """Returns the kind of an instruction, by all that it calls."""
  inside = list(_inside(program, one))
  opcodes = {each.opcode for each in inside if each.opcode not in _NEUTRAL}
  if opcodes & set(_PRODUCTS):
    return "products"
  if one.opcode in _ASYNCHRONOUS:
    return "copies"
  if one.opcode == "custom-call":
    return "kernels"
  # Numbers that say where a slice lies are no work.
  arrays = [each for each in inside if any(shape.elements > 1 for shape in each.shapes)]
  moved = {each.opcode for each in arrays} - set(_NEUTRAL)
  if moved and moved <= set(_RELAYOUTS):
    return "relayouts"
  if moved and moved <= {*_RELAYOUTS, *_SLICES}:
    return "slices"
  return "elementwise"


def _inside(program: HloModule, one: Instruction) -> Iterator[Instruction]:
  """Yields the instruction, and all in the computations it calls."""
  yield one
  if one.opcode in ("fusion", "async-start", "call-start", "custom-call", "call"):
    for body in program.called_by(one):
      for each in body:
        yield from _inside(program, each)


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective: communication between devices."""

  kind: str
  """all-gather, all-reduce, reduce-scatter, …"""
  bytes: int
  """Bytes of the full array: the output of an all-gather, the input of a reduction."""
  groups: ReplicaGroups
  slices: int = 1
  """The number of slices, where they communicate through their hosts. Each slice then runs a
  program of its own, and `groups` does not apply."""
  cycles: float | None = None
  """The compiler's estimate, which it has for GPUs; None if there is none."""

  @property
  def group_size(self) -> int:
    """Devices that communicate; between slices, one of each."""
    return self.slices if self.slices > 1 else self.groups.size

  def crosses(self, devices_per_slice: int | None) -> bool:
    """Returns whether data travels between slices."""
    inside = devices_per_slice is None or not self.groups.crosses(devices_per_slice)
    return self.slices > 1 or not inside


@dataclasses.dataclass(frozen=True)
class OperationCost:
  """One operation. All figures are for one execution on one device, except `count`."""

  name: str
  opcode: str
  op_name: str
  """jax's path of scopes and transformations."""
  scope: str
  """One of SCOPES, or "other"."""
  loop: str
  """The computation that contains it: the body of the innermost loop, or the entry."""
  in_microbatch_loop: bool
  count: int
  """Executions per microbatch inside the loop over microbatches, elsewhere per step."""
  products: Products
  bytes: int
  """Read from and written to HBM."""
  cycles: float | None
  """The compiler's estimate; None if there is none."""
  collective: Collective | None = None
  condition: str = ""
  """op_name of the innermost conditional that contains it; empty if there is none."""
  overlapped: bool = False
  """Whether it is asynchronous: a collective or copy that overlaps with later operations."""
  unread_loops: tuple[str, ...] = ()
  """Loops around it, by op_name or name, that count as one trip for want of a readable count."""
  kind: Kind = "elementwise"
  """What it does, but for collectives."""
  overcharge: int = 1
  """How many times too long the estimate for a GPU is."""

  @property
  def flops(self) -> int:
    """FLOPs of matrix products."""
    return self.products.flops


@dataclasses.dataclass(frozen=True)
class _Place:
  """The position of the walk through the program."""

  frame: Frame
  loop: str
  count: int
  in_microbatch_loop: bool
  naming: Naming = OURS
  scope: str = OTHER
  """The scope of the enclosing loop."""
  condition: str = ""
  """op_name of the innermost conditional that has one."""
  unread_loops: tuple[str, ...] = ()


def program_costs(program: HloModule, naming: Naming = OURS) -> Sequence[OperationCost]:
  """Returns the operations of a compiled step; those in the loop over microbatches count once.

  That loop is the one whose bound is data. A second such loop inside it, and a loop that cannot be
  read, count as one trip. A conditional counts as its most expensive branch.

  Args:
    naming: what its names say of the model's parts.
  """
  entry = program.computations[program.entry]
  return list(_walk(program, _Place(Frame(entry), entry.name, 1, False, naming)))


def _walk(program: HloModule, place: _Place) -> Iterator[OperationCost]:
  frame = place.frame
  started: set[str] = set()
  for one in frame.computation:
    if one.opcode == "while":
      yield from _walk(program, _inside_loop(program, place, one))
    elif one.opcode in ("call", "conditional"):
      yield from _walk(program, _inside_branch(program, place, one))
    elif one.opcode in FREE or one.target in _NO_OPS or one.opcode.endswith(("-done", "-update")):
      continue  # It does no work, or waits for what does.
    else:
      yield from _operation(program, place, one, started)


def _inside_loop(program: HloModule, place: _Place, loop: Instruction) -> _Place:
  body = program.computations[loop.called["body"][0]]
  number = trip_count(program, place.frame, loop)
  is_static = isinstance(number, int)
  unread = number == "unreadable" or (number == "data" and place.in_microbatch_loop)
  return _Place(
    place.frame.inner(body, loop),
    body.name,
    place.count * (number if is_static else 1),
    place.in_microbatch_loop or number == "data",
    place.naming,
    scope_of(place.naming, program, loop, (), place.scope),
    place.condition,
    (*place.unread_loops, *([loop.op_name or loop.name] if unread else [])),
  )


def _inside_branch(program: HloModule, place: _Place, one: Instruction) -> _Place:
  """Returns the place in the computation called; of several branches in the one with most FLOPs, then bytes."""

  def cost(body: Computation) -> tuple[int, int]:
    total = sum((products(program, body, each) for each in body), Products())
    return total.flops, sum(traffic(program, body, each) for each in body)

  branches = program.called_by(one)
  costliest = branches[0] if len(branches) == 1 else max(branches, key=cost)
  condition = one.op_name if one.opcode == "conditional" else ""
  return dataclasses.replace(
    place, frame=place.frame.inner(costliest, one), condition=condition or place.condition
  )


def _operation(
  program: HloModule, place: _Place, one: Instruction, started: set[str]
) -> Iterator[OperationCost]:
  """Yields the cost of one instruction; a collective that is split into start and done counts once.

  Args:
    started: channels of the collectives already started in this computation.
  """
  within = place.frame.computation
  result = _collective(program, within, one)
  # Of the custom calls inside a fusion.
  bodies = program.called_by(one) if one.opcode == "fusion" else []
  targets = {inner.target for body in bodies for inner in body}
  if "AsyncCollectiveDone" in targets:
    return
  number = re.search(r"channel_id=(\d+)", result[1].attributes) if result else None
  channel = number[1] if number else result[1].name if result else ""
  if result and "AsyncCollectiveStart" in targets:
    started.add(channel)
  elif channel in started:
    result = None
  yield OperationCost(
    name=one.name,
    opcode=one.opcode,
    op_name=one.op_name,
    scope=scope_of(place.naming, program, one, program.called_by(one), place.scope),
    loop=place.loop,
    in_microbatch_loop=place.in_microbatch_loop,
    count=place.count,
    products=products(program, within, one),
    bytes=traffic(program, within, one),
    cycles=_cycles(program, within, one),
    collective=_collective_cost(program, *result) if result else None,
    condition=place.condition,
    unread_loops=place.unread_loops,
    kind=kind_of(program, one),
    overcharge=overcharge(program, within, one),
    overlapped="AsyncCollectiveStart" in targets or one.opcode.endswith(("-start", "send")),
  )


def _collective(
  program: HloModule, within: Computation, one: Instruction
) -> tuple[Computation, Instruction] | None:
  """Returns the collective that `one` is or wraps, with the computation that contains it."""
  if one.opcode.removesuffix("-start") in COLLECTIVES or one.opcode == "send":
    return within, one
  if one.opcode not in _WRAPPERS:
    return None
  inner = ((body, each) for body in program.called_by(one) for each in body)
  return next((hit for body, each in inner if (hit := _collective(program, body, each))), None)


def _collective_cost(program: HloModule, within: Computation, one: Instruction) -> Collective:
  """Returns bytes and groups of a collective.

  The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a dynamic-slice.
  """
  if one.opcode == "send":
    return _send_cost(program, within, one)
  kind = one.opcode.removesuffix("-start")
  groups = program.groups(one)
  size = sum(within.instructions[name].bytes for name in one.operands)
  if kind == "all-gather":
    size *= groups.size
  if kind == "all-reduce" and any(
    each.opcode == "dynamic-slice" and one.name in each.operands for each in within
  ):
    kind = "reduce-scatter"
  return Collective(kind, size, groups, cycles=one.cycles)


def _send_cost(program: HloModule, within: Computation, one: Instruction) -> Collective:
  """Returns the cost of a send: to another device, or to the host for communication between slices.

  A target such as {1,2}x{0:15} lists slices, then devices of each; {1:4} are four.
  """
  size = within.instructions[one.operands[0]].bytes
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', one.attributes)
  slices = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', one.attributes)
  if kind is None or slices is None:
    return Collective("collective-permute", size, program.groups(one))
  ranges = [list(map(int, part.split(":"))) for part in slices[1].split(",")]
  count = sum(part[-1] - part[0] + 1 for part in ranges)
  return Collective(kind[1].lower().replace("_", "-"), size, ReplicaGroups(()), count)


def _cycles(program: HloModule, within: Computation, one: Instruction) -> float | None:
  """Returns the compiler's estimate of `one`, or of all matrix products in it."""
  if is_placeholder(one):
    return None
  if one.cycles is not None:
    return one.cycles
  if one.opcode not in _WRAPPERS:
    return None
  total = 0.0
  for body in program.called_by(one):
    for inner in body:
      cycles = _cycles(program, body, inner)
      if cycles is None and products(program, body, inner).flops:
        return None
      total += cycles or 0
  return total or None
