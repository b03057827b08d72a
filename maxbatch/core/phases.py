"""The phases of a run: stretches of equal steps, from a position to the end of the budget.

A phase begins at the first step that starts at or after its point of the schedule. Points are
absolute, so a step that reaches beyond one shortens the next phase, and rounding never accumulates.
Within a phase everything is closed form: nothing loops over steps.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from maxbatch.core.keys import text
from maxbatch.core.solve import divisors, nearest_divisors
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class Position:
  """Progress of a run: optimizer steps done and samples consumed."""

  step: int
  samples: int


@dataclasses.dataclass(frozen=True)
class SchedulePoint:
  """From `at` on, a step takes `batch` samples, in microbatches of `micro_batch`."""

  at: Fraction
  batch: int
  micro_batch: int

  @property
  def num_microbatches(self) -> int:
    """Microbatches per step: gradient_accumulation_steps in this phase."""
    return math.ceil(Fraction(self.batch, self.micro_batch))


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
  """The points of a schedule, ascending, the first at 0; `at` counts steps or samples."""

  unit: Literal["steps", "samples"]
  points: tuple[SchedulePoint, ...]
  may_pad: bool = False
  """Whether rows without weight may fill the last microbatch of a step up."""


ENDLESS_STEPS = 2**53
"""The budget of a plan without an end."""


@dataclasses.dataclass(frozen=True)
class Budget:
  """When the run ends: after `amount` steps, or `amount` samples for the other keys."""

  key: Literal["steps", "total_samples", "total_tokens"]
  amount: Fraction
  scale: int = 1
  """Tokens per sample for total_tokens; the key's value is amount × scale."""

  @property
  def is_endless(self) -> bool:
    """Whether the run goes on for as long as somebody takes its steps."""
    return self.key == "steps" and self.amount == ENDLESS_STEPS


@dataclasses.dataclass(frozen=True)
class Phase:
  """`num_steps` steps of equal batch; `number` counts the points of the schedule from 1."""

  number: int
  first: Position
  num_steps: int
  batch: int
  micro_batch: int
  is_cut: bool = False
  """Whether this is a partial last step: the rest of a budget in samples or tokens."""

  @property
  def num_microbatches(self) -> int:
    """Microbatches per step: gradient_accumulation_steps in this phase."""
    return math.ceil(Fraction(self.batch, self.micro_batch))

  @property
  def end(self) -> Position:
    """The position after the phase's last step."""
    return self.after(self.num_steps)

  def after(self, steps: int) -> Position:
    """Returns the position after `steps` steps of the phase."""
    return Position(self.first.step + steps, self.first.samples + steps * self.batch)


def phases_of(schedule: BatchSchedule, budget: Budget, start: Position) -> tuple[Phase, ...]:
  """Returns the phases with at least one step between `start` and the end of the budget, in order.

  A run at or past its end gets one phase without steps.

  Raises:
    UserError: the budget ends inside a microbatch.
  """
  phases: list[Phase] = []
  position = start
  for number, point in enumerate(schedule.points, 1):
    until = schedule.points[number].at if number < len(schedule.points) else None
    steps = _steps_until(until, point, schedule.unit, position)
    affordable, rest = _steps_within_budget(budget, point, position)
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
      phases += _partial_step(budget, phase, rest, may_pad=schedule.may_pad)
      break
  reached = [phase for phase in phases if phase.num_steps]
  return tuple(reached or phases[:1])


def _steps_until(
  until: Fraction | None,
  point: SchedulePoint,
  unit: Literal["steps", "samples"],
  position: Position,
) -> int | None:
  """Returns the steps before the first that begins at or after `until`; None if there is no end."""
  if until is None:
    return None
  left = until - (position.step if unit == "steps" else position.samples)
  return max(0, math.ceil(left / (1 if unit == "steps" else point.batch)))


def _steps_within_budget(
  budget: Budget, point: SchedulePoint, position: Position
) -> tuple[int, Fraction]:
  """Returns the whole steps left in the budget, and the samples left after them."""
  if budget.key == "steps":
    return max(0, int(budget.amount) - position.step), Fraction(0)
  left = max(Fraction(0), budget.amount - position.samples)
  steps = left // point.batch
  return steps, left - steps * point.batch


def _partial_step(budget: Budget, phase: Phase, rest: Fraction, *, may_pad: bool) -> list[Phase]:
  """Returns the partial last step, of the samples left in a budget of samples or tokens, if any.

  So the run consumes exactly its budget, also with a ramp-up, whose steps rarely add up to a round
  number. The step must be whole microbatches, which need no other compilation, or may be padded to them.
  """
  if rest == 0:
    return []
  if rest % (1 if may_pad else phase.micro_batch):
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
    f"{phase.batch * scale} {unit} and a rest of {text(rest * scale)} {unit}, which must be a "
    f"multiple of the microbatch ({phase.micro_batch * scale} {unit}); "
    f"nearest: {' or '.join(f'{budget.key}={total}' for total in nearest)}"
  )


def phase_at_sample(phases: Sequence[Phase], samples: int) -> Phase:
  """Returns the phase that consumes sample `samples` (0-based); outside the run, the nearest one."""
  after = bisect.bisect_right(phases, samples, key=lambda phase: phase.first.samples)
  return phases[max(0, after - 1)]


def phase_at_step(phases: Sequence[Phase], step: int) -> Phase:
  """Returns the phase of step `step` (0-based); outside the run, the nearest one."""
  after = bisect.bisect_right(phases, step, key=lambda phase: phase.first.step)
  return phases[max(0, after - 1)]


_MOST_INCREMENTS = 10_000
"""Most increments of a ramp-up; each is a phase, planned and checked before the run."""


def check_increments(
  keys: tuple[str, str], sizes: tuple[Fraction, Fraction, Fraction], unit: Fraction, target_key: str
) -> None:
  """Checks that start and target are whole increments apart, and all of them multiples of `unit`.

  Args:
    keys: of the start and of the increment.
    sizes: start, increment and target.
    unit: one sample for each data-parallel group, in the unit of the sizes; 1 where batches are padded.
    target_key: the key of the target.

  Raises:
    UserError: they are not, or too many increments apart; the message has the nearest that are.
  """
  start, increment, target = sizes
  if start % unit or not unit <= start < target:
    offers = _working_starts(start, increment, target, unit)
    assigned = " or ".join(
      f"{keys[0]}={text(start)}" + ("" if step == increment else f" {keys[1]}={text(step)}")
      for start, step in offers
    )
    rule = f"multiple of {text(unit)} (one sample for each data-parallel group)"
    raise UserError(
      f"{keys[0]}={text(start)} must be a positive {'whole number' if unit == 1 else rule} below "
      f"{target_key}={text(target)}; "
      + (f"nearest: {assigned}" if offers else f"there is none; raise {target_key}")
    )
  rise = target - start
  if increment <= 0 or rise % increment or increment % unit:
    offers = " or ".join(
      f"{keys[1]}={text(divisor * unit)}"
      for divisor in nearest_divisors(int(rise / unit), increment / unit)
      if rise / unit / divisor <= _MOST_INCREMENTS
    )
    raise UserError(
      f"{keys[1]}={text(increment)} must lead from {keys[0]}={text(start)} to "
      f"{target_key}={text(target)} in whole increments, each a multiple of {text(unit)}; "
      f"nearest: {offers or f'{keys[1]}={text(rise)}'}"
    )
  if rise / increment > _MOST_INCREMENTS:
    fewer = next(n for n in divisors(int(rise / unit)) if rise / unit / n <= _MOST_INCREMENTS)
    raise UserError(
      f"{keys[1]}={text(increment)} leads from {keys[0]}={text(start)} to "
      f"{target_key}={text(target)} in {text(rise / increment)} increments, but a ramp has "
      f"at most {_MOST_INCREMENTS}; nearest: {keys[1]}={text(fewer * unit)}"
    )


def _working_starts(
  start: Fraction, increment: Fraction, target: Fraction, unit: Fraction
) -> list[tuple[Fraction, Fraction]]:
  """Returns the starts on both sides of `start` from which whole increments lead to the target.

  Each comes with its increment: the given one, or another where that leads there from no start.
  """
  if target <= unit:
    return []
  if increment <= 0 or increment % unit or target - increment < unit:
    return [(unit, target - unit)]
  most = (target - unit) // increment
  exact = (target - start) / increment
  counts = {max(1, min(most, count)) for count in (math.floor(exact), math.ceil(exact))}
  fitting = [count for count in counts if count <= _MOST_INCREMENTS]
  starts = sorted(target - count * increment for count in fitting)
  return [(size, increment) for size in starts] or [(unit, target - unit)]
