"""A step's estimated time by part of the model, pass and kind of work, and two programs side by side.

The passes: forward; recomputed, what the backward pass computes again under jax.checkpoint or because
the compiler did not keep it; backward; update, what is differentiated by nobody.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from maxbatch.estimate.chips import Chip
from maxbatch.estimate.costs import Kind, OperationCost
from maxbatch.estimate.step_time import elapsed_by_operation, link_seconds

Direction = Literal["forward", "recomputed", "backward", "update"]
Work = Kind | Literal["collectives"]

WORKS: Sequence[Work] = (
  "products",
  "kernels",
  "elementwise",
  "relayouts",
  "slices",
  "copies",
  "collectives",
)


class Part(NamedTuple):
  """What is compared."""

  scope: str
  direction: Direction
  work: Work

  def __str__(self) -> str:
    return f"{self.scope}, {self.direction}, {self.work}"


class Timed(NamedTuple):
  """An operation with the seconds that it adds to a step."""

  seconds: float
  cost: OperationCost


@dataclasses.dataclass(frozen=True)
class Share:
  """What one part takes of a step."""

  operations: Sequence[Timed] = ()
  """The longest first."""
  num_microbatches: int = 1

  @property
  def seconds(self) -> float:
    """Of all its operations."""
    return sum(one.seconds for one in self.operations)

  @property
  def flops(self) -> int:
    """Of its matrix products."""
    return sum(self.times(one.cost) * one.cost.flops for one in self.operations)

  def times(self, cost: OperationCost) -> int:
    """Executions in a step."""
    return cost.count * (self.num_microbatches if cost.in_microbatch_loop else 1)


@dataclasses.dataclass(frozen=True)
class Breakdown:
  """A compiled step, part by part."""

  name: str
  parts: Mapping[Part, Share]
  hidden_seconds: float
  """Of collectives beside other work."""
  bytes: int
  """Read from and written to main memory."""
  peak_bytes: int | None = None

  @property
  def seconds(self) -> float:
    """Of a step."""
    return sum(share.seconds for share in self.parts.values())

  def flops(self, directions: Sequence[Direction] = ()) -> int:
    """Of matrix products, in these passes; none: in all."""
    return sum(
      share.flops
      for part, share in self.parts.items()
      if part.work != "collectives" and (not directions or part.direction in directions)
    )

  def by_work(self) -> dict[Work, float]:
    """Seconds of every kind of work."""
    return {work: self.total(lambda part, work=work: part.work == work) for work in WORKS}

  def total(self, chosen: Callable[[Part], bool]) -> float:
    """Seconds of the parts that are chosen."""
    return sum(share.seconds for part, share in self.parts.items() if chosen(part))


def breakdown(
  name: str,
  costs: Sequence[OperationCost],
  chip: Chip,
  *,
  num_microbatches: int = 1,
  devices_per_slice: int | None = None,
  peak_bytes: int | None = None,
) -> Breakdown:
  """What a step takes, part by part.

  Args:
    name: of the program.
    costs: from program_costs.
    chip: one device.
    num_microbatches: iterations of a loop over microbatches whose number is data.
    devices_per_slice: where there are several slices.
    peak_bytes: of a device's memory, if known.
  """
  backward = _backward_loops(costs)
  found: dict[Part, list[Timed]] = collections.defaultdict(list)
  waiting = 0.0
  for inside in (True, False):
    times = num_microbatches if inside else 1
    those = [cost for cost in costs if cost.in_microbatch_loop == inside]
    for cost, parts in elapsed_by_operation(those, chip, devices_per_slice):
      on_links = parts.interconnect > 0
      waiting += times * parts.interconnect
      work: Work = "collectives" if on_links else cost.kind
      part = Part(cost.scope, _direction(cost, backward), work)
      if parts.total or (cost.flops and not on_links):
        found[part].append(Timed(times * parts.total, cost))
  every = Share(num_microbatches=num_microbatches)
  linked = sum(
    every.times(cost) * link_seconds(cost.collective, chip, devices_per_slice)
    for cost in costs
    if cost.collective
  )
  shares = {
    part: Share(sorted(timed, key=lambda one: -one.seconds), num_microbatches)
    for part, timed in found.items()
  }
  moved = sum(every.times(cost) * cost.bytes for cost in costs)
  return Breakdown(name, shares, max(0.0, linked - waiting), moved, peak_bytes)


def _direction(cost: OperationCost, backward_loops: set[str]) -> Direction:
  """In which pass an operation is, by jax's path; a kernel without one by its loop's other operations."""
  path = cost.op_name
  if "rematted_computation" in path or ".remat" in cost.name:
    return "recomputed"
  if "transpose(" in path:
    return "backward"
  if "jvp(" in path:
    return "forward"
  if cost.loop in backward_loops:
    return "recomputed" if "_fwd" in path + cost.name else "backward"
  return "update" if cost.scope == "optimizer" or not _in_a_pass(cost) else "forward"


def _in_a_pass(cost: OperationCost) -> bool:
  """Whether it is in a loop, or belongs to a part of the model."""
  return cost.count > 1 or cost.in_microbatch_loop or cost.scope != "other"


def _backward_loops(costs: Iterable[OperationCost]) -> set[str]:
  """Bodies of loops most of whose operations, of those that say it, are of a backward pass."""
  votes: dict[str, int] = collections.Counter()
  for cost in costs:
    votes[cost.loop] += ("transpose(" in cost.op_name) - (
      "jvp(" in cost.op_name and "transpose(" not in cost.op_name
    )
  return {loop for loop, lead in votes.items() if lead > 0}


def differences(theirs: Breakdown, ours: Breakdown) -> Iterator[tuple[float, Part, Share, Share]]:
  """(seconds that ours takes more, part, their share, our share), what costs us most first."""
  parts = theirs.parts.keys() | ours.parts.keys()
  pairs = [(part, theirs.parts.get(part, Share()), ours.parts.get(part, Share())) for part in parts]
  found = [(mine.seconds - other.seconds, part, other, mine) for part, other, mine in pairs]
  yield from sorted(found, key=lambda entry: (-entry[0], entry[1]))
