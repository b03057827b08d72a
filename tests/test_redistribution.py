"""Who reads what and who sends what to whom: against following every row by hand; without devices."""

import collections
import dataclasses
import itertools
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.batch.from_config import plan_batches
from maxbatch.batch.host_loads import (
  Redistribution,
  check_loads,
  consecutive_processes,
  load_factor,
  loading_hosts,
  redistribution,
)
from maxbatch.batch.row_plan import StepTable, columns_of_blocks, dispatches
from maxbatch.config.load import load_config
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology
from maxbatch.data.reading import ReadPlan

CONFIG = load_config(["config=base"])
NUM_DEVICES = 8
AXIS_NAMES = ("data", "fsdp", "tensor", "stage")


@dataclasses.dataclass(frozen=True)
class Setup:
  """How a run is divided and loaded: all that may change when it is started again."""

  processes: int
  axes: tuple[int, int, int, int]
  """The sizes of `AXIS_NAMES`."""
  accumulation: int
  streamed: bool
  factor: Fraction
  not_first: bool
  """Whether the last processes load instead of the first."""

  def plan(self, schedule: tuple[tuple[int, int], ...]) -> BatchPlan:
    batch = dataclasses.replace(
      CONFIG.batch,
      gradient_accumulation_steps=self.accumulation,
      expansion_factor_real_data=self.factor,
      batch_schedule=schedule,
    )
    plan = plan_batches(
      batch,
      dataclasses.replace(CONFIG.run, steps=-1, total_samples=SAMPLES),
      Topology(dict(zip(AXIS_NAMES, self.axes, strict=True))),
    )
    if self.not_first:
      first = loading_hosts(plan, self.processes) or (0,)
      last = tuple(self.processes - 1 - process for process in first)
      plan = dataclasses.replace(plan, loading_hosts=last)
    check_loads(plan, streamed=self.streamed)
    return plan

  def redistribution(self, plan: BatchPlan) -> Redistribution:
    """As on a mesh, whose order of axes is another than that of the devices."""
    _, _, tensor, stage = self.axes
    devices = np.arange(NUM_DEVICES).reshape(self.axes).transpose(0, 3, 1, 2).reshape(-1)
    processes = devices // (NUM_DEVICES // self.processes)
    return redistribution(
      processes.tolist(),
      (devices // (tensor * stage)).tolist(),
      loading_hosts(plan, self.processes),
    )


def columns_read(plan: Redistribution, process: int, num_columns: int) -> np.ndarray:
  """The columns of a microbatch that a process reads."""
  return columns_of_blocks(plan.blocks_read[process], num_columns // len(plan.readers))


def sent(plan: Redistribution, rows: dict[int, np.ndarray], num_columns: int) -> np.ndarray:
  """What all devices hold in the end, [k, num_columns], of the rows [k, R] each process has read.

  Follows the rounds as devices do: each sends the slot of that round, and adds up what it has.
  """
  size = num_columns // len(plan.readers)

  def block_of(process: int, block: int | None) -> np.ndarray | None:
    if block is None:
      return None
    first = columns_read(plan, process, num_columns).tolist().index(block * size)
    return rows[process][:, first : first + size]

  slots = [
    [block_of(process, block) for block in blocks]
    for process, blocks in zip(plan.processes, plan.slots, strict=True)
  ]
  results = {}
  for device, held in enumerate(slots):
    received = [
      slots[sender][number]
      for number, pairs in enumerate(plan.rounds, 1)
      for sender, receiver in pairs
      if receiver == device
    ]
    parts = [part for part in [held[0], *received] if part is not None]
    if parts:
      (results[device],) = parts
  for pairs in plan.copies:
    held = dict(results)
    for sender, receiver in pairs:
      assert receiver not in held
      results[receiver] = held[sender]
  whole = np.full((len(results[0]), num_columns), -1)
  for device, block in enumerate(plan.blocks):
    columns = slice(block * size, (block + 1) * size)
    if (whole[:, columns] >= 0).any():  # Devices that share rows have the same.
      np.testing.assert_array_equal(whole[:, columns], results[device])
    whole[:, columns] = results[device]
  return whole


def stream(setup: Setup, schedule: tuple[tuple[int, int], ...], begin: Position) -> list[int]:
  """The samples that the devices get from `begin` to the end of the run, in order."""
  run = setup.plan(schedule).starting_at(begin)
  plan, samples = setup.redistribution(run), []
  for segment in dispatches(run, begin, streamed=setup.streamed):
    table = StepTable(segment.steps, segment.micro_batch)
    bounds = table.load_bounds(load_factor(run, streamed=setup.streamed))
    loads = {
      process: ReadPlan(table, columns_read(plan, process, segment.micro_batch), bounds)
      for process in plan.blocks_read
    }
    read = {
      p: [row for load in range(len(all_)) for row in all_[load]] for p, all_ in loads.items()
    }
    taken = dict.fromkeys(read, 0)
    for step in range(len(table)):
      k, rows = table.plan(step).num_microbatches, {}
      for process, everything in read.items():
        first = taken[process]
        taken[process] += k * len(loads[process].columns)
        rows[process] = np.array(everything[first : taken[process]]).reshape(k, -1)
      samples += sent(plan, rows, segment.micro_batch).reshape(-1).tolist()
    assert taken == {process: len(everything) for process, everything in read.items()}
  return samples


FACTORS = [Fraction(f) for f in ("-1", "1/2", "1", "4/3", "2", "4")]
AXES = [(8, 1, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2), (1, 2, 1, 4)]
SAMPLES = 288
RAMPS = [((0, 48),), ((0, 24), (48, 48), (144, 72))]
SETUPS = [
  Setup(*sizes)
  for sizes in itertools.product(
    [1, 2, 4], AXES, [1, 3], [False, True], FACTORS, [False, True]
  )
]  # fmt: skip


@pytest.mark.parametrize("schedule", RAMPS, ids=["constant", "ramp"])
def test_every_setup_has_the_samples_in_order_from_wherever_another_stopped(schedule):
  random = np.random.default_rng(0)
  for setup in SETUPS:
    before = SETUPS[random.integers(len(SETUPS))].plan(schedule)
    step = int(random.integers(before.steps)) if random.integers(2) else 0
    begin = Position(step, before.samples_at(step))
    assert stream(setup, schedule, begin) == list(range(begin.samples, SAMPLES)), (setup, begin)


@st.composite
def devices(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
  """Any devices: the process and the block of each, and the processes that load."""
  num_processes, num_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
  count = draw(st.integers(max(num_processes, num_blocks), 12))
  processes = [*range(num_processes), *draw(_ints(num_processes, count - num_processes))]
  blocks = [*range(num_blocks), *draw(_ints(num_blocks, count - num_blocks))]
  loading = draw(st.sets(st.integers(0, num_processes - 1)))
  return draw(st.permutations(processes)), draw(st.permutations(blocks)), sorted(loading)


def _ints(below: int, count: int) -> st.SearchStrategy[list[int]]:
  return st.lists(st.integers(0, below - 1), min_size=count, max_size=count)


@settings(max_examples=examples(300))
@given(devices())
def test_every_device_gets_its_block_once_and_no_round_has_two_for_one(result):
  processes, blocks, loading = result
  plan = redistribution(processes, blocks, loading)
  if loading:
    assert all(len(readers) == 1 for readers in plan.readers)
    assert set(plan.blocks_read) <= set(loading)
  received = collections.Counter()
  for pairs in plan.rounds:
    senders, receivers = zip(*pairs, strict=True)
    assert len(set(senders)) == len(senders)
    received.update(receivers)
    for sender, receiver in pairs:
      assert (processes[sender],) == plan.readers[blocks[receiver]]
  hosts = {(processes[device], blocks[device]) for device in received}
  assert len(hosts) == received.total()  # A block comes to a host once.
  for pairs in plan.copies:
    assert {sender for sender, _ in pairs}.isdisjoint(receiver for _, receiver in pairs)
    for sender, receiver in pairs:
      assert (processes[sender], blocks[sender]) == (processes[receiver], blocks[receiver])
      assert received[sender] == 1
    received.update(receiver for _, receiver in pairs)
  for device, (process, block) in enumerate(zip(processes, blocks, strict=True)):
    assert received[device] == (process not in plan.readers[block])
  for number in range(1, len(plan.rounds) + 1):
    filled = {device for device, slots in enumerate(plan.slots) if slots[number] is not None}
    assert filled == {sender for sender, _ in plan.rounds[number - 1]}


@settings(max_examples=examples(100))
@given(devices())
def test_a_loading_process_reads_what_it_uses_and_the_rest_is_divided_evenly(result):
  processes, blocks, loading = result
  plan = redistribution(processes, blocks, loading)
  users = {b: {p for p, c in zip(processes, blocks, strict=True) if c == b} for b in blocks}
  if not loading:
    assert {b: set(readers) for b, readers in enumerate(plan.readers)} == users
    assert plan.rounds == ()
    return
  far = [b for b in users if not users[b] & set(loading)]
  for block, (reader,) in enumerate(plan.readers):
    assert block in far or reader in users[block]
    assert plan.users(block) == tuple(sorted(users[block]))
  counts = {process: len(plan.blocks_read.get(process, ())) for process in loading}
  for block in far:
    assert counts[plan.readers[block][0]] <= min(counts.values()) + 1


def test_a_loading_process_without_devices_is_refused():
  with pytest.raises(ValueError, match=r"processes \(2,\) load, but only \[0, 1\] have devices"):
    redistribution([0, 1], [0, 1], (2,))


def test_thousands_of_hosts():
  processes = consecutive_processes(4096 * 16, 4096)
  plan = redistribution(processes, [device // 2 for device in range(len(processes))], range(1024))
  assert (len(plan.rounds), len(plan.copies)) == (2, 1)
  assert sum(map(len, plan.slots)) == 3 * len(processes)


def test_the_plan_does_not_import_jax():
  program = "import sys, maxbatch.batch.host_loads; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", program], check=True)
