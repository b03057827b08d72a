"""Li et al. 2024: under Adam the best rate rises with the batch, peaks at the noise scale, falls."""

from maxbatch.batch_rules.rule import ScalingRule


def relative_rate(share: float) -> float:
  """η / ηmax = 1 / [½ · (√(Bn/B) + √(B/Bn))] at B = share · Bn."""
  return 2 / (share**-0.5 + share**0.5)


RATE = ScalingRule(
  "surge-rate",
  "Li 2024",
  "η = ηmax / [½ · (√(Bn/B) + √(B/Bn))]",
  "B and Bn in one unit, Bn the batch with the highest rate",
  "arXiv 2405.14578",
  "text or code",
  "for Adam as sign descent; Bn, taken to be the critical batch, grows in training",
  key="learning_rate",
  scaled=lambda value, factor, share: value * relative_rate(factor * share) / relative_rate(share),
)
