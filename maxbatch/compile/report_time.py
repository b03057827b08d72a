"""Seconds of a step, measured or estimated, and which of them are no work of a pipeline's layers."""

import dataclasses
from collections.abc import Sequence

from maxbatch.compile.measured_time import Timing
from maxbatch.compile.pipeline_ticks import beside_layers, in_filling
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.costs import OperationCost
from maxbatch.estimate.step_time import StepEstimate, seconds_of
from maxbatch.pipeline_parallel.sizes import Pipeline


@dataclasses.dataclass(frozen=True)
class StepTime:
  """Seconds of a step of n microbatches: rest + n × seconds_per_microbatch."""

  seconds_per_microbatch: float
  rest: float
  how: str
  """estimate or measured."""
  spread: float | None = None
  """Of a measurement, as a share."""
  other_per_microbatch: float = 0.0
  """Of `seconds_per_microbatch`, in a pipeline: what is no forward or backward of layers, as far as known."""
  other_rest: float = 0.0
  """Of `rest`, the same."""

  def of(self, num_microbatches: int) -> float:
    """A step of so many microbatches."""
    return self.rest + num_microbatches * self.seconds_per_microbatch

  def other_of(self, num_microbatches: int) -> float:
    """Its part that is no forward or backward of a pipeline's layers."""
    return self.other_rest + num_microbatches * self.other_per_microbatch


def measured_time(timing: Timing, *, streamed: bool) -> StepTime:
  """The time that a clock has shown."""
  # A streamed microbatch is a dispatch of its own, with ticks to fill and empty in each.
  other = timing.seconds_rest if streamed else timing.seconds_without_ticks or 0.0
  return StepTime(
    timing.seconds_per_microbatch, timing.seconds_rest, "measured", timing.spread, other_rest=other
  )


def estimated_time(
  work: StepEstimate,
  once: Sequence[OperationCost],
  pipeline: Pipeline | None,
  chip: Chip,
  per_slice: int | None,
  *,
  streamed: bool,
) -> StepTime:
  """The time that a chip's figures give.

  Args:
    work: of a microbatch and the rest, as `in_microbatches` counts.
    once: the program's operations, one tick of a pipeline's loop.
    pipeline: the run's.
    chip: one device.
    per_slice: devices of a slice, where there are several.
    streamed: whether every microbatch is a dispatch of its own.
  """
  fills = seconds_of(in_filling(pipeline, once), chip, per_slice)
  beside = seconds_of(beside_layers(pipeline, once), chip, per_slice)
  outside = seconds_of([one for one in once if not one.in_microbatch_loop], chip, per_slice)
  in_each, in_rest = (1, 0) if streamed else (0, 1)
  return StepTime(
    seconds_per_microbatch=work.microbatch_seconds + in_each * fills,
    rest=work.rest_seconds + in_rest * fills,
    how="estimate",
    other_per_microbatch=beside + in_each * outside,
    other_rest=in_rest * outside,
  )
