"""What a row costs on its way, stage by stage, in one thread.

Tokens are read from the token cache, which is mapped into memory: what has not been read before comes
from disk. Transferring is timed to the end, with nothing else on the devices.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from maxbatch.batch.row_plan import StepTable, ids_of, steps_in_order
from maxbatch.data.checksums import row_checksums
from maxbatch.data.dataset import Arrays, RowSource
from maxbatch.data.mixture import JoinedRows, sample_stream
from maxbatch.data.packed_rows import PackedRows
from maxbatch.data.placement import RowPlacement
from maxbatch.data.reading import ReadOrder
from maxbatch.data.windows import TokenWindows

_FEWEST = 3


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage of a row's way."""

  name: str
  what: str
  seconds: float
  """For one sample; 0: less than can be told."""


def stages(
  order: ReadOrder,
  samples_per_load: int,
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> list[Stage]:
  """Times each stage on the host, on samples that the run comes to late.

  Args:
    order: the rows, in the run's order.
    samples_per_load: of one host.
    seconds: for all stages together; there are at least three loads.
    clock: in seconds.

  Raises:
    OSError: a file of the token cache is gone.
  """
  assert order.seed is not None
  source, stream = order.source, sample_stream(order.source, order.seed)
  caches, length = list(_caches(source)), source.rows(np.zeros(1, np.int64))["inputs"].shape[1]
  began, times, spent = clock(), 0, np.zeros(4)
  for samples in _loads(samples_per_load):
    marks = [clock()]
    indices = stream(samples)
    marks.append(clock())
    _read(caches, length, samples_per_load)
    marks.append(clock())
    arrays = source.rows(indices)
    marks.append(clock())
    row_checksums(arrays, ids_of(samples))
    marks.append(clock())
    spent, times = spent + np.diff(marks), times + 1
    if times >= _FEWEST and marks[-1] - began > seconds:
      break
  order_s, read_s, rows_s, check_s = (spent / (times * samples_per_load)).tolist()
  read = [Stage("read", "tokens from the cache", min(read_s, rows_s))] if caches else []
  made = "documents, segments and weights" if caches else "as the dataset makes them"
  return [
    Stage("order", "which row each sample is", order_s),
    *read,
    Stage("pack", f"rows: {made}", max(rows_s - read_s, 0.0) if caches else rows_s),
    Stage("check", "a checksum of each row", check_s),
  ]


def transfer(order: ReadOrder, place: RowPlacement, seconds: float) -> Stage:
  """Times bringing a microbatch to the devices of this process."""
  count = place.num_rows
  arrays: Arrays = {name: array[None] for name, array in order(np.arange(count)).items()}
  ids = StepTable(steps_in_order(count, count), count).sample_ids(0, 1)

  def bring() -> None:
    jax.block_until_ready(place.stage({jax.process_index(): arrays}, ids)())

  bring()
  return Stage("transfer", "to the devices", _timed(bring, count, seconds))


def _loads(samples_per_load: int) -> Iterator[np.ndarray]:
  """Samples that the measurements of settings do not read, so that none is in memory because of them."""
  first = 2**31
  while True:
    yield np.arange(first, first + samples_per_load)
    first += samples_per_load


def _caches(source: RowSource) -> Iterator[Any]:
  """The token caches that rows are made of."""
  if isinstance(source, TokenWindows | PackedRows):
    yield source.cache
  elif isinstance(source, JoinedRows):
    for one in source.sources:
      yield from _caches(one)


def _read(caches: list[Any], length: int, count: int) -> None:
  """Copies the tokens of so many rows from anywhere in the caches."""
  random = np.random.default_rng()
  for where in random.random(count if caches else 0):
    cache = caches[int(where * len(caches))]
    start = int(random.random() * max(cache.num_tokens - length, 1))
    np.array(cache.read(start, min(start + length + 1, cache.num_tokens)))


def _timed(work: Callable[[], object], samples: int, seconds: float) -> float:
  """Seconds for one sample."""
  began, times = time.perf_counter(), 0
  while times < _FEWEST or time.perf_counter() - began < seconds:
    work()
    times += 1
  return (time.perf_counter() - began) / (times * samples)
