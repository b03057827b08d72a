"""Which sample goes to which microbatch, data-parallel group and host, and which load together.

The step that begins at sample s holds samples s … s+B−1, in this order: with k microbatches of
G·r rows over G data-parallel groups, row m·G·r + g·r + j of the step is row j of group g in
microbatch m. So an array [k, G·r, …] that is sharded along its second dimension has every row on
the device that uses it, and no row moves between devices.

A process loads only the rows of its own groups: the same columns of every microbatch. Where a batch does
not fill its last microbatch (pad_batch), the rows from B on are padding, of sample −1 and without weight.

Legend of shapes: k microbatches, r rows per group and microbatch.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import overload

import numpy as np

from maxbatch.batch.host_loads import load_ranges
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan, Position

# Sample ids are int32; they begin again at 0 after 2**31 samples.
_ID_MASK = 2**31 - 1


def ids_of(samples: np.ndarray) -> np.ndarray:
  """Returns the ids int32 of samples int64."""
  return (samples & _ID_MASK).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class RowPlan:
  """The layout of a step's rows in its array [num_microbatches, micro_batch, …]."""

  num_microbatches: int
  micro_batch: int
  num_samples: int
  """Rows that hold a sample, the first ones: the step's global batch."""

  def rows_at(self, columns: np.ndarray) -> np.ndarray:
    """Returns the offsets int64[k, len(columns)] from the step's first sample of the rows in these
    columns; those from `num_samples` on are padding."""
    return np.arange(self.num_microbatches)[:, None] * self.micro_batch + columns[None, :]


def columns_of_blocks(blocks: Sequence[int], size: int) -> np.ndarray:
  """Returns the columns int64[R] of these blocks of `size` columns, in the order of the blocks."""
  return (np.array(blocks, np.int64)[:, None] * size + np.arange(size)[None]).reshape(-1)


def row_of_step(dispatch: int, place: int, micro_batch: int) -> tuple[int, int]:
  """Returns the row of a step, and its column, at `place` of the rows of one of its dispatches."""
  return dispatch * micro_batch + place, place % micro_batch


@dataclasses.dataclass(frozen=True)
class StepRows:
  """One step: the sample it begins at and its number of microbatches, which its samples fill."""

  first_sample: int
  num_microbatches: int


class JoinedRanges(Sequence[int]):
  """Ranges one after the other, as one sequence; takes no memory per number."""

  def __init__(self, ranges: Iterable[range]):
    self.ranges = [one for one in ranges if one]
    self._ends = list(itertools.accumulate(map(len, self.ranges)))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  @overload
  def __getitem__(self, index: int) -> int: ...
  @overload
  def __getitem__(self, index: slice) -> Sequence[int]: ...
  def __getitem__(self, index: int | slice) -> int | Sequence[int]:
    if isinstance(index, slice):
      return [self[each] for each in range(len(self))[index]]
    number = self.number_of(index)
    return self.ranges[number][range(len(self))[index] - self._ends[number]]

  def number_of(self, index: int) -> int:
    """Returns which of the ranges holds the number at `index`.

    Raises:
      IndexError: there is no such number.
    """
    return bisect.bisect_right(self._ends, range(len(self))[index])


class Steps(Sequence[StepRows]):
  """Steps in runs of equal ones: a run of a hundred million steps is one range."""

  def __init__(self, runs: Iterable[tuple[range, int]]):
    """Takes the first samples of runs of steps, and the number of microbatches of each step."""
    self.runs = [(firsts, num_microbatches) for firsts, num_microbatches in runs if firsts]
    self._first_samples = JoinedRanges(firsts for firsts, _ in self.runs)

  def __len__(self) -> int:
    return len(self._first_samples)

  @overload
  def __getitem__(self, index: int) -> StepRows: ...
  @overload
  def __getitem__(self, index: slice) -> Sequence[StepRows]: ...
  def __getitem__(self, index: int | slice) -> StepRows | Sequence[StepRows]:
    if isinstance(index, slice):
      return [self[each] for each in range(len(self))[index]]
    _, num_microbatches = self.runs[self._first_samples.number_of(index)]
    return StepRows(self._first_samples[index], num_microbatches)


@dataclasses.dataclass(frozen=True)
class Segment:
  """Consecutive dispatches with the same microbatch: the inputs of one compiled program."""

  micro_batch: int
  steps: Sequence[StepRows]


def dispatches(plan: BatchPlan, start: Position, *, streamed: bool) -> list[Segment]:
  """Returns the dispatches from `start` on: one per step, or one per microbatch if `streamed`."""
  phases = itertools.groupby(plan.starting_at(start).phases, lambda phase: phase.micro_batch)
  return [
    Segment(micro_batch, Steps(_dispatched(phase, streamed=streamed) for phase in group))
    for micro_batch, group in phases
  ]


def _dispatched(phase: Phase, *, streamed: bool) -> tuple[range, int]:
  """Returns the first samples of a phase's dispatches, and the microbatches of each."""
  per_dispatch, size = (1, phase.micro_batch) if streamed else (phase.num_microbatches, phase.batch)
  return range(phase.first.samples, phase.end.samples, size), per_dispatch


def steps_in_order(num_rows: int, batch: int) -> list[StepRows]:
  """Returns steps of one microbatch of `batch` rows each that cover `num_rows` rows."""
  return [StepRows(first, 1) for first in range(0, num_rows, batch)]


class StepTable:
  """The steps of a run, with what is read for each; small however many there are."""

  def __init__(self, steps: Sequence[StepRows], micro_batch: int):
    self.micro_batch = micro_batch
    self._runs = (
      steps.runs
      if isinstance(steps, Steps)
      else [
        (range(first, first + k * micro_batch, k * micro_batch), k)
        for first, k in ((step.first_sample, step.num_microbatches) for step in steps)
      ]
    )
    self.first_samples = JoinedRanges(firsts for firsts, _ in self._runs)
    self.end = 0
    for number, (firsts, _) in enumerate(self._runs):
      if number and firsts[0] != self.end:
        last = self.first_samples.index(firsts[0]) - 1
        raise ValueError(f"step {last} ends at {self.end}, where the next does not begin")
      self.end = firsts[-1] + firsts.step

  def __len__(self) -> int:
    return len(self.first_samples)

  def plan(self, step: int) -> RowPlan:
    """Returns the layout of step `step` of the table."""
    firsts, num_microbatches = self._runs[self.first_samples.number_of(step)]
    return RowPlan(num_microbatches, self.micro_batch, firsts.step)

  def samples(self, step: int, columns: np.ndarray) -> np.ndarray:
    """Returns the samples int64[S], ascending, in these columns of the step: k·len(columns) without padding."""
    plan = self.plan(step)
    rows = plan.rows_at(columns).reshape(-1)
    return self.first_samples[step] + rows[rows < plan.num_samples]

  def sample_ids(self, step: int, capacity: int) -> np.ndarray:
    """Returns the ids int32[capacity, micro_batch] of the step's samples; −1 beyond them."""
    plan, first = self.plan(step), self.first_samples[step]
    ids = np.full((capacity, self.micro_batch), -1, np.int32)
    ids.reshape(-1)[: plan.num_samples] = ids_of(np.arange(first, first + plan.num_samples))
    return ids

  def samples_between(self, begin: int, end: int, columns: np.ndarray) -> np.ndarray:
    """Returns, as `samples` does, those of all steps in [`begin`, `end`)."""
    first = bisect.bisect_right(self.first_samples, begin) - 1
    last = bisect.bisect_left(self.first_samples, end)
    samples = np.concatenate([self.samples(step, columns) for step in range(first, last)])
    return samples[(samples >= begin) & (samples < end)]

  def load_bounds(self, factor: Fraction) -> JoinedRanges:
    """Returns the first sample of each load, then the end of the last: loads + 1 numbers.

    A load is `factor` times the batch of the step it begins in; the last one ends with the run.

    Raises:
      UserError: a load is not a whole number of samples.
    """
    runs = ((firsts[0], firsts[-1] + firsts.step, firsts.step) for firsts, _ in self._runs)
    return JoinedRanges([*load_ranges(runs, factor), range(self.end, self.end + 1)])
