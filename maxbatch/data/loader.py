"""Brings rows to the devices while the step before is running.

B rows of a microbatch, T tokens per row, C the capacity of a step's array in microbatches; R of
the B rows belong to this process.

Every process reads only the rows of its own devices; `jax.make_array_from_callback` joins them
into global arrays without sending anything.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxbatch.batch.row_plan import StepRows, steps_in_order
from maxbatch.data.dataset import Arrays, FirstRows, RowSource
from maxbatch.data.reading import ReadOrder, StepReader
from maxbatch.data.rows import Rows

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
) -> "Loader":
  """The training steps in order, each as `Rows` of global arrays [C, B, T].

  Args:
    source: the rows, for example `Dataset.train`.
    seed: `data_shuffle_seed`.
    steps: the steps to come, without gaps; the first may begin at any sample.
    micro_batch: rows of a microbatch over all devices.
    capacity: microbatches of the largest step; smaller steps are filled up with weight 0.
    sharding: of [C, B, T]; may divide B, not C or T.
    load_factor: samples read at once, as a multiple of the step's (`expansion_factor_real_data`).
    worker_count: processes that read ahead (`grain_worker_count`); 0: a thread.

  Raises:
    UserError: `load_factor` does not make whole loads; from the iterator: reading failed.
  """
  place = _RowPlacement(sharding, row_dim=1, num_rows=micro_batch)
  order = ReadOrder(source, seed)
  reader = StepReader(order, steps, micro_batch, place.columns, capacity, load_factor, worker_count)
  return Loader(reader, place, len(steps))


def eval_loader(
  source: RowSource,
  *,
  eval_batch: int,
  eval_samples: int,
  sharding: NamedSharding,
  worker_count: int = 0,
) -> "Loader":
  """The first `eval_samples` rows (-1: all) of `source` in its own order, as `Rows` [B, T].

  The last batch is filled up with rows of weight 0. `sharding` is of [B, T] and may divide B.
  """
  place = _RowPlacement(sharding, row_dim=0, num_rows=eval_batch)
  source = source if eval_samples < 0 else FirstRows(source, eval_samples)
  steps = steps_in_order(len(source), eval_batch)
  reader = StepReader(
    ReadOrder(source, None), steps, eval_batch, place.columns, 1, Fraction(1), worker_count
  )

  def place_batch(arrays: Arrays) -> Rows:
    return place({name: array[0] for name, array in arrays.items()})

  return Loader(reader, place_batch, len(steps))


class Loader(Iterator[Rows]):
  """Steps on the devices, prepared in a thread.

  Close it, or use it as a context manager: threads and worker processes end then.
  """

  def __init__(self, reader: StepReader, place: Callable[[Arrays], Rows], num_steps: int):
    self._reader = reader
    self._place = place
    self._left = num_steps
    # One thread, so steps come in order; it never waits for a consumer, so closing cannot hang.
    self._executor = ThreadPoolExecutor(1, thread_name_prefix="loader")
    self._ahead: collections.deque[Future[Rows]] = collections.deque()
    self._fill()

  def __next__(self) -> Rows:
    """The next step. Raises UserError if reading failed, again on every later call."""
    if not self._ahead:
      raise StopIteration
    rows = self._ahead[0].result()
    self._ahead.popleft()
    self._fill()
    return rows

  def __enter__(self) -> "Loader":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Stops reading and ends the threads and processes; harmless when repeated."""
    self._left = 0
    self._executor.shutdown(wait=True, cancel_futures=True)
    self._ahead.clear()
    self._reader.close()

  def _fill(self) -> None:
    while self._left and len(self._ahead) < _STEPS_AHEAD:
      self._left -= 1
      self._ahead.append(self._executor.submit(self._bring))

  def _bring(self) -> Rows:
    return self._place(next(self._reader))


@dataclasses.dataclass(frozen=True)
class EvalRows:
  """Validation rows that are evaluated together, and their part of the loss of the whole."""

  name: str
  """Of the source of a mixture; empty where there is nothing to tell apart."""
  share: float
  open: Callable[[], Loader]
  """Opens them from their beginning."""


class ChainedLoader(Iterator[Rows]):
  """Loaders one after the other, each opened when the one before it is empty; a context manager."""

  def __init__(self, opened: Iterable[Callable[[], Loader]]):
    self._left = iter(opened)
    self._current: Loader | None = None

  def __next__(self) -> Rows:
    """The next step; see `Loader`."""
    while True:
      if self._current is None:
        self._current = next(self._left)()
      rows = next(self._current, None)
      if rows is not None:
        return rows
      self.close()

  def __enter__(self) -> "ChainedLoader":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Closes the loader that is open."""
    if self._current is not None:
      self._current.close()
      self._current = None


@dataclasses.dataclass(frozen=True)
class _RowPlacement:
  """Makes global arrays of the rows this process has read."""

  sharding: NamedSharding
  row_dim: int
  """The dimension, of size `num_rows`, that `sharding` divides."""
  num_rows: int
  columns: np.ndarray = dataclasses.field(init=False)
  """int64[R]: which of the rows belong to this process, ascending."""

  def __post_init__(self):
    shape = (1,) * self.row_dim + (self.num_rows,)
    indices = self._of_rank(len(shape)).addressable_devices_indices_map(shape).values()
    ranges = [range(*index[self.row_dim].indices(self.num_rows)) for index in indices if index]
    object.__setattr__(self, "columns", np.unique(np.concatenate(ranges)))

  def __call__(self, arrays: Arrays) -> Rows:
    """The arrays [..., R, ...] as parts of global ones [..., num_rows, ...]."""
    return Rows(**{name: self._join(array) for name, array in arrays.items()})

  def _join(self, array: np.ndarray) -> jax.Array:
    dim = self.row_dim

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      start, stop, _ = index[dim].indices(self.num_rows)
      first = int(np.searchsorted(self.columns, start))
      return array[(*index[:dim], slice(first, first + stop - start), *index[dim + 1 :])]

    shape = (*array.shape[:dim], self.num_rows, *array.shape[dim + 1 :])
    return jax.make_array_from_callback(shape, self._of_rank(array.ndim), part)

  def _of_rank(self, rank: int) -> NamedSharding:
    """The sharding for arrays with fewer dimensions, such as the sample ids."""
    return NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[:rank]))
