"""The increments of a ramp-up: from its first batch to the run's, in whole steps of one size."""

import math
from fractions import Fraction

from maxbatch.core.keys import text
from maxbatch.core.solve import divisors, nearest_divisors
from maxbatch.errors import UserError

_MOST_INCREMENTS = 10_000
"""Most increments of a ramp-up; each is a phase, planned and checked before the run."""


def check_increments(
  keys: tuple[str, str], sizes: tuple[Fraction, Fraction, Fraction], unit: Fraction, target_key: str
) -> None:
  """Checks that start and target are whole increments apart, and all of them multiples of `unit`.

  Args:
    keys: of the start and of the increment.
    sizes: start, increment and target.
    unit: one sample for each data-parallel group, in the unit of the sizes.
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
    raise UserError(
      f"{keys[0]}={text(start)} must be a positive multiple of {text(unit)} (one sample for each "
      f"data-parallel group) below {target_key}={text(target)}; "
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
