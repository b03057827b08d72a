"""What a timetable costs in lockstep: how long each tick is, and how much of it is idle.

A tick takes a forward's time if any stage has a forward in it, and a backward's if any has one. The
stages without one wait: their program computes along on data that nothing uses.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.pipeline_parallel.timetable import Timetable, TimetableShape


@dataclasses.dataclass(frozen=True)
class PassCosts:
  """Time of one forward and one backward of one stage in one repeat, in any unit.

  A backward multiplies twice where a forward multiplies once. The schedules' bubble does not depend
  on it.
  """

  forward: int = 1
  backward: int = 2


TWICE = PassCosts()


@dataclasses.dataclass(frozen=True)
class Span:
  """When a tick's forward slot and backward slot begin, and when the tick ends."""

  forward: int
  backward: int
  end: int


def spans(table: Timetable, costs: PassCosts = TWICE) -> list[Span]:
  """The ticks on a clock that begins at 0."""
  found, now = [], 0
  for row in table.ticks:
    backward = now + (costs.forward if any(cell.forward for cell in row) else 0)
    end = backward + (costs.backward if any(cell.backward for cell in row) else 0)
    found.append(Span(now, backward, end))
    now = end
  return found


def bubble(table: Timetable, costs: PassCosts = TWICE) -> Fraction:
  """The idle share of all stages' time, counted cell by cell."""
  clock = spans(table, costs)
  total = (clock[-1].end if clock else 0) * table.shape.stages
  used = sum(
    bool(cell.forward) * costs.forward + bool(cell.backward) * costs.backward
    for row in table.ticks
    for cell in row
  )
  return Fraction(total - used, total) if total else Fraction(0)


def predicted_bubble(shape: TimetableShape) -> Fraction:
  """h(p−1) / (v·m + h(p−1)), which is (p−1) / (v·m + p−1) without delayed forwarding.

  It holds for the four schedules in lockstep with v·m ≥ h (the tests count it), not for any
  timetable.
  """
  return Fraction(shape.delay, shape.work + shape.delay)


def imbalance(loads: Sequence[int | Fraction]) -> Fraction:
  """How much more the busiest stage computes than the mean: 0 when all compute the same."""
  return max(loads) * Fraction(len(loads)) / sum(loads) - 1


def percent(share: Fraction) -> str:
  """8.6%."""
  return f"{float(share):.1%}"
