"""Brings rows to the devices while the step before is running.

B rows of a microbatch, T tokens per row, C the capacity of a step's array in microbatches.

Reading, and putting rows on the devices of this process, happens in a thread. What the processes
send each other is dispatched where the rows are used, just before the step, so that all of them
dispatch their programs in the same order; the devices are then still busy with the step before.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction

import jax
from jax.sharding import NamedSharding

from maxbatch.batch.row_plan import StepRows, StepTable, steps_in_order
from maxbatch.data.placement import RowPlacement, Staged
from maxbatch.data.reading import AS_USUAL, ReadAhead, ReadOrder, StepReader
from maxbatch.data.rows import FirstRows, Rows, RowSource

# Steps kept ready on the devices: one to use next, one on its way.
_STEPS_AHEAD = 2


def train_loader(
  source: RowSource,
  seed: int,
  steps: Sequence[StepRows],
  *,
  micro_batch: int,
  capacity: int,
  sharding: NamedSharding,
  load_factor: Fraction = Fraction(1),
  worker_count: int = 0,
  loading: Sequence[int] = (),
  ahead: ReadAhead = AS_USUAL,
) -> "Loader":
  """Returns a loader of the training steps in order, each as `Rows` of global arrays [C, B, T].

  Args:
    steps: the steps to come, without gaps; the first may begin at any sample.
    micro_batch: rows of a microbatch over all devices.
    capacity: microbatches of the largest step; smaller steps are filled up with weight 0.
    sharding: of [C, B, T]; may divide B and T, not C: each device gets its tokens alone.
    load_factor: samples read at once, as a multiple of the step's (`expansion_factor_real_data`).
    worker_count: processes that read ahead (`grain_worker_count`); 0: a thread.
    loading: the processes that read for all; none: each for its own devices.

  Raises UserError: `load_factor` does not make whole loads; from the iterator: reading failed.
  """
  place = RowPlacement(sharding, row_dim=1, num_rows=micro_batch, loading=tuple(loading))
  table = StepTable(steps, micro_batch)
  order = ReadOrder(source, seed, place.part(jax.process_index()))
  return Loader(order, table, place, capacity, load_factor, worker_count, ahead)


def eval_loader(
  source: RowSource,
  *,
  eval_batch: int,
  eval_samples: int,
  sharding: NamedSharding,
  worker_count: int = 0,
  loading: Sequence[int] = (),
  ahead: ReadAhead = AS_USUAL,
) -> "Loader":
  """Returns a loader of the first `eval_samples` rows (-1: all) of `source` in its own order, as
  `Rows` [B, T].

  The last batch is filled up with rows of weight 0. `sharding` is of [B, T] and may divide B.
  """
  place = RowPlacement(sharding, row_dim=0, num_rows=eval_batch, loading=tuple(loading))
  source = source if eval_samples < 0 else FirstRows(source, eval_samples)
  table = StepTable(steps_in_order(len(source), eval_batch), eval_batch)
  order = ReadOrder(source, None, place.part(jax.process_index()))
  return Loader(order, table, place, 1, Fraction(1), worker_count, ahead)


class Loader(Iterator[Rows]):
  """Steps on the devices, prepared in a thread.

  Close it, or use it as a context manager: threads and worker processes end then.
  """

  def __init__(
    self,
    order: ReadOrder,
    table: StepTable,
    place: RowPlacement,
    capacity: int,
    load_factor: Fraction,
    worker_count: int,
    ahead: ReadAhead = AS_USUAL,
  ):
    self._table, self._place, self._capacity = table, place, capacity
    self._process = jax.process_index()
    columns = place.columns(self._process)
    self._reader = StepReader(
      order, table, columns, capacity, load_factor, worker_count, place.microbatches, ahead
    )
    self._begun = 0
    # One thread, so steps come in order; it never waits for a consumer, so closing cannot hang.
    self._executor = ThreadPoolExecutor(1, thread_name_prefix="loader")
    self._ahead: collections.deque[Future[Staged]] = collections.deque()
    self._fill()

  def __next__(self) -> Rows:
    """Returns the next step. Raises UserError if reading failed, again on every later call."""
    return self.next_staged()()

  def next_staged(self) -> Staged:
    """Waits for the rows of the next step, which are then dispatched. Raises StopIteration: there
    is no further step; UserError: reading failed; again on every later call."""
    if not self._ahead:
      raise StopIteration
    staged = self._ahead[0].result()
    self._ahead.popleft()
    self._fill()
    return staged

  def __enter__(self) -> "Loader":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Stops reading and ends the threads and processes; harmless when repeated."""
    self._begun = len(self._table)
    self._executor.shutdown(wait=True, cancel_futures=True)
    self._ahead.clear()
    self._reader.close()

  def _fill(self) -> None:
    while self._begun < len(self._table) and len(self._ahead) < _STEPS_AHEAD:
      self._ahead.append(self._executor.submit(self._bring, self._begun))
      self._begun += 1

  def _bring(self, step: int) -> Staged:
    read = {self._process: next(self._reader)}
    return self._place.stage(read, self._table.sample_ids(step, self._capacity))


@dataclasses.dataclass(frozen=True)
class EvalRows:
  """Validation rows that are evaluated together, and their part of the loss of the whole."""

  name: str
  """Name of the source in a mixture; empty where there is only one."""
  share: float
  open: Callable[[], Loader]


class ChainedLoader(Iterator[Rows]):
  """Loaders one after the other, each opened when the one before it is empty; a context manager."""

  def __init__(
    self, opened: Iterable[Callable[[], Loader]], clock: Callable[[], float] = time.perf_counter
  ):
    self._left = iter(opened)
    self._current: Loader | None = None
    self._clock, self._waited = clock, 0.0

  def __next__(self) -> Rows:
    began = self._clock()
    staged = self._next_staged()
    self._waited += self._clock() - began
    return staged()

  def waited_seconds(self) -> float:
    """Returns how long `next` has waited for rows to be read since this was last asked.

    That is for files, workers and the reading thread, at the beginning also to open them. What the
    devices do afterwards, or the host while it dispatches, is not in it.
    """
    waited, self._waited = self._waited, 0.0
    return waited

  def _next_staged(self) -> Staged:
    while True:
      if self._current is None:
        self._current = next(self._left)()
      try:
        return self._current.next_staged()
      except StopIteration:
        self.close()

  def __enter__(self) -> "ChainedLoader":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    if self._current is not None:
      self._current.close()
      self._current = None
