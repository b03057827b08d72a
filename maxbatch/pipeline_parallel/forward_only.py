"""The timetable of an evaluation: every forward of every microbatch, and nothing to go back for.

Depth first, h·p microbatches through all repeats, then the next: what a stage hands on is used in
the tick in which it arrives, so that nothing ever waits. Where the microbatches are no multiple of
h·p, the stages idle in place of those that are missing from the last group.
"""

from maxbatch.pipeline_parallel.schedule import BufferLimits, schedule_named
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable import Cell, Forward, Timetable, TimetableShape
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays, timetable_arrays

_DEPTH_FIRST = schedule_named("interleaved_1f1b")


def forward_ticks(pipeline: Pipeline, microbatches: int) -> TimetableArrays:
  """The timetable of so many microbatches, at least 1, as a program reads it."""
  shape = TimetableShape(pipeline.stages, microbatches, pipeline.repeats, pipeline.hop)
  table = forward_timetable(shape)
  return timetable_arrays(table, BufferLimits(1, 1), len(table.ticks))


def forward_timetable(shape: TimetableShape) -> Timetable:
  """All forwards, each input in slot 0 of its stage, from which it is taken at once."""
  order = [_DEPTH_FIRST.order(k, shape) for k in range(_in_whole_groups(shape))]
  known = {k: work for k, work in enumerate(order) if work[1] < shape.microbatches}
  count = max(known) + shape.delay + 1
  ticks = [[Cell() for _ in range(shape.stages)] for _ in range(count)]
  for k, (repeat, microbatch) in known.items():
    for stage in range(shape.stages):
      ticks[k + shape.hop * stage][stage] = Cell(Forward(repeat, microbatch, slot=0))
  return Timetable(shape, tuple(map(tuple, ticks)))


def _in_whole_groups(shape: TimetableShape) -> int:
  """Forwards of one stage, those of missing microbatches too."""
  if shape.repeats == 1:
    return shape.work
  group = _DEPTH_FIRST.group(shape)
  return -(-shape.microbatches // group) * group * shape.repeats
