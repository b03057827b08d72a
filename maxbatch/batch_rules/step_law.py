"""Step Law 2025: batch from the data, rate from model and data."""

from maxbatch.batch_rules.rule import BatchRule, Fitted, RateRule, Training

_SOURCE = "arXiv 2503.04715; code step-law/steplaw"
_FITTED = (Fitted("parameters", 0.21e9, 1.07e9), Fitted("tokens", 4e9, 100e9))


def batch_tokens(training: Training) -> float:
  """0.58 · D^0.571 tokens."""
  return 0.58 * training.tokens**0.571


def learning_rate(training: Training) -> float:
  """1.79 · N^−0.713 · D^0.307."""
  return 1.79 * training.parameters**-0.713 * training.tokens**0.307


BATCH = BatchRule(
  "step-law",
  "Step Law 2025",
  "Bopt = 0.58 · D^0.571",
  "D tokens; tokens of a step",
  _SOURCE,
  "text or code",
  "the optimum is broad: a batch twice as large loses little",
  means="optimal",
  batch_tokens=batch_tokens,
  fitted=_FITTED,
)
RATE = RateRule(
  "step-law-rate",
  "Step Law 2025",
  "η = 1.79 · N^−0.713 · D^0.307",
  "N parameters, D tokens; peak rate of AdamW at its batch",
  _SOURCE,
  "text or code",
  "for a cosine that ends at a rate of 1e-5",
  learning_rate=learning_rate,
  batch_tokens=batch_tokens,
  fitted=_FITTED,
)
