"""The schedules by name, each the order in which a stage takes its work.

Every stage does the k-th forward of the order, h ticks after the stage before it, and the k-th
backward, h ticks after the stage behind it; a schedule says which work is the k-th, and when the
backwards begin. gpipe: Huang et al. 2019 (arXiv:1811.06965). 1f1b: Narayanan et al. 2019
(PipeDream-flush) and 2021 (arXiv:2104.04473), here in lockstep: since a tick of one program takes
as long as its slowest stage, a stage does a forward and a backward in one tick, instead of either.
circular: as in praxis and MaxText.
"""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

from maxbatch.config.registry import registered
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.slots import with_slots
from maxbatch.pipeline_parallel.timetable import Backward, Cell, Forward, Timetable, TimetableShape


@dataclasses.dataclass(frozen=True)
class BufferLimits:
  """What a stage may hold at once: inputs waiting for their backward, and gradients."""

  inputs: int
  gradients: int


@dataclasses.dataclass(frozen=True)
class Schedule:
  """What tells one schedule from another.

  Attributes:
    order: the repeat and microbatch of a stage's k-th forward; its k-th backward is that with the
      repeats counted from the last.
    first_backward: the tick in which the last stage begins its backwards.
    limits: what a stage holds at most.
    repeats: whether a microbatch may pass through the stages more than once.
    group: the number that `microbatches` must be a multiple of when there are repeats.
    least: the smallest number of microbatches when there are repeats.
  """

  order: Callable[[int, TimetableShape], tuple[int, int]]
  first_backward: Callable[[TimetableShape], int]
  limits: Callable[[TimetableShape], BufferLimits]
  repeats: bool
  group: Callable[[TimetableShape], int] = lambda shape: 1
  least: Callable[[TimetableShape], int] = lambda shape: 1


def schedule_named(name: str) -> Schedule:
  """The schedule that `pipeline_schedule=name` means.

  Raises:
    UserError: there is none of that name.
  """
  return registered("pipeline_schedule", name, SCHEDULES)


def timetable(name: str, shape: TimetableShape) -> Timetable:
  """The timetable of a schedule, with slots for inputs and gradients.

  Raises:
    UserError: no such schedule, or it cannot have this shape.
  """
  schedule = schedule_named(name)
  _check(name, schedule, shape)
  delay = shape.delay
  first_backward = schedule.first_backward(shape)
  count = first_backward + shape.work + delay
  ticks = [[Cell() for _ in range(shape.stages)] for _ in range(count)]
  last = shape.repeats - 1
  for stage in range(shape.stages):
    late = shape.hop * stage
    for k in range(shape.work):
      repeat, microbatch = schedule.order(k, shape)
      forward, backward = k + late, first_backward + delay - late + k
      ticks[forward][stage] = dataclasses.replace(
        ticks[forward][stage], forward=Forward(repeat, microbatch)
      )
      ticks[backward][stage] = dataclasses.replace(
        ticks[backward][stage], backward=Backward(last - repeat, microbatch)
      )
  return with_slots(Timetable(shape, tuple(map(tuple, ticks))))


def _check(name: str, schedule: Schedule, shape: TimetableShape) -> None:
  """Refuses what the schedule has no order for."""
  v, m = shape.repeats, shape.microbatches
  if v > 1 and not schedule.repeats:
    raise UserError(
      f"pipeline_schedule={name} has no repeats, but num_pipeline_repeats={v}; for example "
      f"pipeline_schedule={_WITH_REPEATS[name]} or num_pipeline_repeats=1"
    )
  least, group = schedule.least(shape), schedule.group(shape)
  if v > 1 and (m < least or m % group):
    near = max(least, -(-m // group) * group)
    rule = f"a multiple of {group}" if group > 1 else f"at least {least}"
    raise UserError(
      f"pipeline_schedule={name} with {shape.stages} stages and num_pipeline_repeats={v} takes "
      f"microbatches in number {rule}, not {m}; for example num_pipeline_microbatches={near}"
    )


def _by_repeat(k: int, shape: TimetableShape) -> tuple[int, int]:
  """Breadth first: all microbatches through one repeat, then all through the next."""
  return divmod(k, shape.microbatches)


def _by_group(k: int, shape: TimetableShape) -> tuple[int, int]:
  """Depth first: h·p microbatches through all repeats, then the next h·p."""
  if shape.repeats == 1:
    return 0, k
  size = shape.hop * shape.stages
  group, rest = divmod(k, size * shape.repeats)
  repeat, number = divmod(rest, size)
  return repeat, group * size + number


def _after_all_forwards(shape: TimetableShape) -> int:
  return shape.work + shape.delay


def _at_once(shape: TimetableShape) -> int:
  """The tick of the last stage's first forward of the last repeat."""
  p, v, h = shape.stages, shape.repeats, shape.hop
  return (v - 1) * h * p + shape.delay


def _everything(shape: TimetableShape) -> BufferLimits:
  return BufferLimits(shape.work, shape.microbatches)


def _in_flight(shape: TimetableShape) -> BufferLimits:
  """From a stage's first forward to its first backward, whatever the microbatches."""
  return BufferLimits(min(shape.work, _at_once(shape) + shape.delay + 1), 1)


def _ring(shape: TimetableShape) -> int:
  """Ticks of a round through the stages and back to the first."""
  p, h = shape.stages, shape.hop
  return h * p


SCHEDULES = MappingProxyType(
  {
    "gpipe": Schedule(_by_repeat, _after_all_forwards, _everything, repeats=False),
    "circular": Schedule(_by_repeat, _after_all_forwards, _everything, repeats=True, least=_ring),
    "1f1b": Schedule(_by_group, _at_once, _in_flight, repeats=False),
    "interleaved_1f1b": Schedule(_by_group, _at_once, _in_flight, repeats=True, group=_ring),
  }
)
_WITH_REPEATS = {"gpipe": "circular", "1f1b": "interleaved_1f1b"}
