"""Reads the rows of a process step by step, on the host, through grain.

R rows, T tokens per row, k microbatches, C the capacity of the step's array in microbatches.

One grain element is one load. Loads are divided into steps here, in order of samples, so neither
the size of a load nor the number of workers can change what a step holds. This file and what it
imports do not use devices: worker processes run it too.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import grain
import numpy as np
from absl import flags
from grain.multiprocessing import SharedMemoryArray

from maxbatch.batch.row_plan import StepTable, ids_of
from maxbatch.config.schema import DataConfig
from maxbatch.data.mixture import sample_stream
from maxbatch.data.rows import WHOLE, Arrays, RowPart, RowSource, part_of_rows, row_checksums
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class ReadAhead:
  """Loads that are read before they are asked for; it changes none of them."""

  num_threads: int = 1
  """Without worker processes: loads that are read at once."""
  prefetch_buffer_size: int = 2
  """Without worker processes: loads that wait, or are being read."""
  per_worker_buffer_size: int = 2
  """Loads that wait in each worker process."""


AS_USUAL = ReadAhead()


def read_ahead(data: DataConfig) -> ReadAhead:
  """Returns how far ahead rows are read, by the keys."""
  return ReadAhead(
    data.grain_num_threads, data.grain_prefetch_buffer_size, data.grain_per_worker_buffer_size
  )


@dataclasses.dataclass(frozen=True)
class ReadOrder:
  """Turns sample ids into rows: the shuffled, endless stream, or the source's own order once."""

  source: RowSource
  seed: int | None
  """None reads the source in its own order; samples beyond its end are padding."""
  part: RowPart = WHOLE
  """Of each row, what is read."""

  @functools.cached_property
  def _stream(self) -> Callable[[np.ndarray], np.ndarray]:
    assert self.seed is not None
    return sample_stream(self.source, self.seed)

  def __call__(self, samples: np.ndarray) -> Arrays:
    """Reads the rows of the samples int64[R], or a part of each, with `checksums` uint32[R] of what is read."""
    if self.seed is None:
      arrays = self._in_order(samples)
    else:
      arrays = part_of_rows(self.source, self._stream(samples), self.part)
    return arrays | {"checksums": row_checksums(arrays, ids_of(samples))}

  def _in_order(self, samples: np.ndarray) -> Arrays:
    real = samples < len(self.source)
    if real.all():
      return part_of_rows(self.source, samples, self.part)
    # Row 0 stands in where there is none, and is then cleared: weight 0 and all else 0.
    arrays = part_of_rows(self.source, np.where(real, samples, 0), self.part)
    for array in arrays.values():
      array[~real] = 0
    return arrays


@dataclasses.dataclass(frozen=True)
class ReadPlan:
  """What one process reads for a sequence of steps, load by load."""

  steps: StepTable
  columns: np.ndarray
  """int64[R]: which rows of every microbatch this process reads, ascending."""
  bounds: Sequence[int]
  """loads + 1 numbers: the sample each load begins at, and the end."""

  def __len__(self) -> int:
    return len(self.bounds) - 1

  def __getitem__(self, index: int) -> np.ndarray:
    """Returns the samples int64[R] of load `index` that are this process's, ascending."""
    begin, end = self.bounds[index], self.bounds[index + 1]
    return self.steps.samples_between(begin, end, self.columns)


class StepReader:
  """Iterates over steps: arrays [K, R, …] of a process's rows; padding, and microbatches beyond k, are 0.

  K is what `microbatches` makes of k and C. A process that reads no row opens no file.
  """

  def __init__(
    self,
    order: ReadOrder,
    table: StepTable,
    columns: np.ndarray,
    capacity: int,
    load_factor: Fraction,
    worker_count: int,
    microbatches: Callable[[int, int], int] = lambda _, capacity: capacity,
    ahead: ReadAhead = AS_USUAL,
  ):
    self._plan = ReadPlan(table, columns, table.load_bounds(load_factor))
    self._capacity = capacity
    self._microbatches = microbatches
    self._workers = worker_count if len(columns) else 0
    self._order = order
    self._loads = _start(self._plan, order, worker_count, ahead) if len(columns) else None
    self._pending: list[Arrays] = []
    self._load = 0
    self._step = 0

  @functools.cached_property
  def _no_rows(self) -> Arrays:
    """What a row looks like, where a process has none of a step."""
    return self._order(np.zeros(0, np.int64))

  def __iter__(self) -> Iterator[Arrays]:
    return self

  def __next__(self) -> Arrays:
    if self._step == len(self._plan.steps):
      raise StopIteration
    microbatches = self._plan.steps.plan(self._step).num_microbatches
    if microbatches > self._capacity:
      raise ValueError(f"{microbatches} microbatches exceed the capacity of {self._capacity}")
    wanted = len(self._plan.steps.samples(self._step, self._plan.columns))
    pieces = self._take(wanted) or [self._no_rows]
    self._step += 1
    names = pieces[0]
    return {name: self._stack([each[name] for each in pieces], microbatches) for name in names}

  def close(self) -> None:
    """Stops the threads and processes that read ahead, and frees what they have read."""
    if self._loads is not None:
      self._loads.close()
    self._pending.clear()
    if self._workers:
      _free_shared_memory()

  def _take(self, wanted: int) -> list[Arrays]:
    """Takes the next `wanted` rows, as views of the loads that hold them."""
    pieces: list[Arrays] = []
    while wanted:
      if not self._pending:
        self._pending.append(self._next_load())
      load = self._pending.pop()
      size = len(load["checksums"])
      # A load smaller than a microbatch may hold no row of this process.
      if size:
        pieces.append({name: array[:wanted] for name, array in load.items()})
      if size > wanted:
        self._pending.append({name: array[wanted:] for name, array in load.items()})
      wanted -= min(size, wanted)
    return pieces

  def _next_load(self) -> Arrays:
    assert self._loads is not None
    try:
      load = next(self._loads)
    except (OSError, RuntimeError, StopIteration) as error:
      begin, end = self._plan.bounds[self._load : self._load + 2]
      advice = "start again; a missing token cache is rebuilt"
      if self._workers:
        advice += f"; if memory ran out, lower grain_worker_count={self._workers}"
      raise UserError(
        f"reading samples {begin} to {end - 1} failed: {str(error) or 'it ended early'}; {advice}"
      ) from error
    self._load += 1
    return load

  def _stack(self, pieces: Sequence[np.ndarray], microbatches: int) -> np.ndarray:
    """Stacks the pieces' rows into one array [C, R, …], without a copy where they are one."""
    length = self._microbatches(microbatches, self._capacity)
    shape = (length, len(self._plan.columns), *pieces[0].shape[1:])
    # Rows from a worker lie in shared memory, of which containers have little: a copy frees it.
    num_rows = sum(map(len, pieces))
    if len(pieces) == 1 and num_rows == math.prod(shape[:2]) and not self._workers:
      return pieces[0].reshape(shape)
    stacked = np.zeros(shape, pieces[0].dtype)
    np.concatenate(pieces, out=stacked.reshape(-1, *shape[2:])[:num_rows])
    return stacked


def _free_shared_memory() -> None:
  """Frees what workers have read now: at Python's exit it would be reported as leaked.

  grain's threads leave the last load of a worker in a cycle of frame and traceback, and a thread
  pool, without a public name, frees one array after another.
  """
  gc.collect()
  freeing = getattr(SharedMemoryArray, "_del_thread_pool", None)
  if freeing is not None:
    freeing.apply(int)  # It has one thread: what was handed to it before is done.


def _start(
  plan: ReadPlan, order: ReadOrder, worker_count: int, ahead: ReadAhead
) -> grain.DatasetIterator[Arrays]:
  loads = grain.MapDataset.source(plan).map(order)
  if not worker_count:
    read = grain.ReadOptions(
      num_threads=ahead.num_threads, prefetch_buffer_size=ahead.prefetch_buffer_size
    )
    return iter(loads.to_iter_dataset(read))
  # grain reads its options from absl flags, which nobody has parsed.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  alone = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  options = grain.MultiprocessingOptions(
    num_workers=worker_count, per_worker_buffer_size=ahead.per_worker_buffer_size
  )
  return iter(loads.to_iter_dataset(alone).mp_prefetch(options))
