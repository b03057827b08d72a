"""DeepSeek LLM 2024: batch and rate from the training's FLOPs."""

from maxbatch.batch_rules.rule import BatchRule, Fitted, RateRule, Training

_SOURCE = "arXiv 2401.02954, section 3.1"
_FITTED = (Fitted("flops", 1e17, 2e19),)


def batch_tokens(training: Training) -> float:
  """0.2920 · C^0.3271 tokens."""
  return 0.2920 * training.flops**0.3271


def learning_rate(training: Training) -> float:
  """0.3118 · C^−0.1250."""
  return 0.3118 * training.flops**-0.1250


BATCH = BatchRule(
  "deepseek",
  "DeepSeek LLM 2024",
  "Bopt = 0.2920 · C^0.3271",
  "C FLOPs, without embeddings; tokens of a step",
  _SOURCE,
  "summary",
  "by compute, not by data: it grows with the model, unlike all the others",
  means="optimal",
  batch_tokens=batch_tokens,
  fitted=_FITTED,
)
RATE = RateRule(
  "deepseek-rate",
  "DeepSeek LLM 2024",
  "η = 0.3118 · C^−0.1250",
  "C FLOPs, without embeddings; peak rate of AdamW at its batch",
  _SOURCE,
  "summary",
  "for a rate that falls in a few steps, not on a curve",
  learning_rate=learning_rate,
  batch_tokens=batch_tokens,
  fitted=_FITTED,
)
