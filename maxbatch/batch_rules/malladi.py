"""Malladi et al. 2022: Adam's settings at another batch, by a stochastic differential equation."""

from maxbatch.batch_rules.rule import ScalingRule

_SOURCE = "arXiv 2205.10287"


def _moment(decay: float, factor: float, share: float) -> float:
  del share
  return max(0.0, 1 - factor * (1 - decay))


RATE = ScalingRule(
  "malladi-rate",
  "Malladi 2022",
  "η → η · √κ at κ times the batch",
  "κ a factor",
  _SOURCE,
  "summary",
  "where noise dominates, that is well below the critical batch",
  key="learning_rate",
  scaled=lambda value, factor, _: value * factor**0.5,
)
FIRST_MOMENT = ScalingRule(
  "malladi-b1",
  "Malladi 2022",
  "β1 → 1 − κ · (1 − β1)",
  "κ a factor",
  _SOURCE,
  "summary",
  "0.9 reaches 0 at κ = 10; nobody scales β1 so far",
  key="adam_b1",
  scaled=_moment,
)
SECOND_MOMENT = ScalingRule(
  "malladi-b2",
  "Malladi 2022",
  "β2 → 1 − κ · (1 − β2)",
  "κ a factor",
  _SOURCE,
  "summary",
  "as marek for small changes; reaches 0 for large ones",
  key="adam_b2",
  scaled=_moment,
)
EPSILON = ScalingRule(
  "malladi-eps",
  "Malladi 2022",
  "ε → ε / √κ",
  "κ a factor",
  _SOURCE,
  "summary",
  "matters only where ε is near the size of the gradients",
  key="adam_eps",
  scaled=lambda value, factor, _: value / factor**0.5,
)
