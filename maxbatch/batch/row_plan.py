"""Which sample goes to which microbatch, data-parallel group and host, and which load together.

The step that begins at sample s holds samples s … s+B−1, in this order: with k microbatches of
G·r rows over G data-parallel groups, row m·G·r + g·r + j of the step is row j of group g in
microbatch m. So an array [k, G·r, …] that is sharded along its second dimension has every row on
the device that uses it, and no row moves between devices.

A process loads only the rows of its own groups: the same columns of every microbatch.

Legend of shapes: k microbatches, r rows per group and microbatch.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from maxbatch.batch.plan import BatchPlan, Position
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class RowPlan:
  """The layout of a step's rows in its array [num_microbatches, micro_batch, …]."""

  num_microbatches: int
  micro_batch: int
  num_groups: int = 1

  def __post_init__(self):
    if self.micro_batch % self.num_groups:
      raise ValueError(f"{self.num_groups} groups do not divide {self.micro_batch} rows evenly")

  @property
  def num_rows(self) -> int:
    """Rows of the step: its global batch."""
    return self.num_microbatches * self.micro_batch

  def columns_of_group(self, group: int) -> np.ndarray:
    """Columns int64[r] of every microbatch that belong to data-parallel group `group`."""
    size = self.micro_batch // self.num_groups
    return np.arange(group * size, (group + 1) * size)

  def rows_of_group(self, group: int) -> np.ndarray:
    """Offsets int64[k, r] from the step's first sample of the rows of group `group`."""
    return self.rows_at(self.columns_of_group(group))

  def rows_at(self, columns: np.ndarray) -> np.ndarray:
    """Offsets int64[k, len(columns)] from the step's first sample of the rows in these columns."""
    return np.arange(self.num_microbatches)[:, None] * self.micro_batch + columns[None, :]


@dataclasses.dataclass(frozen=True)
class StepRows:
  """One step: the sample it begins at and its number of microbatches."""

  first_sample: int
  num_microbatches: int


@dataclasses.dataclass(frozen=True)
class Segment:
  """Consecutive dispatches with the same microbatch: the inputs of one compiled program."""

  micro_batch: int
  steps: list[StepRows]


def dispatches(plan: BatchPlan, start: Position, *, streamed: bool) -> list[Segment]:
  """The dispatches from `start` to the end of the run: one per step, or one per microbatch if
  `streamed`."""
  segments: list[Segment] = []
  for phase in plan.starting_at(start).phases:
    per_dispatch = 1 if streamed else phase.num_microbatches
    size = phase.micro_batch * per_dispatch
    samples = range(phase.first.samples, phase.end.samples, size)
    if not segments or segments[-1].micro_batch != phase.micro_batch:
      segments.append(Segment(phase.micro_batch, []))
    segments[-1].steps.extend(StepRows(sample, per_dispatch) for sample in samples)
  return segments


def load_factor(plan: BatchPlan, *, streamed: bool) -> Fraction:
  """Samples loaded at once, as a multiple of the samples of one dispatch."""
  taken = plan.micro_batch_to_train if streamed else plan.global_batch_to_train
  return Fraction(plan.global_batch_to_load, taken)


def steps_in_order(num_rows: int, batch: int) -> list[StepRows]:
  """Steps of one microbatch of `batch` rows each that cover `num_rows` rows."""
  return [StepRows(first, 1) for first in range(0, num_rows, batch)]


class StepTable:
  """The steps of a run as two arrays, so that a million of them are pickled as 16 MB."""

  def __init__(self, steps: Sequence[StepRows], micro_batch: int):
    self.micro_batch = micro_batch
    self.first_samples = np.array([step.first_sample for step in steps], np.int64)
    self.num_microbatches = np.array([step.num_microbatches for step in steps], np.int64)
    ends = self.first_samples + self.num_microbatches * micro_batch
    gaps = np.flatnonzero(ends[:-1] != self.first_samples[1:])
    if gaps.size:
      raise ValueError(f"step {gaps[0]} ends at {ends[gaps[0]]}, where the next does not begin")
    self.end = int(ends[-1]) if len(steps) else 0

  def __len__(self) -> int:
    return len(self.first_samples)

  def plan(self, step: int) -> RowPlan:
    """The layout of step `step` of the table."""
    return RowPlan(int(self.num_microbatches[step]), self.micro_batch)

  def samples(self, step: int, columns: np.ndarray) -> np.ndarray:
    """The samples int64[k·len(columns)], ascending, in these columns of the step's microbatches."""
    return self.first_samples[step] + self.plan(step).rows_at(columns).reshape(-1)

  def samples_between(self, begin: int, end: int, columns: np.ndarray) -> np.ndarray:
    """As `samples`, for all steps, from sample `begin` up to but not including `end`."""
    first = int(np.searchsorted(self.first_samples, begin, side="right")) - 1
    last = int(np.searchsorted(self.first_samples, end, side="left"))
    samples = np.concatenate([self.samples(step, columns) for step in range(first, last)])
    return samples[(samples >= begin) & (samples < end)]

  def load_bounds(self, factor: Fraction) -> np.ndarray:
    """The first sample of each load, then the end of the last: int64[loads + 1].

    A load is `factor` times the batch of the step it begins in; the last one is shortened to the
    end of the run.

    Raises:
      UserError: a load is not a whole number of samples.
    """
    if factor == 1:
      return np.append(self.first_samples, self.end)
    bounds, step = [int(self.first_samples[0])] if len(self) else [0], 0
    while bounds[-1] < self.end:
      while step + 1 < len(self) and self.first_samples[step + 1] <= bounds[-1]:
        step += 1
      bounds.append(min(bounds[-1] + self._load_size(step, factor), self.end))
    return np.array(bounds, np.int64)

  def _load_size(self, step: int, factor: Fraction) -> int:
    batch = self.plan(step).num_rows
    size = factor * batch
    if size.denominator != 1 or size <= 0:
      raise UserError(
        f"expansion_factor_real_data={factor} × global_batch_to_train={batch} is {size} samples, "
        "which must be a whole number, at least 1; for example expansion_factor_real_data="
        f"{Fraction(1, batch)} or 2"
      )
    return int(size)
