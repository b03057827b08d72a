"""The log line that reports the noise scale of the policy gradient: which of two sizes to raise.

Shapes of steps are compared by McCandlish et al.'s rule, with the noise that each would have: a step of
P prompts and G completions has (between + within(G)) / P. More prompts divide all of it, more
completions the part by sampling alone. So twice the completions help more than twice the prompts, both
of which are twice as many completions, only where sampling makes more than 1 − 1/(2G) of the noise.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxbatch.core.confidence import Interval
from maxbatch.core.noise_scale import Estimate
from maxbatch.noise.advice import cost, percent, place, shown, unknown
from maxbatch.noise.prompts import within_at

_CAVEAT = "a heuristic (McCandlish et al. 2018)"

_WORTH_SAYING = 0.98
"""The share of the steps that another shape of as many completions must need at most."""


class _Sizes(NamedTuple):
  """Of a step: two keys."""

  batch_size: int
  num_generations: int

  def keys_unlike(self, other: "_Sizes") -> str:
    """Returns those that differ from the other's, as they are written."""
    both = zip(self._fields, self, other, strict=True)
    return " ".join(f"{key}={value}" for key, value, theirs in both if value != theirs)

  @property
  def is_possible(self) -> bool:
    """Whether there are prompts, and completions to compare."""
    return self.batch_size >= 1 and self.num_generations >= 2

  @property
  def completions(self) -> int:
    """Completions of all prompts."""
    return math.prod(self)


def prompt_advice(
  estimate: Estimate, sampling: Interval | None, prompts: int, generations: int
) -> str:
  """Returns the noise scale in prompts of so many completions, what sampling has in it, and the effect of
  other sizes; `sampling` is the share of the noise that is by sampling, None if it is not known."""
  now, scale = _Sizes(prompts, generations), estimate.scale
  if sampling is None:
    return unknown(estimate, prompts)
  sampling = _each(sampling, lambda share: min(max(share, 0.0), 1.0))
  value, low, high = shown(_each(sampling, lambda share: 100 * share))
  share = f"{value}% of the noise by sampling (95% {low}–{high}%)"
  if scale is None:
    return f"{unknown(estimate, prompts)}; {share}: {_which(sampling, now)}"
  value, low, high = shown(scale)
  unit = f"prompts of {generations} completions"
  if scale.low <= 0:
    return f"noise scale below {high} {unit} (95% over {estimate.steps} steps), {share}"
  result = f"noise scale ≈ {value} {unit} (95% {low}–{high} over {estimate.steps} steps), {share}"
  where = f"batch_size={prompts} is {place(scale, prompts)}"
  which = "" if prompts > scale.high else f"; {_which(sampling, now)}"
  return f"{result}; {where}: {_effects(scale, sampling.value, now)}{which} — {_CAVEAT}"


def _each(interval: Interval, change: Callable[[float], float]) -> Interval:
  return Interval(*map(change, (interval.value, interval.low, interval.high)))


def _effects(scale: Interval, sampling: float, now: _Sizes) -> str:
  """Says what other sizes would take: of one key, and of as many completions if that helps."""
  P, G = now
  fewer, more = [_Sizes(P // 2, G), _Sizes(P, G // 2)], [_Sizes(2 * P, G), _Sizes(P, 2 * G)]
  others = fewer if scale.high < P else more
  for shape in (_Sizes(2 * P, G // 2), _Sizes(P // 2, 2 * G)):
    if shape.is_possible and shape.completions == now.completions:
      others += [shape] if _steps(scale.value, sampling, now, shape) < _WORTH_SAYING else []
  first, *rest = [_effect(scale, sampling, now, other) for other in others if other.is_possible]
  said = ["{} would take about {} steps for {} completions".format(*first)]
  return ", ".join(said + ["{} {} for {}".format(*effect) for effect in rest])


def _effect(scale: Interval, sampling: float, now: _Sizes, other: _Sizes) -> tuple[str, str, str]:
  """Returns the keys of other sizes, and the change of steps and of completions with them."""
  parts = (scale.value, scale.low, scale.high)
  steps = [_steps(part, sampling, now, other) for part in parts]
  completions = [ratio * other.completions / now.completions for ratio in steps]
  return other.keys_unlike(now), _change(steps), _change(completions)


def _steps(scale: float, sampling: float, now: _Sizes, other: _Sizes) -> float:
  """Returns steps with other sizes, relative to those with the present ones."""
  noise = 1 - sampling + within_at(sampling, now.num_generations, other.num_generations)
  return cost(other.batch_size, scale * noise).steps / cost(now.batch_size, scale).steps


def _change(ratios: Sequence[float]) -> str:
  """Says a change, as `36% fewer` or `28% more`."""
  return f"{percent([abs(ratio - 1) for ratio in ratios])} {'fewer' if ratios[0] < 1 else 'more'}"


def _which(sampling: Interval, now: _Sizes) -> str:
  """Returns what to raise, if the whole interval agrees."""
  P, G = now
  bound = 1 - 1 / (2 * G)
  prompts, generations = f"batch_size, to {2 * P}", f"num_generations, to {2 * G}"
  if sampling.high < bound:
    return f"raise {prompts}"
  return f"raise {generations}" if sampling.low > bound else f"raise {prompts}, or {generations}"
