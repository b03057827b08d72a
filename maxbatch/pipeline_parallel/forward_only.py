"""The forward-only timetable of an evaluation: every forward of every microbatch, no backwards.

Forwards run depth first: h·p microbatches go through all repeats, then the next h·p. A stage then
uses each input in the tick in which it arrives, so one slot is enough. If the number of
microbatches is not a multiple of h·p, the stages are idle where the last group lacks microbatches.
"""

from maxbatch.pipeline_parallel.schedule import BufferLimits, schedule_named
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable import Cell, Forward, Timetable, TimetableShape
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays, timetable_arrays

_DEPTH_FIRST = schedule_named("interleaved_1f1b")


def forward_only_arrays(pipeline: Pipeline, microbatches: int) -> TimetableArrays:
  """The forward-only timetable as arrays for the compiled program.

  Args:
    pipeline: the pipeline of the run.
    microbatches: their number, at least 1.
  """
  shape = TimetableShape(pipeline.stages, microbatches, pipeline.repeats, pipeline.forwarding_delay)
  table = forward_only_timetable(shape)
  return timetable_arrays(table, BufferLimits(1, 1), len(table.ticks))


def forward_only_timetable(shape: TimetableShape) -> Timetable:
  """All forwards. Every input is in slot 0 of its stage, since it is used when it arrives."""
  order = [_DEPTH_FIRST.order(k, shape) for k in range(_forwards_of_whole_groups(shape))]
  passes = {k: entry for k, entry in enumerate(order) if entry[1] < shape.microbatches}
  count = max(passes) + shape.warmup_ticks + 1
  ticks = [[Cell() for _ in range(shape.stages)] for _ in range(count)]
  for k, (repeat, microbatch) in passes.items():
    for stage in range(shape.stages):
      ticks[k + shape.forwarding_delay * stage][stage] = Cell(Forward(repeat, microbatch, slot=0))
  return Timetable(shape, tuple(map(tuple, ticks)))


def _forwards_of_whole_groups(shape: TimetableShape) -> int:
  """Forwards of one stage if the last group of microbatches were full."""
  if shape.repeats == 1:
    return shape.forwards_per_stage
  group = _DEPTH_FIRST.microbatch_multiple(shape)
  return -(-shape.microbatches // group) * group * shape.repeats
