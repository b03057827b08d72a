"""Where in the run which batch is in force: phases of equal steps, from a position to the budget.

A phase begins at the first step that starts at or after its point of the schedule. Points are
absolute, so what one phase takes too much the next one lacks, and nothing is forgotten. Within a
phase everything is closed form: no loop runs over steps.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from maxbatch.batch.solve import text
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class Position:
  """A place in the run: updates made and samples consumed."""

  step: int
  samples: int


@dataclasses.dataclass(frozen=True)
class SchedulePoint:
  """From `at` on, a step takes `batch` samples in `trips` passes of `micro_batch`."""

  at: Fraction
  batch: int
  micro_batch: int

  @property
  def num_microbatches(self) -> int:
    """Passes per step."""
    return self.batch // self.micro_batch


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
  """The points of a schedule, the first at 0; `at` counts steps or samples."""

  unit: Literal["steps", "samples"]
  points: tuple[SchedulePoint, ...]


@dataclasses.dataclass(frozen=True)
class Budget:
  """When the run ends: after `amount` steps, or after `amount` samples given as `key`."""

  key: Literal["steps", "total_samples", "total_tokens"]
  amount: Fraction
  scale: int = 1
  """Tokens per sample where the key counts tokens."""


@dataclasses.dataclass(frozen=True)
class Phase:
  """`num_steps` equal steps; `number` counts the points of the schedule from 1."""

  number: int
  first: Position
  num_steps: int
  batch: int
  micro_batch: int
  is_cut: bool = False
  """Whether this is the last step, cut to what the budget leaves."""

  @property
  def num_microbatches(self) -> int:
    """Passes per step."""
    return self.batch // self.micro_batch

  @property
  def end(self) -> Position:
    """The position after its last step."""
    return self.after(self.num_steps)

  def after(self, steps: int) -> Position:
    """The position `steps` steps after its first one begins."""
    return Position(self.first.step + steps, self.first.samples + steps * self.batch)


def phases_of(schedule: BatchSchedule, budget: Budget, start: Position) -> tuple[Phase, ...]:
  """The phases with at least one step between `start` and the end of the budget, in order.

  A run at or past its end gets one phase without steps.

  Raises:
    UserError: the budget ends inside a microbatch.
  """
  phases: list[Phase] = []
  position = start
  for number, point in enumerate(schedule.points, 1):
    until = schedule.points[number].at if number < len(schedule.points) else None
    steps = _steps_until(until, point, schedule.unit, position)
    affordable, rest = _affordable(budget, point, position)
    if steps == 0:
      continue
    ending = steps is None or steps > affordable
    phase = Phase(
      number, position, affordable if steps is None else min(steps, affordable), point.batch,
      point.micro_batch,
    )  # fmt: skip
    phases.append(phase)
    position = phase.end
    if ending:
      phases += _cut_step(budget, phase, rest)
      break
  reached = [phase for phase in phases if phase.num_steps]
  return tuple(reached or phases[:1])


def _steps_until(
  until: Fraction | None,
  point: SchedulePoint,
  unit: Literal["steps", "samples"],
  position: Position,
) -> int | None:
  """Steps from `position` to the first that starts at or after `until`; None: without end."""
  if until is None:
    return None
  left = until - (position.step if unit == "steps" else position.samples)
  return max(0, math.ceil(left / (1 if unit == "steps" else point.batch)))


def _affordable(budget: Budget, point: SchedulePoint, position: Position) -> tuple[int, Fraction]:
  """Whole steps that the budget still pays, and the samples it leaves after them."""
  if budget.key == "steps":
    return max(0, int(budget.amount) - position.step), Fraction(0)
  left = max(Fraction(0), budget.amount - position.samples)
  steps = left // point.batch
  return steps, left - steps * point.batch


def _cut_step(budget: Budget, phase: Phase, rest: Fraction) -> list[Phase]:
  """The last step, cut to the samples that a budget in samples or tokens leaves.

  Cutting neither loses samples nor adds any, and a ramp, whose steps no round total fits, leaves
  the budget where it was. Only whole microbatches are cut to: they need no other compilation.
  """
  if rest == 0:
    return []
  if rest % phase.micro_batch:
    raise UserError(_no_whole_microbatch(budget, phase, rest))
  return [
    Phase(phase.number, phase.end, 1, int(rest), phase.micro_batch, is_cut=True)
  ]  # fmt: skip


def _no_whole_microbatch(budget: Budget, phase: Phase, rest: Fraction) -> str:
  unit, scale = budget.key.removeprefix("total_"), budget.scale
  begun = phase.end.samples + rest // phase.micro_batch * phase.micro_batch
  nearest = [total * scale for total in (begun, begun + phase.micro_batch) if total > 0]
  before = f"{phase.first.samples * scale} {unit}, then " if phase.first.samples else ""
  return (
    f"{budget.key}={text(budget.amount * scale)} is {before}{phase.num_steps} steps of "
    f"{phase.batch * scale} {unit} and {text(rest * scale)} {unit} more, and a run ends with a "
    f"whole microbatch ({phase.micro_batch * scale} {unit}); "
    f"nearest: {' or '.join(f'{budget.key}={total}' for total in nearest)}"
  )


def phase_at_sample(phases: Sequence[Phase], samples: int) -> Phase:
  """The phase whose steps hold sample `samples`; beyond both ends, the nearest one."""
  after = bisect.bisect_right(phases, samples, key=lambda phase: phase.first.samples)
  return phases[max(0, after - 1)]


def phase_at_step(phases: Sequence[Phase], step: int) -> Phase:
  """The phase of step `step` (0-based); beyond both ends, the nearest one."""
  after = bisect.bisect_right(phases, step, key=lambda phase: phase.first.step)
  return phases[max(0, after - 1)]
