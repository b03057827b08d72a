"""What limits: chips without work, data that a large batch wastes, memory, links, the deadline."""

import math
from collections.abc import Iterator

from maxbatch.advice.advice import Advice, Planned
from maxbatch.advice.slices import used
from maxbatch.advice.words import DAY, percent, short, span, times

_IDLE = 0.9
"""Share of the best utilisation of larger batches below which chips wait for work."""


def limits(advice: Advice, planned: Planned) -> Iterator[str]:
  """Yields sentences, the most important first."""
  asked = advice.asked
  if advice.here and planned.step_seconds:
    yield from _deadline(advice, planned)
    yield from _batch_and_slice(advice)
    step = advice.here.split.step
    yield (
      f"The step is limited by {step.limited_by}: utilisation "
      f"{used(step)}, memory {percent(step.peak_bytes / step.capacity_bytes)}."
    )
  per_parameter = asked.training.tokens_per_parameter
  if per_parameter < 1:
    yield (
      f"{per_parameter:.2g} tokens a parameter are far below what any rule was fitted for (20 and "
      "more): take the numbers as guesses."
    )


def _deadline(advice: Advice, planned: Planned) -> Iterator[str]:
  deadline = advice.asked.wishes.deadline_days
  days = planned.seconds / DAY
  if not deadline:
    return
  if days <= deadline:
    yield f"The deadline of {deadline:g} days is met, with {span(deadline - days)} to spare."
    return
  affordable = advice.asked.tokens * deadline / days
  faster = [
    f"{curve.place} takes {span(curve.fastest.days)}"
    for curve in advice.curves
    if curve.fastest.days <= deadline
  ]
  exponent = math.floor(math.log10(affordable))
  fewer = f"total_tokens={affordable / 10**exponent:.2f}e{exponent}"
  offers = [*faster, f"{fewer} ends in time on {advice.asked.place}"]
  yield (
    f"The deadline of {deadline:g} days is missed: {span(days)}, which is {times(days / deadline)} as "
    f"long. {'; '.join(offers)}."
  )


def _batch_and_slice(advice: Advice) -> Iterator[str]:
  here = advice.here
  assert here
  [own] = [curve for curve in advice.curves if curve.place == here.place] or [None]
  steps = [one.split.step for curve in advice.curves for one in curve.points]
  best = max(steps, key=lambda step: step.utilisation, default=here.split.step)
  wanted = float(advice.asked.own_batch or advice.size.tokens / advice.asked.length)
  if here.split.batch > 1.25 * wanted:
    yield (
      f"The slice is large for the data: it divides no batch between {wanted:,.0f} samples, which the "
      f"rules ask for, and {here.split.batch:,}."
    )
  if here.split.step.utilisation < _IDLE * best.utilisation:
    yield (
      f"The batch is small for this slice: its chips wait (utilisation "
      f"{used(here.split.step)}, on fewer chips or with more samples {used(best)})."
    )
  elif own and own.fastest.split.batch < here.split.batch:
    fast = own.fastest
    saved = 1 - fast.tokens / here.tokens
    yield (
      f"More batch than this slice needs: {fast.split.batch:,} samples keep its chips as busy "
      f"({used(fast.split.step)}) and reach the same loss with {percent(saved)} less "
      f"data, {span(fast.days)} instead of {span(here.days)}; data_overhead={fast.data_overhead:.2g} "
      f"asks for that. It takes {short(fast.steps)} steps instead of {short(here.steps)}, which matters "
      "only on more chips."
    )
