"""How fast one process reads with each setting, and what a row costs on its way, stage by stage.

The run's own reader is asked as fast as it can answer. Stages are timed in one thread: tokens are read
from the token cache, which is mapped into memory, so that what has not been read before comes from
disk; transferring is timed to the end, with nothing else on the devices.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from maxbatch.batch.row_plan import Steps, StepTable, ids_of, steps_in_order
from maxbatch.config.schema import DataConfig
from maxbatch.data.document_rows import PackedRows, TokenWindows
from maxbatch.data.mixture import JoinedRows, sample_stream
from maxbatch.data.placement import RowPlacement
from maxbatch.data.reading import ReadAhead, ReadOrder, StepReader
from maxbatch.data.rows import Arrays, RowSource, row_checksums


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
  """What reads, and how far ahead; smaller ones take fewer processes, then threads, then memory."""

  worker_count: int = 0
  """`grain_worker_count`; 0: threads read."""
  num_threads: int = 1
  """`grain_num_threads`, which worker processes have none of."""
  buffer_size: int = 2
  """Loads ahead: `grain_prefetch_buffer_size`, or `grain_per_worker_buffer_size`."""

  @property
  def cpus(self) -> int:
    """Cores of a host that it keeps busy: those that read, and one that feeds the devices."""
    return max(self.worker_count, self.num_threads) + 1

  @property
  def num_loads_ahead(self) -> int:
    """Loads that a host has in memory, the one that is being used among them."""
    return max(self.worker_count, 1) * self.buffer_size + 1

  def keys(self) -> dict[str, int]:
    """Returns the configuration's keys that make a run read so."""
    buffer = "grain_per_worker_buffer_size" if self.worker_count else "grain_prefetch_buffer_size"
    threads = {"grain_num_threads": self.num_threads, buffer: self.buffer_size}
    return {"grain_worker_count": self.worker_count} | threads


@dataclasses.dataclass(frozen=True)
class Measured:
  """What one process reads with a setting, as fast as it can."""

  setting: Setting
  samples_per_load: int
  samples_per_second: float
  first_seconds: float
  """Until the first load is there: workers start, files are opened."""
  slowest_seconds: float
  """The longest that one load made the reader wait after that."""


def setting_of(data: DataConfig) -> Setting:
  if data.grain_worker_count:
    return Setting(data.grain_worker_count, 1, data.grain_per_worker_buffer_size)
  return Setting(0, data.grain_num_threads, data.grain_prefetch_buffer_size)


def settings_to_measure(given: Setting, num_cores: int) -> list[Setting]:
  """Returns the configured setting, then workers and threads up to the cores, then buffers.

  What matters most comes first: time may not suffice for all.
  """
  counts = [2**power for power in range(int(math.log2(max(num_cores, 1))) + 1)]
  results = [given, Setting(), *(Setting(count) for count in counts)]
  results += [Setting(0, count, max(2, count)) for count in counts]
  results += [Setting(buffer_size=size) for size in (1, 4)]
  return list(dict.fromkeys(results))


_FEWEST = 3
_MOST = 10**6


def measure(
  order: ReadOrder,
  setting: Setting,
  samples_per_load: int,
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> Measured:
  """Reads loads of the run's order of samples, from its first on.

  What was read ahead while the reader started is taken and not counted.

  Args:
    seconds: for the loads that are counted; there are at least three.

  Raises UserError: reading fails.
  """
  reader = _reader(order, setting, samples_per_load)
  try:
    began = clock()
    next(reader)
    now = first = clock()
    waits: list[float] = []
    uncounted, limit = setting.num_loads_ahead, seconds
    while len(waits) < uncounted + _FEWEST or now - first < limit:
      next(reader)
      before, now = now, clock()
      waits.append(now - before)
      if len(waits) == uncounted:
        limit += now - first
    counted = waits[uncounted:]
  finally:
    reader.close()
  speed = samples_per_load * len(counted) / max(sum(counted), 1e-9)
  return Measured(setting, samples_per_load, speed, first - began, max(counted))


def _reader(order: ReadOrder, setting: Setting, samples_per_load: int) -> StepReader:
  steps = Steps([(range(0, _MOST * samples_per_load, samples_per_load), 1)])
  return StepReader(
    order,
    StepTable(steps, samples_per_load),
    np.arange(samples_per_load),
    1,
    Fraction(1),
    setting.worker_count,
    ahead=ReadAhead(setting.num_threads, setting.buffer_size, setting.buffer_size),
  )


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
  """Times each stage on the host, on samples that the run reads late.

  Args:
    seconds: for all stages together; there are at least three loads.

  Raises OSError: a file of the token cache is gone.
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
  count, process = place.num_rows, jax.process_index()
  order = dataclasses.replace(order, part=place.part(process))
  arrays: Arrays = {name: array[None] for name, array in order(np.arange(count)).items()}
  ids = StepTable(steps_in_order(count, count), count).sample_ids(0, 1)

  def bring() -> None:
    jax.block_until_ready(place.stage({process: arrays}, ids)())

  bring()
  return Stage("transfer", "to the devices", _timed(bring, count, seconds))


def _loads(samples_per_load: int) -> Iterator[np.ndarray]:
  """Yields samples that the measurements of settings do not read, so that none is in memory because
  of them."""
  first = 2**31
  while True:
    yield np.arange(first, first + samples_per_load)
    first += samples_per_load


def _caches(source: RowSource) -> Iterator[Any]:
  """Yields the token caches that rows are made of."""
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
  began, times = time.perf_counter(), 0
  while times < _FEWEST or time.perf_counter() - began < seconds:
    work()
    times += 1
  return (time.perf_counter() - began) / (times * samples)
