"""Estimated seconds of one microbatch, and of the rest of a step, from the costs of a program.

The model:
- An operation takes the compiler's estimated cycles, if it has any. Else it takes its roofline: the
  longer of its matrix products at peak FLOPs and its bytes at HBM bandwidth. An attention kernel takes the
  bundles of instructions that libtpu schedules for its blocks, where they are more (attention_kernels.py).
- A collective takes its bytes over the bandwidth of all ICI links of a chip, or of the data center
  network if its group spans slices. Latency and links that stay idle are not modelled. Among GPUs of one
  NVLink domain it takes what the compiler has measured; between domains, the network's published rate.
- On GPUs attention kernels, and products of which the compiler has no time, run at published shares of
  the peak, and no operation takes less than the launch of a kernel.
- Operations run one after another, and a synchronous collective blocks them. Asynchronous
  collectives and copies overlap with the operations of the same loop body; only the excess counts.
So the times of collectives, and of operations without the compiler's estimate, are lower bounds.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from maxbatch.core.topology import Topology
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.costs import Collective, OperationCost

How = Literal["compiler", "roofline"]
Limit = Literal["compute", "memory bandwidth", "interconnect"]

_NUM_LARGEST = 20


_FLOAT8_RATE = 2 * 0.79
"""The most that a product on a GPU reaches, of bfloat16's peak: float8's peak is twice that, and of theirs large
products in bfloat16 reach 0.79 in the compiler's table. Its times for float8 on an H100 are beyond the peak."""


@dataclasses.dataclass(frozen=True)
class Operation:
  """One operation of a microbatch, or of the rest of a step."""

  name: str
  scope: str
  seconds: float
  """Seconds of all its executions."""
  how: How
  count: int
  in_microbatch_loop: bool
  op_name: str


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Collectives of the same kind, group size and place, added up."""

  kind: str
  in_microbatch_loop: bool
  overlapped: bool
  group_size: int
  crosses_slices: bool
  count: int
  """Executions per microbatch, or in the rest of a step."""
  bytes: int
  """Bytes of all executions: outputs of all-gathers and inputs of reductions, per device."""
  seconds: float
  """Time on the links. If overlapped, only the excess, if any, adds to the step."""


@dataclasses.dataclass(frozen=True)
class RooflineSeconds:
  """Seconds by the limiting resource; they add up to the total."""

  compute: float = 0.0
  memory: float = 0.0
  interconnect: float = 0.0

  @property
  def total(self) -> float:
    """The sum of the three."""
    return self.compute + self.memory + self.interconnect

  @property
  def limit(self) -> Limit:
    """The resource with the largest time."""
    named: dict[Limit, float] = {
      "compute": self.compute,
      "memory bandwidth": self.memory,
      "interconnect": self.interconnect,
    }
    return max(named, key=named.__getitem__)

  def __add__(self, other: "RooflineSeconds") -> "RooflineSeconds":
    return RooflineSeconds(
      self.compute + other.compute,
      self.memory + other.memory,
      self.interconnect + other.interconnect,
    )


@dataclasses.dataclass(frozen=True)
class StepEstimate:
  """The time of a step with any number of microbatches, on one device; all work alike."""

  microbatch_parts: RooflineSeconds
  rest_parts: RooflineSeconds
  microbatch_flops: int
  """Matrix-product FLOPs in the compiled program."""
  rest_flops: int
  microbatch_bytes: int
  """Read from and written to HBM."""
  rest_bytes: int
  coverage: float
  """Matrix-product FLOPs with a time over those expected; nan if none are expected."""
  compiler_share: float
  """The fraction of them that the compiler timed; the rest has roofline times."""
  microbatch_scopes: Mapping[str, float]
  """Seconds by scope; overlapped time is not counted, so they add up to microbatch_seconds."""
  rest_scopes: Mapping[str, float]
  largest: Sequence[Operation]
  """The longest operations and synchronous collectives of a one-microbatch step, longest first."""
  unestimated: Sequence[Operation]
  """All operations with roofline times, longest first, without collectives and overlapped
  copies."""
  collectives: Sequence[Exchange]

  @property
  def microbatch_seconds(self) -> float:
    """One microbatch; 0 where the program has no loop over microbatches."""
    return self.microbatch_parts.total

  @property
  def rest_seconds(self) -> float:
    """The rest of a step, outside the loop over microbatches."""
    return self.rest_parts.total

  def step_seconds(self, num_microbatches: int) -> float:
    """Returns seconds of a step with `num_microbatches` microbatches."""
    return self.rest_seconds + num_microbatches * self.microbatch_seconds

  def by_scope(self, num_microbatches: int) -> dict[str, float]:
    """Returns seconds of a step with `num_microbatches` microbatches by scope, longest first."""
    scopes = self.microbatch_scopes.keys() | self.rest_scopes.keys()
    seconds = {
      scope: self.rest_scopes.get(scope, 0.0)
      + num_microbatches * self.microbatch_scopes.get(scope, 0.0)
      for scope in scopes
    }
    # Sorting by name too keeps the order of equal times the same in every run.
    return dict(sorted(seconds.items(), key=lambda entry: (-entry[1], entry[0])))

  @property
  def limited_by(self) -> Limit:
    """The resource that limits most of a microbatch, or of the rest if there is no loop."""
    return (self.microbatch_parts if self.microbatch_seconds else self.rest_parts).limit


def estimate(
  costs: Sequence[OperationCost],
  chip: Chip,
  expected_microbatch_flops: float,
  expected_rest_flops: float = 0.0,
  devices_per_slice: int | None = None,
) -> StepEstimate:
  """Returns the time of a compiled step on `chip`.

  Args:
    expected_microbatch_flops: matrix-product FLOPs of one microbatch on one device; of causal
      attention only the half below the diagonal.
    expected_rest_flops: the same for the rest of a step.
    devices_per_slice: if there are several slices; None: one slice.
  """
  inside = [cost for cost in costs if cost.in_microbatch_loop]
  outside = [cost for cost in costs if not cost.in_microbatch_loop]
  pass_parts, pass_scopes = _elapsed(inside, chip, devices_per_slice)
  rest_parts, rest_scopes = _elapsed(outside, chip, devices_per_slice)
  timed = [_operation(cost, _busy_seconds(cost, chip)) for cost in costs if _is_operation(cost)]
  timed.sort(key=lambda one: -one.seconds)
  stops = [
    _operation(cost, link_seconds(cost.collective, chip, devices_per_slice))
    for cost in costs
    if cost.collective and not cost.overlapped
  ]
  flops, by_compiler = _flops(costs), _flops(c for c in costs if c.cycles is not None)
  expected = expected_microbatch_flops + expected_rest_flops
  return StepEstimate(
    microbatch_parts=pass_parts,
    rest_parts=rest_parts,
    microbatch_flops=_flops(inside),
    rest_flops=_flops(outside),
    microbatch_bytes=_bytes(inside),
    rest_bytes=_bytes(outside),
    coverage=flops / expected if expected else math.nan,
    compiler_share=by_compiler / flops if flops else math.nan,
    microbatch_scopes=pass_scopes,
    rest_scopes=rest_scopes,
    largest=sorted([*timed, *stops], key=lambda one: -one.seconds)[:_NUM_LARGEST],
    unestimated=[one for one in timed if one.how == "roofline"],
    collectives=_exchanges(costs, chip, devices_per_slice),
  )


def seconds_of(
  costs: Sequence[OperationCost], chip: Chip, devices_per_slice: int | None = None
) -> float:
  """Returns the time of some of a program's operations, each `count` times."""
  return _elapsed(costs, chip, devices_per_slice)[0].total


def connected(layout: Topology, chip: Chip | None) -> int | None:
  """Returns how many devices the fast links connect, where there are more: a slice's, or the GPUs of an
  NVLink domain; None: all."""
  if chip is not None and chip.is_gpu:
    return chip.domain if layout.num_devices > chip.domain else None
  return layout.devices_per_slice if layout.num_slices > 1 else None


def _flops(costs: Iterable[OperationCost]) -> int:
  return sum(cost.flops * cost.count for cost in costs)


def _bytes(costs: Iterable[OperationCost]) -> int:
  return sum(cost.bytes * cost.count for cost in costs)


def _is_operation(cost: OperationCost) -> bool:
  """Returns whether it occupies the device's compute units, not only its links or copy engines."""
  return not cost.overlapped and (cost.collective is None or cost.flops > 0)


def _operation(cost: OperationCost, seconds: float) -> Operation:
  """Returns the entry for an operation whose every execution takes `seconds`."""
  return Operation(
    name=cost.name,
    scope=cost.scope,
    seconds=seconds * cost.count,
    how="roofline" if cost.cycles is None else "compiler",
    count=cost.count,
    in_microbatch_loop=cost.in_microbatch_loop,
    op_name=cost.op_name,
  )


def _busy_seconds(cost: OperationCost, chip: Chip) -> float:
  """Returns seconds of one execution of an operation."""
  if cost.cycles is None:
    kernel = cost.products.attention
    scheduled = kernel.seconds(chip) if kernel else 0.0
    least = max(_product_seconds(cost, chip), cost.bytes / chip.hbm_bandwidth, scheduled)
    return max(least, chip.launch)
  seconds = cost.cycles / chip.clock
  # A compiler that no longer charges too much would be faster than the peak if corrected.
  right = seconds / cost.overcharge
  is_right = right / chip.calibration * chip.peak_flops >= cost.flops
  seconds = right if is_right else seconds
  if chip.is_gpu:
    seconds = max(seconds, cost.flops / (_FLOAT8_RATE * chip.peak_flops))
  return max(seconds / (chip.sustained if cost.flops else 1.0), chip.launch)


def _product_seconds(cost: OperationCost, chip: Chip) -> float:
  """Returns the seconds of one execution's matrix products; narrow kernels are charged the whole
  unit, or on GPUs what is published of them."""
  if chip.is_gpu:
    share = chip.product_share
    if cost.products.width:
      share = chip.attention_share(cost.products.backward, cost.products.width)
    return cost.products.executed / chip.peak_flops / share
  width = cost.products.width
  rounded = -(-width // chip.matrix_unit) * chip.matrix_unit / width if width else 1.0
  return cost.products.executed * rounded / chip.peak_flops


def link_seconds(one: Collective, chip: Chip, devices_per_slice: int | None) -> float:
  """Returns the seconds of one execution of a collective: a ring's bytes over the bandwidth of all
  links."""
  size = one.group_size
  if size == 1:
    return 0.0
  crossing = one.crosses(devices_per_slice)
  if chip.is_gpu and crossing:
    return _between_hosts(one, chip)
  if one.cycles is not None:
    return one.cycles / chip.clock
  bandwidth = chip.dcn_bandwidth if crossing else chip.ici_bandwidth
  if one.kind in ("collective-permute", "collective-broadcast"):
    # Sent in one direction, to one neighbour: one link.
    return one.bytes / (bandwidth if crossing else bandwidth / chip.ici_links)
  times = 2 if one.kind == "all-reduce" else 1
  return times * one.bytes * (size - 1) / size / bandwidth


def _between_hosts(one: Collective, chip: Chip) -> float:
  """Returns the seconds of a collective of GPUs in several NVLink domains.

  Each GPU has a port of its own, and those of a domain that take part carry the data together, so that
  every domain receives what it lacks once (NCCL's rings and trees, with a ring for each port).
  """
  domains = [{gpu // chip.domain for gpu in group} for group in one.groups.groups]
  ways = max(map(len, domains))
  ports = min(
    len(group) / len(hosts) for group, hosts in zip(one.groups.groups, domains, strict=True)
  )
  times = 2 if one.kind == "all-reduce" else 1
  if one.kind in ("collective-permute", "collective-broadcast"):
    return one.bytes / (chip.dcn_bandwidth * chip.network_share)
  bandwidth = min(ports * chip.dcn_bandwidth * chip.network_share, chip.ici_bandwidth)
  return times * one.bytes * (ways - 1) / ways / bandwidth


def elapsed_by_operation(
  costs: Sequence[OperationCost], chip: Chip, devices_per_slice: int | None = None
) -> Iterator[tuple[OperationCost, RooflineSeconds]]:
  """Yields (operation, time that it adds), of all executions; overlap is only within a loop body.

  A synchronous collective that is fused with a product comes twice: for the product and the links.
  """
  bodies: dict[str, list[OperationCost]] = collections.defaultdict(list)
  for cost in costs:
    bodies[cost.loop].append(cost)
  for body in bodies.values():
    yield from _body(body, chip, devices_per_slice)


def _elapsed(
  costs: Sequence[OperationCost], chip: Chip, devices_per_slice: int | None
) -> tuple[RooflineSeconds, dict[str, float]]:
  """Returns the time by limiting resource, and by scope."""
  total = RooflineSeconds()
  scopes: dict[str, float] = collections.defaultdict(float)
  for cost, parts in elapsed_by_operation(costs, chip, devices_per_slice):
    total += parts
    scopes[cost.scope] += parts.total
  return total, dict(scopes)


def _body(
  costs: Sequence[OperationCost], chip: Chip, devices_per_slice: int | None
) -> Iterator[tuple[OperationCost, RooflineSeconds]]:
  """Yields the costs of one loop body: sequential operations, then the excess of overlapped
  ones."""
  links = [
    (cost, cost.count * link_seconds(cost.collective, chip, devices_per_slice))
    for cost in costs
    if cost.collective
  ]
  busy = [(cost, _waiting(cost, chip)) for cost in costs if _is_operation(cost)]
  stops = [(cost, RooflineSeconds(interconnect=s)) for cost, s in links if not cost.overlapped]
  yield from busy
  yield from stops
  beside = [(cost, seconds) for cost, seconds in links if cost.overlapped]
  working = sum(parts.total for _, parts in busy)
  late = max(0.0, sum(seconds for _, seconds in beside) - working)
  for cost, share in _shares(beside):
    yield cost, RooflineSeconds(interconnect=late * share)
  moved = [(cost, cost.count * cost.bytes / chip.hbm_bandwidth) for cost in costs]
  elapsed = working + sum(parts.total for _, parts in stops) + late
  queued = max(0.0, sum(seconds for _, seconds in moved) - elapsed)
  for cost, share in _shares([one for one in moved if one[0].overlapped]):
    yield cost, RooflineSeconds(memory=queued * share)


def _shares(timed: Sequence[tuple[OperationCost, float]]) -> Iterator[tuple[OperationCost, float]]:
  """Yields each operation with its fraction of the total time."""
  total = sum(seconds for _, seconds in timed)
  return ((cost, seconds / total) for cost, seconds in timed if total)


def _waiting(cost: OperationCost, chip: Chip) -> RooflineSeconds:
  """Returns the time of all executions: memory-bound if bytes take most of it."""
  seconds = _busy_seconds(cost, chip)
  moving = cost.bytes / chip.hbm_bandwidth
  if moving > max(seconds / 2, _product_seconds(cost, chip)):
    return RooflineSeconds(memory=seconds * cost.count)
  return RooflineSeconds(compute=seconds * cost.count)


def _exchanges(
  costs: Sequence[OperationCost], chip: Chip, devices_per_slice: int | None
) -> list[Exchange]:
  """Adds up equal collectives; those in the loop over microbatches first, then longest first."""
  alike: dict[tuple[str, bool, bool, int, bool], list[tuple[OperationCost, Collective]]]
  alike = collections.defaultdict(list)
  for cost in costs:
    if one := cost.collective:
      crossing = one.crosses(devices_per_slice)
      key = one.kind, cost.in_microbatch_loop, cost.overlapped, one.group_size, crossing
      alike[key].append((cost, one))
  results = [
    Exchange(
      *key,
      count=sum(cost.count for cost, _ in members),
      bytes=sum(cost.count * one.bytes for cost, one in members),
      seconds=sum(cost.count * link_seconds(one, chip, devices_per_slice) for cost, one in members),
    )
    for key, members in alike.items()
  ]
  return sorted(results, key=lambda one: (not one.in_microbatch_loop, -one.seconds))
