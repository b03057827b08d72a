"""Marek et al. 2025: the half-life of the second moment in tokens is what stays."""

import math

from maxbatch.batch_rules.rule import ScalingRule


def half_life_tokens(decay: float, batch_tokens: float) -> float:
  """Tokens after which a gradient counts half in the second moment."""
  return batch_tokens * math.log(0.5) / math.log(decay)


SECOND_MOMENT = ScalingRule(
  "marek-b2",
  "Marek 2025",
  "β2 → β2^κ at κ times the batch: one half-life in tokens",
  "κ a factor",
  "arXiv 2507.07101; code martin-marek/batch-size",
  "text or code",
  "batches of 1 to 4096, models of 30M to 1.3B",
  key="adam_b2",
  scaled=lambda value, factor, _: value**factor,
)
RATE = ScalingRule(
  "marek-rate",
  "Marek 2025",
  "η → η · κ^0.16: 3 times the rate from a batch of 1 to 1024",
  "κ a factor",
  "arXiv 2507.07101; code martin-marek/batch-size",
  "text or code",
  "the exponent is ours, from one pair of points, with the half-life of β2 kept",
  key="learning_rate",
  scaled=lambda value, factor, _: value * factor ** (math.log(3) / math.log(1024)),
)
