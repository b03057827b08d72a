"""The cost of a timetable in lockstep: how long each tick takes, and the bubble.

A tick takes the time of a forward if any stage has a forward in it, plus that of a backward if any
stage has a backward. The other stages are idle: their program computes on data that nothing uses.
The program skips what no stage needs in a tick: so there are fewer losses than forwards when there are
repeats, and ticks with only a forward or only a backward during warm-up and cool-down.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from maxbatch.pipeline_parallel.schedule import schedule_named
from maxbatch.pipeline_parallel.timetable import Timetable, TimetableShape

EVERY_TICK = ""
"""What runs in every tick, in no operation's scope: the exchange and the buffers."""
OPERATIONS = ("forward", "embedding", "loss", "backward", "embedding_backward")
ONCE_PER_MICROBATCH = ("embedding", "loss", "embedding_backward")
"""Operations that run once per microbatch, however long the warm-up is."""
_SCOPE = "tick_"


@dataclasses.dataclass(frozen=True)
class PassCosts:
  """Time of one forward and one backward of one model chunk, in any unit.

  A backward has two matrix products for each one of the forward. The bubble of the schedules does
  not depend on this ratio.
  """

  forward: int = 1
  backward: int = 2


BACKWARD_TWICE_FORWARD = PassCosts()


@dataclasses.dataclass(frozen=True)
class TickTimes:
  """When the forward and the backward of a tick begin, and when the tick ends."""

  forward_start: int
  backward_start: int
  end: int


def tick_times(table: Timetable, costs: PassCosts = BACKWARD_TWICE_FORWARD) -> list[TickTimes]:
  """Returns the times of all ticks, the first of which begins at 0."""
  times, now = [], 0
  for row in table.ticks:
    backward = now + (costs.forward if any(cell.forward for cell in row) else 0)
    end = backward + (costs.backward if any(cell.backward for cell in row) else 0)
    times.append(TickTimes(now, backward, end))
    now = end
  return times


def bubble(table: Timetable, costs: PassCosts = BACKWARD_TWICE_FORWARD) -> Fraction:
  """Returns the idle share of the time of all stages, counted cell by cell."""
  times = tick_times(table, costs)
  total = (times[-1].end if times else 0) * table.shape.stages
  busy = sum(
    bool(cell.forward) * costs.forward + bool(cell.backward) * costs.backward
    for row in table.ticks
    for cell in row
  )
  return Fraction(total - busy, total) if total else Fraction(0)


def predicted_bubble(shape: TimetableShape) -> Fraction:
  """Returns the bubble by formula: h(p−1) / (v·m + h(p−1)).

  Without delayed forwarding (h = 1) and repeats (v = 1) this is (p−1) / (m + p−1) of GPipe (Huang et
  al. 2019); dividing the bubble by v is from Narayanan et al. 2021. It holds for the four schedules
  in lockstep with v·m ≥ h, not for any timetable; the tests compare it with `bubble`.
  """
  return Fraction(shape.warmup_ticks, shape.forwards_per_stage + shape.warmup_ticks)


def imbalance(loads: Sequence[int | Fraction]) -> Fraction:
  """Returns by how much the busiest stage exceeds the mean: 0 when all stages compute the same."""
  return max(loads) * Fraction(len(loads)) / sum(loads) - 1


def percent(share: Fraction) -> str:
  """Returns a share as text: 3/35 is 8.6%."""
  return f"{float(share):.1%}"


def scope_name(operation: str) -> str:
  """Returns the jax.named_scope of an operation, by which reports find it in the program."""
  return _SCOPE + operation


def operation_in_path(path: str) -> str:
  """Returns the innermost operation in a path of scope names; EVERY_TICK if there is none."""
  names = [word for word in re.findall(rf"\b{_SCOPE}(\w+)", path) if word in OPERATIONS]
  return names[-1] if names else EVERY_TICK


def ticks_by_operation(schedule: str, shape: TimetableShape) -> Mapping[str, int]:
  """Returns, for each operation, the ticks in which any stage has it; all ticks under EVERY_TICK.

  Every stage runs its v·m forwards in consecutive ticks, h ticks after the previous stage. So
  v·m + h(p−1) ticks have a forward (if v·m ≥ h), and as many a backward.
  """
  busy = shape.forwards_per_stage + shape.warmup_ticks
  ticks = {EVERY_TICK: schedule_named(schedule).first_backward(shape) + busy}
  return ticks | {
    work: shape.microbatches if work in ONCE_PER_MICROBATCH else busy for work in OPERATIONS
  }
