"""Processes that read for others: the devices get the same rows as when each reads its own.

Here groups of the simulated devices stand for processes, and this process reads for all of them.
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numbered_rows import NumberedRows
from support import collectives, mesh

from maxbatch.batch.row_plan import StepRows, StepTable
from maxbatch.data import placement
from maxbatch.data.loader import eval_loader, train_loader
from maxbatch.data.placement import RowPlacement, WrongRowError
from maxbatch.data.reading import ReadOrder, StepReader
from maxbatch.data.rows import WHOLE, RowPart, Rows

MICRO, SEED = 24, 7
GROWING = [1, 3, 3, 1]
"""Microbatches of each step: two programs, for 1 and for 4."""
AXES = {"data": (8, 1, 1, 1), "fsdp": (2, 2, 2, 1), "stages": (2, 2, 1, 2), "one row": (1, 1, 4, 2)}
PARTS_OF_ROWS = {"data": 2, "context": 4}
"""A device has a part of each of its rows."""


def steps_of(counts: Sequence[int], first: int = 5) -> list[StepRows]:
  ends = first + MICRO * np.cumsum(counts)
  return [StepRows(int(end) - MICRO * k, k) for end, k in zip(ends, counts, strict=True)]


def place_of(axes: tuple[int, int, int, int]) -> NamedSharding:
  return NamedSharding(mesh(*axes), PartitionSpec(None, ("data", "fsdp")))


def place_of_parts() -> NamedSharding:
  return NamedSharding(mesh(**PARTS_OF_ROWS), PartitionSpec(None, ("data", "fsdp"), "context"))


def placed_for(sharding: NamedSharding, processes: int, loading: tuple[int, ...], row_dim: int = 1):
  local = 8 // processes
  return RowPlacement(sharding, row_dim, MICRO, loading, lambda device: device.id // local)


def by_all(
  place: RowPlacement, processes: int, steps: list[StepRows], capacity: int, factor: Fraction, workers: int
) -> Iterator[Rows]:  # fmt: skip
  """The steps as several processes read and send them."""
  table = StepTable(steps, MICRO)
  readers = {
    process: StepReader(
      ReadOrder(NumberedRows(), SEED, place.part(process)),
      table,
      place.columns(process),
      capacity,
      factor,
      workers,
      place.microbatches,
    )
    for process in range(processes)
  }
  for step in range(len(steps)):
    read = {process: next(reader) for process, reader in readers.items()}
    yield place.stage(read, table.sample_ids(step, capacity))()
  for reader in readers.values():
    reader.close()


def keep_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
  """Also of rows that nobody sends, as those that one compares with are."""
  monkeypatch.setattr(RowPlacement, "sends", True)


CASES = [
  # axes, processes, loading processes, load factor, workers, streamed
  ("data", 4, (0, 1), "2", 0, False),
  ("data", 4, (1, 2, 3), "4/3", 0, False),
  ("data", 4, (3,), "4", 0, True),
  ("data", 2, (1,), "2", 1, False),
  ("fsdp", 4, (1, 3), "1/2", 0, False),
  ("fsdp", 4, (), "-1", 0, False),
  ("fsdp", 2, (1,), "1", 0, True),
  ("stages", 4, (0, 1, 2), "4/3", 0, False),
  ("stages", 4, (2,), "4", 0, False),
  ("one row", 4, (0, 2), "2", 0, False),
  ("parts", 4, (0, 2), "2", 0, False),
  ("parts", 2, (1,), "2", 0, True),
]


@pytest.mark.parametrize(("axes", "processes", "loading", "factor", "workers", "streamed"), CASES)
def test_every_device_has_the_rows_that_it_would_have_read(
  axes, processes, loading, factor, workers, streamed, monkeypatch
):
  keep_checksums(monkeypatch)
  sharding = place_of_parts() if axes == "parts" else place_of(AXES[axes])
  capacity = 1 if streamed else 8
  steps = steps_of([1] * 5 if streamed else GROWING)
  place = placed_for(sharding, processes, loading)
  load_factor = max(Fraction(factor), Fraction(1, 2))
  result = by_all(place, processes, steps, capacity, load_factor, workers)
  with train_loader(
    NumberedRows(), SEED, steps, micro_batch=MICRO, capacity=capacity, sharding=sharding
  ) as loader:
    for expected, rows in zip(loader, result, strict=True):
      assert expected._fields == rows._fields
      for name, array in rows._asdict().items():
        wanted = getattr(expected, name)
        if array is None:
          assert wanted is None, name
          continue
        assert array.sharding.is_equivalent_to(wanted.sharding, wanted.ndim), name
        assert array.dtype == wanted.dtype
        for one, other in zip(array.addressable_shards, wanted.addressable_shards, strict=True):
          np.testing.assert_array_equal(one.data, other.data, err_msg=name)


def test_a_device_is_sent_its_part_of_a_row_alone():
  arrays = {}
  for name, sharding in {"whole": place_of(AXES["one row"]), "parts": place_of_parts()}.items():
    with train_loader(
      NumberedRows(), SEED, steps_of([1]), micro_batch=MICRO, capacity=1, sharding=sharding
    ) as loader:
      arrays[name] = next(loader)
  for field, array in arrays["parts"]._asdict().items():
    if array is None:
      continue
    whole = np.asarray(getattr(arrays["whole"], field))
    np.testing.assert_array_equal(array, whole, err_msg=field)
    ways = 8 if whole.ndim == 3 else 2
    assert {part.data.size for part in array.addressable_shards} == {whole.size // ways}, field


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_a_process_reads_the_tokens_of_its_devices_alone(processes):
  """Two have whole rows; of four each has half of a row, of eight a quarter. The rows are the same."""
  place, sharding = placed_for(place_of_parts(), processes, ()), place_of_parts()
  steps = steps_of([1, 2])
  parts = [place.part(process) for process in range(processes)]
  assert (
    parts
    == {
      2: [WHOLE] * 2,
      4: [RowPart(0, 2, 4), RowPart(2, 4, 4)] * 2,
      8: [RowPart(at, at + 1, 4) for at in range(4)] * 2,
    }[processes]
  )
  # Those that are sent are read whole.
  assert placed_for(sharding, processes, (1,)).part(1) == WHOLE
  with train_loader(
    NumberedRows(), SEED, steps, micro_batch=MICRO, capacity=2, sharding=sharding
  ) as loader:
    for expected, rows in zip(
      loader, by_all(place, processes, steps, 2, Fraction(1), 0), strict=True
    ):
      jax.tree.map(np.testing.assert_array_equal, rows, expected)
  table = StepTable(steps, MICRO)
  order = ReadOrder(NumberedRows(), SEED, parts[1])
  read = next(StepReader(order, table, place.columns(1), 2, Fraction(1), 0))
  assert read["inputs"].shape == (2, MICRO // 2, 8 // processes if processes > 2 else 4)
  read["inputs"][0, 3, 0] += 1
  with pytest.raises(WrongRowError):
    place.stage({1: read}, table.sample_ids(0, 2))


def test_the_validation_batch_is_sent_too(monkeypatch):
  keep_checksums(monkeypatch)
  sharding = NamedSharding(mesh(4, 2), PartitionSpec(("data", "fsdp")))
  place = placed_for(sharding, 4, (2,), row_dim=0)
  order = ReadOrder(NumberedRows(30), None)
  table = StepTable([StepRows(0, 1), StepRows(24, 1)], MICRO)
  read = {
    process: StepReader(order, table, place.columns(process), 1, Fraction(1), 0, place.microbatches)
    for process in range(4)
  }
  with eval_loader(
    NumberedRows(30), eval_batch=MICRO, eval_samples=-1, sharding=sharding
  ) as batches:
    for step, expected in enumerate(batches):
      arrays = {process: next(reader) for process, reader in read.items()}
      rows = place.stage(arrays, table.sample_ids(step, 1))()
      jax.tree.map(np.testing.assert_array_equal, rows, expected)
  for reader in read.values():
    reader.close()


@pytest.mark.parametrize(
  ("processes", "loading", "rounds"),
  [(4, (0, 1), 1), (4, (0, 2, 3), 1), (8, (5,), 7), (2, (0, 1), 0)],
)
def test_the_program_holds_one_collective_permute_a_round_and_no_other_message(
  processes, loading, rounds, monkeypatch
):
  programs = []
  inner = placement._redistribution

  def watched(*arguments):
    program = inner(*arguments)
    return lambda sent: programs.append(program.lower(sent).compile().as_text()) or program(sent)

  monkeypatch.setattr(placement, "_redistribution", watched)
  place = placed_for(place_of(AXES["data"]), processes, loading)
  assert len(place.plan.rounds) == rounds
  next(by_all(place, processes, steps_of([3]), 8, Fraction(1), 0))
  assert len(programs) == bool(rounds)
  for text in programs:
    result = collectives(text)
    assert result == {"loop": [], "once": ["collective-permute"] * rounds}
    assert not re.search(r" (all-reduce|all-gather|all-to-all|reduce-scatter)", text)


def test_few_programs_are_compiled_when_the_batch_grows():
  place = placed_for(place_of(AXES["data"]), 4, (0, 1))
  assert {place.microbatches(used, 16) for used in range(1, 17)} == {1, 2, 4, 8, 16}
  assert placed_for(place_of(AXES["data"]), 4, ()).microbatches(1, 16) == 16


class NoFile(NumberedRows):
  """Fails when a row is read."""

  def rows(self, indices: np.ndarray):
    """See `RowSource.rows`."""
    if len(indices):
      raise FileNotFoundError(2, "No such file or directory", "not.here")
    return super().rows(indices)


def test_a_process_that_does_not_load_reads_no_row_and_starts_no_worker():
  place = placed_for(place_of(AXES["data"]), 4, (0, 1))
  table = StepTable(steps_of([1, 1, 2, 3, 3, 5, 1]), MICRO)
  order = ReadOrder(NoFile(), SEED)
  reader = StepReader(order, table, place.columns(3), 8, Fraction(1), 2, place.microbatches)
  arrays = list(reader)
  assert [each["inputs"].shape for each in arrays] == [(k, 0, 4) for k in (1, 1, 2, 4, 4, 8, 1)]
  reader.close()
