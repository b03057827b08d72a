"""Which hosts load which rows, and how rows come to the devices of processes that do not load them.

The columns of a microbatch lie in equal blocks, one for each data-parallel group of devices. Every
block is read whole, by one of the loading processes: by one that has devices of the group, if there
is one, so that most rows stay on their host; the other blocks go to those that read least. Of the
devices of a process that does not read their block one receives it from a device of the process that
does, and the others from that one: a block comes to a host once. In one round every device sends at
most one block and receives at most one: a collective permute.

Devices are numbered by their place in the mesh. All processes come to the same plan without a message.

What is read at once: loads of expansion_factor_real_data times the samples of a step.

A load is a whole number of samples. It begins where the one before ends, so that it may end inside
a step, and its size follows from the step it begins in. Every shape of microbatch has loads of its
own, and the last of them ends with its steps.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from maxbatch.core.keys import text
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError


class _PartOfSampleError(UserError):
  """A load is not a whole number of samples."""

  def __init__(self, batch: int, factor: Fraction):
    self.batch, self.size = batch, factor * batch
    super().__init__(
      f"expansion_factor_real_data={factor} × global_batch_to_train={batch} is {self.size} samples, "
      "which must be a whole number, at least 1; for example expansion_factor_real_data="
      f"{Fraction(1, batch)} or 2"
    )


def load_factor(plan: BatchPlan, *, streamed: bool) -> Fraction:
  """Returns samples loaded at once, as a multiple of the samples of one dispatch."""
  taken = plan.micro_batch_to_train if streamed else plan.global_batch_to_train
  return Fraction(plan.global_batch_to_load, taken)


def load_ranges(runs: Iterable[tuple[int, int, int]], factor: Fraction) -> Iterator[range]:
  """Yields the first sample of each load, in ranges of equal loads.

  Args:
    runs: stretches of equal dispatches, without gaps: first sample, end, samples of a dispatch.
    factor: samples of a load, as a multiple of those of the dispatch that it begins in.

  Raises:
    UserError: a load is not a whole number of samples.
  """
  begin = 0
  for first, end, batch in runs:
    begin = max(begin, first)
    if begin < end:
      loads = range(begin, end, _load_size(batch, factor))
      yield loads
      begin += len(loads) * loads.step


def check_loads(plan: BatchPlan, *, streamed: bool) -> None:
  """Checks every load of the run, from the plan's first step to its last, before any is read.

  Also those of a partial last step, of a ramp-up and of what batch_schedule=gns may decide.

  Raises:
    UserError: a load is not a whole number of samples; the message suggests a factor that works.
  """
  factor = plan.expansion_factor_real_data
  try:
    for _, phases in itertools.groupby(plan.phases, lambda phase: phase.micro_batch):
      runs = (
        (one.first.samples, one.end.samples, one.micro_batch if streamed else one.batch)
        for one in phases
      )
      list(load_ranges(runs, load_factor(plan, streamed=streamed)))
    if plan.max_batch > plan.global_batch_to_train:
      # It may be any multiple of the microbatch.
      _load_size(plan.micro_batch_to_train, factor)
  except _PartOfSampleError as error:
    common = math.gcd(plan.micro_batch_to_train, *(phase.batch for phase in plan.phases))
    near = Fraction(max(1, math.floor(common * factor)), common)
    raise UserError(
      f"expansion_factor_real_data={text(factor)} makes a load of {text(error.size)} samples for a "
      f"{'microbatch' if streamed else 'step'} of {error.batch} samples, as this run has or may come "
      "to; loads must be whole numbers of samples, at least 1; for example "
      f"expansion_factor_real_data={text(Fraction(1) if streamed else near)}"
    ) from None


def _load_size(batch: int, factor: Fraction) -> int:
  size = factor * batch
  if size.denominator != 1 or size <= 0:
    raise _PartOfSampleError(batch, factor)
  return int(size)


Rounds = tuple[tuple[tuple[int, int], ...], ...]
"""Pairs (sending device, receiving device) of each round."""


@dataclasses.dataclass(frozen=True)
class Redistribution:
  """Who reads the rows of a microbatch, and what is sent."""

  processes: tuple[int, ...]
  """The process of every device."""
  blocks: tuple[int, ...]
  """The block of columns that every device uses."""
  readers: tuple[tuple[int, ...], ...]
  """The processes that read each block: one; without loading processes all that use it."""
  rounds: Rounds
  """What is sent to other processes."""
  copies: Rounds
  """What the devices of a process then send each other: what they hold by then."""

  @functools.cached_property
  def blocks_read(self) -> Mapping[int, tuple[int, ...]]:
    """The blocks that each process reads, ascending; processes that read none are left out."""
    results: dict[int, list[int]] = {}
    for block, readers in enumerate(self.readers):
      for process in readers:
        results.setdefault(process, []).append(block)
    return {process: tuple(blocks) for process, blocks in results.items()}

  @functools.cached_property
  def slots(self) -> tuple[tuple[int | None, ...], ...]:
    """The blocks that each device's process puts there: its own, then that of each round."""
    slots: list[list[int | None]] = [
      [block if process in self.readers[block] else None] + [None] * len(self.rounds)
      for process, block in zip(self.processes, self.blocks, strict=True)
    ]
    for number, pairs in enumerate(self.rounds, 1):
      for sender, receiver in pairs:
        slots[sender][number] = self.blocks[receiver]
    return tuple(map(tuple, slots))

  def users(self, block: int) -> tuple[int, ...]:
    """Returns the processes with devices that use a block, ascending."""
    pairs = zip(self.processes, self.blocks, strict=True)
    return tuple(sorted({process for process, used in pairs if used == block}))


def redistribution(
  processes: Sequence[int], blocks: Sequence[int], loading: Sequence[int] = ()
) -> Redistribution:
  """Returns the plan for devices of these processes, which use these blocks 0, 1, … of columns.

  `loading` are the processes that read; none: each reads what its devices use. Each block is used.

  Raises:
    ValueError: a loading process has no device.
  """
  if not set(loading) <= set(processes):
    raise ValueError(f"processes {loading} load, but only {sorted(set(processes))} have devices")
  users = _users(processes, blocks)
  readers = _readers(users, loading) if loading else users
  receiving = _receiving(processes, blocks, readers)
  rounds = _rounds(processes, receiving, readers)
  copies = _copies(list(receiving.values()))
  return Redistribution(tuple(processes), tuple(blocks), readers, rounds, copies)


def _users(processes: Sequence[int], blocks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
  """Returns the processes that use each block, ascending."""
  results: list[set[int]] = [set() for _ in range(max(blocks) + 1)]
  for process, block in zip(processes, blocks, strict=True):
    results[block].add(process)
  return tuple(tuple(sorted(each)) for each in results)


def _readers(users: Sequence[Sequence[int]], loading: Sequence[int]) -> tuple[tuple[int, ...], ...]:
  """Returns a reader of every block: near it if possible, else the one that reads least so far."""
  counts = dict.fromkeys(sorted(loading), 0)
  readers: list[int | None] = []
  for using in users:
    near = [process for process in using if process in counts]
    reader = min(near, key=lambda process: (counts[process], process)) if near else None
    if reader is not None:
      counts[reader] += 1
    readers.append(reader)
  least = [(count, process) for process, count in counts.items()]
  heapq.heapify(least)
  for block, reader in enumerate(readers):
    if reader is None:
      count, process = least[0]
      heapq.heapreplace(least, (count + 1, process))
      readers[block] = process
  return tuple((reader,) for reader in readers if reader is not None)


def _receiving(
  processes: Sequence[int], blocks: Sequence[int], readers: Sequence[Sequence[int]]
) -> Mapping[tuple[int, int], Sequence[int]]:
  """Returns the devices whose block is not from their own process, by process and block."""
  results: dict[tuple[int, int], list[int]] = {}
  for device, (process, block) in enumerate(zip(processes, blocks, strict=True)):
    if process not in readers[block]:
      results.setdefault((process, block), []).append(device)
  return results


def _rounds(
  processes: Sequence[int],
  receiving: Mapping[tuple[int, int], Sequence[int]],
  readers: Sequence[Sequence[int]],
) -> Rounds:
  """Lets the devices of a reader take turns as senders, one block each in a round."""
  devices: dict[int, list[int]] = {}
  for device, process in enumerate(processes):
    devices.setdefault(process, []).append(device)
  sent: collections.Counter[int] = collections.Counter()
  rounds: list[list[tuple[int, int]]] = []
  for (_, block), (receiver, *_) in receiving.items():
    reader = readers[block][0]
    number, turn = divmod(sent[reader], len(devices[reader]))
    sent[reader] += 1
    if number == len(rounds):
      rounds.append([])
    rounds[number].append((devices[reader][turn], receiver))
  return tuple(map(tuple, rounds))


def _copies(groups: Sequence[Sequence[int]]) -> Rounds:
  """Returns the rounds from the first device of each group to the others: each round doubles how
  many have it."""
  rounds: list[list[tuple[int, int]]] = []
  for group in groups:
    for number in range((len(group) - 1).bit_length()):
      if number == len(rounds):
        rounds.append([])
      rounds[number].extend(zip(group[: 1 << number], group[1 << number :], strict=False))
  return tuple(map(tuple, rounds))


def consecutive_processes(num_devices: int, num_processes: int) -> tuple[int, ...]:
  """Returns the process of every device where each has equally many, one after the other."""
  local = num_devices // num_processes
  return tuple(itertools.chain.from_iterable([p] * local for p in range(num_processes)))


@dataclasses.dataclass(frozen=True)
class HostLoad:
  """Consecutive hosts that each load `samples` samples per step.

  With 0 they load nothing and receive their samples from the other hosts.
  """

  first_host: int
  num_hosts: int
  samples: int

  @property
  def last_host(self) -> int:
    """Index of the last of these hosts."""
    return self.first_host + self.num_hosts - 1


def loading_hosts(plan: BatchPlan, num_hosts: int) -> tuple[int, ...]:
  """Returns the hosts that load for all; none: every host loads what its own devices take.

  With expansion_factor_real_data f > 1 they are num_hosts / f hosts, rounded up: the first ones, or
  those that the key loading_hosts names.

  Raises:
    UserError: the key names other hosts than there are, or more or fewer than the factor asks for.
  """
  named, factor = plan.loading_hosts, plan.expansion_factor_real_data
  wanted = math.ceil(num_hosts / factor) if factor > 1 else len(named)
  if not named:
    return tuple(range(wanted))
  given = f"loading_hosts={_written(named)}"
  example = _written(range(num_hosts - min(wanted, num_hosts), num_hosts))
  if max(named) >= num_hosts:
    raise UserError(
      f"{given}: there are {num_hosts} hosts, 0 to {num_hosts - 1}; for example "
      f"loading_hosts={example}"
    )
  if len(set(named)) < len(named):
    raise UserError(
      f"{given} names a host twice; for example loading_hosts={_written(sorted(set(named)))}"
    )
  if len(named) != wanted:
    raise UserError(
      f"{given} names {len(named)} hosts, but expansion_factor_real_data={text(factor)} lets "
      f"{wanted} of {num_hosts} load; for example loading_hosts={example}, or "
      f"expansion_factor_real_data=-1"
    )
  return tuple(sorted(named))


def host_loads(plan: BatchPlan, num_hosts: int) -> list[HostLoad]:
  """Returns the samples of a step of the run's batch that each host loads, equal hosts grouped.

  Hosts have equally many devices, one host after the other in the order of the mesh.

  Raises:
    UserError: the devices do not divide evenly over the hosts, or loading_hosts does not fit them.
  """
  result = planned_redistribution(plan, num_hosts)
  batch, blocks = plan.global_batch_to_train, len(result.readers)
  of_block = [batch // blocks] * blocks
  if batch % blocks:  # The last rows of the last microbatch are padding.
    rows, before = plan.micro_batch_to_train // blocks, plan.num_microbatches - 1
    last = batch - before * plan.micro_batch_to_train
    of_block = [rows * before + min(max(last - b * rows, 0), rows) for b in range(blocks)]
  samples = [sum(of_block[b] for b in result.blocks_read.get(h, ())) for h in range(num_hosts)]
  loads, host = [], 0
  for size, hosts in itertools.groupby(samples):
    count = sum(1 for _ in hosts)
    loads.append(HostLoad(host, count, size))
    host += count
  return loads


def with_load_factor(plan: BatchPlan, factor: Fraction) -> BatchPlan:
  """Returns the plan with another expansion_factor_real_data, more than 0."""
  loaded = math.ceil(plan.global_batch_to_train * factor)
  return dataclasses.replace(plan, expansion_factor_real_data=factor, global_batch_to_load=loaded)


def planned_redistribution(plan: BatchPlan, num_hosts: int) -> Redistribution:
  """Plans who reads what on hosts that have equally many devices, in the order of the mesh.

  Raises:
    UserError: the devices do not divide evenly over the hosts, or loading_hosts does not fit them.
  """
  devices = plan.topology.num_devices
  if devices % num_hosts:
    near = max(count for count in range(1, num_hosts) if devices % count == 0)
    raise UserError(
      f"num_hosts={num_hosts} must divide the {devices} devices evenly; for example "
      f"num_hosts={near}"
    )
  sharing = devices // plan.topology.num_batch_groups
  return redistribution(
    consecutive_processes(devices, num_hosts),
    [device // sharing for device in range(devices)],
    loading_hosts(plan, num_hosts),
  )


def _written(hosts: Sequence[int]) -> str:
  return f"[{','.join(map(str, hosts))}]"
