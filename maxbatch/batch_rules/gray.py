"""Gray et al. 2024: a batch that grows in proportion to the tokens seen."""

from maxbatch.batch_rules.rule import Fitted, GrowthRule

GROWTH = GrowthRule(
  "gray-growth",
  "Gray 2024",
  "B ∝ D",
  "D tokens so far",
  "arXiv 2411.00999; code CerebrasResearch/nanoGNS",
  "text or code",
  "one model of 111M parameters on 2.2B tokens, 18% less time; Merrill contests the noise scale "
  "behind it",
  exponent=1.0,
  fitted=(Fitted("parameters", 111e6, 111e6), Fitted("tokens", 1e9, 2.2e9)),
)
