"""A program as a flat list of what does work, how often, and what it costs each time."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from maxbatch.estimate.flops import Products, products
from maxbatch.estimate.hlo import Computation, HloModule, Instruction
from maxbatch.estimate.loops import Frame, trip_count
from maxbatch.estimate.replica_groups import ReplicaGroups
from maxbatch.estimate.traffic import COLLECTIVES, FREE, traffic

SCOPES = ("attention", "mlp", "norm", "embedding", "head", "optimizer")
"""Names that the model gives its parts by jax.named_scope."""
OTHER = "other"

_NO_OPS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding")
"""Custom calls that only tell the compiler something."""
_WRAPPERS = ("fusion", "async-start", "call-start")


@dataclasses.dataclass(frozen=True)
class Collective:
  """Data that devices exchange."""

  kind: str
  """all-gather, all-reduce, reduce-scatter, …"""
  bytes: int
  """Of the whole array: what a gather yields, what a reduction takes in."""
  groups: ReplicaGroups
  slices: int = 1
  """Where slices exchange data through their hosts: how many. Each slice is then a program of its
  own, and the groups say nothing."""

  @property
  def group_size(self) -> int:
    """Devices among which the data is exchanged; between slices, one of each."""
    return self.slices if self.slices > 1 else self.groups.size

  def crosses(self, devices_per_slice: int | None) -> bool:
    """Whether data leaves a slice."""
    inside = devices_per_slice is None or not self.groups.crosses(devices_per_slice)
    return self.slices > 1 or not inside


@dataclasses.dataclass(frozen=True)
class OperationCost:
  """One operation. All figures but `count` are of one execution on one device."""

  name: str
  opcode: str
  op_name: str
  """jax's path of scopes and transformations."""
  scope: str
  """One of SCOPES, or "other"."""
  loop: str
  """The computation it stands in: the body of the innermost loop, or the entry."""
  in_microbatch_loop: bool
  count: int
  """Executions: within the loop over microbatches in one of its trips, elsewhere in a step."""
  products: Products
  bytes: int
  """Read from and written to main memory."""
  cycles: int | None
  """The compiler's estimate; None if there is none."""
  collective: Collective | None = None
  condition: str = ""
  """jax's path of the innermost conditional around it, without which it does not run; empty if
  there is none."""
  overlapped: bool = False
  """Whether it runs beside what follows: a collective or a copy that is started and awaited."""

  @property
  def flops(self) -> int:
    """FLOPs of matrix products."""
    return self.products.flops


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where the walk is."""

  frame: Frame
  loop: str
  count: int
  in_microbatch_loop: bool
  scope: str = OTHER
  """That of the loop around it."""
  condition: str = ""
  """The path of the innermost conditional that has one."""


def program_costs(program: HloModule) -> Sequence[OperationCost]:
  """The operations of a compiled step; trips of the loop over microbatches are not multiplied in.

  That loop is the one whose number of trips is data. A further loop of that kind inside it counts
  as one trip. Of a conditional the dearest branch counts.
  """
  entry = program.computations[program.entry]
  return list(_walk(program, _Place(Frame(entry), entry.name, 1, False)))


def _walk(program: HloModule, place: _Place) -> Iterator[OperationCost]:
  frame = place.frame
  started: set[str] = set()
  for one in frame.computation:
    if one.opcode == "while":
      yield from _walk(program, _inside_loop(program, place, one))
    elif one.opcode in ("call", "conditional"):
      yield from _walk(program, _inside_branch(program, place, one))
    elif _does_work(one):
      yield from _operation(program, place, one, started)


def _does_work(one: Instruction) -> bool:
  waits = one.opcode.endswith(("-done", "-update"))
  return one.opcode not in FREE and not waits and one.target not in _NO_OPS


def _inside_loop(program: HloModule, place: _Place, loop: Instruction) -> _Place:
  body = program.computations[loop.called["body"][0]]
  number = trip_count(program, place.frame, loop)
  return _Place(
    place.frame.inner(body, loop),
    body.name,
    place.count * (1 if number is None else number),
    place.in_microbatch_loop or number is None,
    _scope(program, loop.op_name, (), place.scope),
    place.condition,
  )


def _inside_branch(program: HloModule, place: _Place, one: Instruction) -> _Place:
  condition = one.op_name if one.opcode == "conditional" else ""
  return dataclasses.replace(
    place,
    frame=place.frame.inner(_costliest_branch(program, one), one),
    condition=condition or place.condition,
  )


def _costliest_branch(program: HloModule, one: Instruction) -> Computation:
  """What is called; of several branches the dearest, by matrix products, then by bytes."""
  branches = program.called_by(one)
  return (
    branches[0] if len(branches) == 1 else max(branches, key=lambda it: _branch_cost(program, it))
  )


def _branch_cost(program: HloModule, computation: Computation) -> tuple[int, int]:
  total = sum((products(program, computation, one) for one in computation), Products())
  return total.flops, sum(traffic(program, computation, one) for one in computation)


def _operation(
  program: HloModule, place: _Place, one: Instruction, started: set[str]
) -> Iterator[OperationCost]:
  """The cost of a leaf: none of the parts of an asynchronous collective counts twice.

  Args:
    program: the whole.
    place: where `one` stands.
    one: what does the work.
    started: channels of the collectives that were started before in this computation.
  """
  within = place.frame.computation
  found = _collective(program, within, one)
  targets = _inner_targets(program, one)
  if "AsyncCollectiveDone" in targets:
    return
  channel = _channel(found[1]) if found else ""
  if found and "AsyncCollectiveStart" in targets:
    started.add(channel)
  elif channel in started:
    found = None
  yield OperationCost(
    name=one.name,
    opcode=one.opcode,
    op_name=one.op_name,
    scope=_scope(program, one.op_name or one.name, program.called_by(one), place.scope),
    loop=place.loop,
    in_microbatch_loop=place.in_microbatch_loop,
    count=place.count,
    products=products(program, within, one),
    bytes=traffic(program, within, one),
    cycles=_cycles(program, within, one),
    collective=_collective_cost(program, *found) if found else None,
    condition=place.condition,
    overlapped="AsyncCollectiveStart" in targets or one.opcode.endswith(("-start", "send")),
  )


def _collective(
  program: HloModule, within: Computation, one: Instruction
) -> tuple[Computation, Instruction] | None:
  """The collective that `one` is, or that is wrapped in it, and where that stands."""
  if one.opcode.removesuffix("-start") in COLLECTIVES or one.opcode == "send":
    return within, one
  if one.opcode not in _WRAPPERS:
    return None
  inner = ((body, each) for body in program.called_by(one) for each in body)
  return next((hit for body, each in inner if (hit := _collective(program, body, each))), None)


def _collective_cost(program: HloModule, within: Computation, one: Instruction) -> Collective:
  """Bytes and groups of a collective. A TPU writes a reduce-scatter as a reduced, sliced fusion."""
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
  return Collective(kind, size, groups)


def _send_cost(program: HloModule, within: Computation, one: Instruction) -> Collective:
  """What a device sends: to another, or to its host for an exchange between slices.

  A target such as {1,2}x{0:15} names slices, then devices of each; {1:4} are four.
  """
  size = within.instructions[one.operands[0]].bytes
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', one.attributes)
  slices = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', one.attributes)
  if kind is None or slices is None:
    return Collective("collective-permute", size, program.groups(one))
  ranges = [list(map(int, part.split(":"))) for part in slices[1].split(",")]
  count = sum(part[-1] - part[0] + 1 for part in ranges)
  return Collective(kind[1].lower().replace("_", "-"), size, ReplicaGroups(()), count)


def _channel(one: Instruction) -> str:
  found = re.search(r"channel_id=(\d+)", one.attributes)
  return found[1] if found else one.name


def _inner_targets(program: HloModule, one: Instruction) -> set[str]:
  """Targets of the custom calls in a fusion."""
  if one.opcode != "fusion":
    return set()
  return {inner.target for body in program.called_by(one) for inner in body if inner.target}


def _cycles(program: HloModule, within: Computation, one: Instruction) -> int | None:
  """The compiler's estimate of `one`, or of all matrix products in it."""
  if one.cycles is not None:
    return one.cycles
  if one.opcode not in _WRAPPERS:
    return None
  total = 0
  for body in program.called_by(one):
    for inner in body:
      cycles = _cycles(program, body, inner)
      if cycles is None and products(program, body, inner).flops:
        return None
      total += cycles or 0
  return total or None


def _scope(program: HloModule, path: str, called: Sequence[Computation], around: str) -> str:
  """The innermost scope in the path; else the most frequent in what is called; else `around`."""
  own = _scope_of_path(path)
  if own != OTHER:
    return own
  inner = [_scope_of_path(name) for body in called for name in _inner_paths(program, body)]
  return max(SCOPES, key=inner.count) if set(inner) - {OTHER} else around


def _inner_paths(program: HloModule, body: Computation) -> Iterator[str]:
  for inner in body:
    yield inner.op_name
    for called in program.called_by(inner):
      yield from _inner_paths(program, called)


def _scope_of_path(path: str) -> str:
  """transpose(jvp(mlp)) is mlp; splash attention is attention even where no scope says so."""
  words = re.findall(r"\w+", path)
  named = [word for word in words if word in SCOPES]
  if named:
    return named[-1]
  return "attention" if any("splash_m" in word for word in words) else OTHER
