"""The stream and its loader: the same samples in the same order whatever reads them."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import PATIENCE_SECONDS
from rows_in_workers import ROWS, Failing, Numbered
from token_caches import written_cache

from maxbatch.batch.row_plan import StepRows, StepTable
from maxbatch.data import reading
from maxbatch.data.document_rows import TokenWindows
from maxbatch.data.loader import ChainedLoader, Loader, eval_loader, train_loader
from maxbatch.data.mixture import SampleStream
from maxbatch.data.placement import RowPlacement, alone_at_first
from maxbatch.data.reading import ReadAhead, ReadOrder, StepReader
from maxbatch.data.rows import Arrays
from maxbatch.data.token_cache import TokenCache
from maxbatch.data.token_shard import TokenShard
from maxbatch.errors import UserError

MICRO = 8
# One batch size after another, as a ramp-up has them.
RAMP = [1, 1, 2, 2, 3, 3, 1]


def steps_of(microbatches: list[int], first: int = 0) -> list[StepRows]:
  steps = []
  for count in microbatches:
    steps.append(StepRows(first, count))
    first += count * MICRO
  return steps


def sharding(*dims: str | None) -> NamedSharding:
  mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
  return NamedSharding(mesh, PartitionSpec(*dims))


def train(source=None, microbatches=RAMP, first=0, **changes) -> Loader:
  return train_loader(
    source or Numbered(),
    7,
    steps_of(microbatches, first),
    **{
      "micro_batch": MICRO,
      "capacity": 3,
      "sharding": NamedSharding(sharding().mesh, PartitionSpec(None, ("data", "fsdp"))),
      **changes,
    },
  )


def expected_steps(microbatches: list[int], first: int = 0) -> list[np.ndarray]:
  """Per step, the dataset rows [k, MICRO] by the stream itself."""
  stream = SampleStream(ROWS, 7)
  return [
    stream(np.arange(step.first_sample, step.first_sample + step.num_microbatches * MICRO)).reshape(
      -1, MICRO
    )
    for step in steps_of(microbatches, first)
  ]


def check(loader: Loader, microbatches: list[int], first: int = 0) -> None:
  """That every step holds what the stream says, zeros beyond it, and then the end comes."""
  with loader:
    sample = first
    for count, expected in zip(microbatches, expected_steps(microbatches, first), strict=True):
      rows = next(loader)
      assert rows.inputs.shape == (3, MICRO, 2)
      np.testing.assert_array_equal(np.asarray(rows.inputs)[:count, :, 0], expected + 1)
      ids = np.arange(sample, sample + count * MICRO).reshape(count, MICRO)
      np.testing.assert_array_equal(np.asarray(rows.sample_ids)[:count], ids)
      for array in (rows.inputs, rows.targets, rows.weights):
        assert not np.asarray(array)[count:].any()
      assert (np.asarray(rows.sample_ids)[count:] == -1).all()
      assert np.asarray(rows.weights)[:count].all()
      sample += count * MICRO
    with pytest.raises(StopIteration):
      next(loader)


def test_each_epoch_is_every_row_once_in_an_order_of_its_own():
  stream = SampleStream(ROWS, 7)
  epochs = stream(np.arange(3 * ROWS)).reshape(3, ROWS)
  for epoch in epochs:
    assert sorted(epoch) == list(range(ROWS))
  assert (epochs[0] != epochs[1]).any()
  assert (epochs[1] != epochs[2]).any()
  assert (SampleStream(ROWS, 8)(np.arange(ROWS)) != epochs[0]).any()


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 10**12), max_size=8), st.integers(1, 2**31), st.integers(0, 2**40))
def test_the_stream_is_a_pure_function_of_seed_and_index(ids, rows, seed):
  together = SampleStream(rows, seed)(np.array(ids, np.int64))
  for sample, row in reversed(list(zip(ids, together, strict=True))):
    assert SampleStream(rows, seed)(np.array([sample]))[0] == row
    assert 0 <= row < rows


def test_this_version_s_order_is_pinned():
  # A changed order must come with a changed STREAM_VERSION: old runs could not go on.
  assert SampleStream(10, 0)(np.arange(12)).tolist() == [1, 2, 4, 5, 9, 7, 8, 6, 0, 3, 9, 6]


@pytest.mark.parametrize("first", [0, 5, ROWS - 1, 1000 * ROWS + 3])
def test_a_run_may_begin_at_any_sample(first):
  check(train(first=first), RAMP, first)


@pytest.mark.parametrize("factor", ["1/8", "1/4", "1/2", "1", "3/2", "2", "50"])
def test_the_size_of_a_load_changes_nothing(factor):
  check(train(load_factor=Fraction(factor)), RAMP)


@pytest.mark.parametrize("factor", ["1/2", "3/2"])
def test_worker_processes_change_nothing(factor):
  check(train(worker_count=2, load_factor=Fraction(factor)), RAMP)


def test_more_workers_than_loads():
  check(train(microbatches=[2], worker_count=2), [2])


def test_each_device_holds_its_own_columns():
  with train(microbatches=[2]) as loader:
    rows = next(loader)
  for shard in rows.sample_ids.addressable_shards:
    assert shard.data.shape == (3, 1)
    np.testing.assert_array_equal(shard.data, np.asarray(rows.sample_ids)[shard.index])


def test_devices_that_share_a_sample_get_the_same_rows():
  shared = sharding(None, "data")
  with train(microbatches=[1], sharding=shared) as loader:
    rows = next(loader)
  assert {shard.data.shape for shard in rows.inputs.addressable_shards} == {(3, 2, 2)}
  np.testing.assert_array_equal(np.asarray(rows.inputs)[0, :, 0], expected_steps([1])[0][0] + 1)


@pytest.mark.parametrize("factor", ["1/8", "1/2", "1", "3/2"])
def test_a_process_reads_only_its_own_rows(factor):
  """Two processes with two columns each, interleaved: together they read everything once."""
  parts = {}
  for columns in ([0, 1, 6, 7], [2, 3, 4, 5]):
    reader = StepReader(
      ReadOrder(Numbered(), 7),
      StepTable(steps_of(RAMP), MICRO),
      np.array(columns),
      3,
      Fraction(factor),
      0,
    )
    parts[tuple(columns)] = list(reader)
    reader.close()
  for step, expected in enumerate(expected_steps(RAMP)):
    for columns, arrays in parts.items():
      result = arrays[step]["inputs"]
      assert result.shape == (3, 4, 2)
      np.testing.assert_array_equal(result[: len(expected), :, 0], expected[:, list(columns)] + 1)


def test_no_two_steps_share_memory():
  reader = StepReader(
    ReadOrder(Numbered(), 7),
    StepTable(steps_of([3, 3]), MICRO),
    np.arange(MICRO),
    3,
    Fraction(1),
    0,
  )
  first, second = reader
  reader.close()
  for name, array in first.items():
    assert not np.shares_memory(array, second[name])


def test_a_step_beyond_the_capacity_is_refused():
  with (
    train(microbatches=[4]) as loader,
    pytest.raises(ValueError, match="4 microbatches exceed the capacity of 3"),
  ):
    next(loader)


@pytest.mark.parametrize(
  ("workers", "error", "what"),
  [(0, "raise", "gone.tokens"), (1, "raise", "gone.tokens"), (2, "kill", "exit code -9")],
)
def test_a_failing_source_or_a_killed_worker_ends_the_run_with_its_name(workers, error, what):
  with (
    train(Failing(error=error), microbatches=[1] * 9, worker_count=workers) as loader,
    pytest.raises(UserError) as caught,
  ):
    list(loader)
  message = str(caught.value)
  assert message.startswith("reading samples ")
  assert what in message
  assert (f"grain_worker_count={workers}" in message) == (workers > 0)


def test_a_failure_is_repeated_not_taken_for_the_end():
  with train(Failing(), microbatches=[1] * 9) as loader:
    for _ in range(3):
      with pytest.raises(UserError, match="reading samples"):
        list(loader)


def test_loads_that_end_early_are_a_failure_not_the_end(monkeypatch):
  monkeypatch.setattr(reading.ReadPlan, "__len__", lambda plan: 0)
  with (
    train(microbatches=[1]) as loader,
    pytest.raises(UserError, match="reading samples 0 to 7 failed: it ended early"),
  ):
    next(loader)


def test_a_cache_deleted_under_the_workers_is_named(tmp_path):
  source = TokenWindows(
    TokenCache((TokenShard(str(tmp_path / "gone.tokens"), 100, "", 1),), ""), 4, False, 258
  )
  with (
    train(source, microbatches=[1], worker_count=1) as loader,
    pytest.raises(UserError, match=r"gone\.tokens.*rebuilt"),
  ):
    next(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_early_stops_threads_and_processes(workers):
  loader = train(microbatches=[1] * 500, worker_count=workers)
  next(loader)
  loader.close()
  loader.close()
  assert multiprocessing.active_children() == []
  # grain asks its thread to end and does not wait for it.
  end = time.monotonic() + PATIENCE_SECONDS
  while names := [t.name for t in threading.enumerate() if t.name.startswith(OWN_THREADS)]:
    assert time.monotonic() < end, names
    time.sleep(0.01)


OWN_THREADS = ("loader", "grain-prefetch")


# Its workers import this file too, and need nothing of it.
READ_ALL_AND_END = """
def read_all():
  from test_data_loader import train
  with train(worker_count=2) as loader:
    return len(list(loader))

if __name__ == "__main__":
  print(read_all())
"""


def test_workers_leave_nothing_in_shared_memory(tmp_path):
  """As Python's own tracker says at the end of a process."""
  script = tmp_path / "read.py"
  script.write_text(READ_ALL_AND_END)
  here = Path(__file__).parent
  done = subprocess.run(
    [sys.executable, script],
    capture_output=True,
    text=True,
    timeout=300,
    env=os.environ
    | {"PYTHONPATH": f"{here}:{here.parent}", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
  )
  assert (done.stdout, done.stderr) == (f"{len(RAMP)}\n", "")


def test_the_next_step_is_read_while_this_one_is_used():
  source = Watched()
  with train(source, microbatches=[1] * 6) as loader:
    next(loader)
    assert source.third_read.wait(timeout=PATIENCE_SECONDS), "nothing was read ahead"


class Watched:
  """`Numbered`, telling when rows have been read for the third time."""

  def __init__(self):
    self.times_read = 0
    self.third_read = threading.Event()

  def __len__(self) -> int:
    return ROWS

  def rows(self, indices: np.ndarray) -> Arrays:
    self.times_read += 1
    if self.times_read == 3:
      self.third_read.set()
    return Numbered().rows(indices)


def test_no_more_than_two_steps_are_kept_on_the_devices(monkeypatch):
  placed = []
  inner = RowPlacement.stage
  monkeypatch.setattr(RowPlacement, "stage", lambda *args: placed.append(1) or inner(*args))
  with train(microbatches=[1] * 9) as loader:
    next(loader)
    loader._ahead[-1].result()
    assert len(placed) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_is_in_order_and_its_last_batch_is_filled_up(workers):
  batches = eval_loader(
    Numbered(20), eval_batch=8, eval_samples=-1, sharding=sharding("data"), worker_count=workers
  )
  with batches:
    results = list(batches)
  assert [rows.inputs.shape for rows in results] == [(8, 2)] * 3
  inputs = np.concatenate([np.asarray(rows.inputs)[:, 0] for rows in results])
  assert inputs.tolist() == [*range(1, 21), 0, 0, 0, 0]
  weights = np.concatenate([np.asarray(rows.weights)[:, 0] for rows in results])
  assert weights.tolist() == [1.0] * 20 + [0.0] * 4


@pytest.mark.parametrize("batch", [8, 16])
def test_the_validation_set_is_the_same_however_it_is_split(batch):
  place = sharding("data")
  with eval_loader(Numbered(40), eval_batch=batch, eval_samples=20, sharding=place) as batches:
    results = list(batches)
  inputs = np.concatenate([np.asarray(rows.inputs)[:, 0] for rows in results])
  weights = np.concatenate([np.asarray(rows.weights)[:, 0] for rows in results])
  assert inputs[weights > 0].tolist() == list(range(1, 21))


def test_packed_text_reaches_the_devices_with_all_its_fields(tmp_path):
  source = TokenWindows(written_cache(tmp_path / "a.tokens", list(range(200))), 4, True, 258)
  with train(source, microbatches=[2]) as loader:
    rows = next(loader)
  assert rows.segment_ids is not None
  assert rows.positions is not None
  wanted = source.rows(SampleStream(len(source), 7)(np.arange(2 * MICRO)))
  for name, array in wanted.items():
    result = np.asarray(rows._asdict()[name])
    np.testing.assert_array_equal(result[:2].reshape(array.shape), array)


def test_the_wait_for_rows_counts_opening_and_reading_and_not_what_is_dispatched():
  now = 0.0

  def spend(seconds: float, result: Any) -> Any:
    nonlocal now
    now += seconds
    return result

  staged = partial(spend, 100.0, "rows")
  loader = Mock(spec=Loader)
  loader.next_staged.side_effect = lambda: spend(2.0, staged)
  with ChainedLoader([partial(spend, 1.0, loader)], clock=lambda: now) as rows:
    assert [next(rows), rows.waited_seconds()] == ["rows", 3.0]
    assert [next(rows), next(rows), rows.waited_seconds()] == ["rows", "rows", 4.0]
    assert rows.waited_seconds() == 0.0


def test_as_many_loads_are_read_at_once_as_there_are_threads_and_buffers_for_them():
  together = threading.Barrier(3, timeout=PATIENCE_SECONDS)

  class Together(Numbered):
    def rows(self, indices: np.ndarray) -> Arrays:
      together.wait()
      return super().rows(indices)

  ahead = ReadAhead(num_threads=3, prefetch_buffer_size=3)
  check(train(Together(), microbatches=[1] * 3, ahead=ahead), [1] * 3)


def test_the_buffer_of_each_worker_is_that_of_its_key(monkeypatch):
  options = Mock(side_effect=RuntimeError("seen"))
  monkeypatch.setattr(reading.grain, "MultiprocessingOptions", options)
  with pytest.raises(RuntimeError, match="seen"):
    train(worker_count=3, ahead=ReadAhead(per_worker_buffer_size=7))
  options.assert_called_once_with(num_workers=3, per_worker_buffer_size=7)


def test_on_gpus_no_row_is_put_on_devices_while_a_program_runs_for_the_first_time(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  events, threads, can_end = [], [], threading.Event()

  class Noted(RowPlacement):
    def _stage(self, read: Any, ids: Any) -> Any:
      events.append("placed")
      can_end.set()

  def program(patience: float) -> int:
    place, no_ids = Noted(sharding("data"), 0, MICRO), np.zeros(0)
    threads.append(threading.Thread(target=lambda: place.stage({}, no_ids)))
    threads[-1].start()
    can_end.wait(patience)
    events.append("ran")
    return 0

  step = alone_at_first(program)
  step(0.2)
  threads[0].join()
  can_end.clear()
  step(PATIENCE_SECONDS)
  assert events == ["ran", "placed", "placed", "ran"]


def test_on_cpus_programs_run_as_they_are():
  assert alone_at_first(print) is print
