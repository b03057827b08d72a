"""nanochat 2026: a measured batch of a small model, carried over by the exponent of Power Lines."""

import math

from maxbatch.batch_rules.rule import BatchRule, Fitted

_REFERENCE_BATCH = 2**19
_REFERENCE_TOKENS = 12 * (12 * 12 * 768**2 + 768 * 32768)
"""12 tokens for each of a 12-layer model's parameters in its matrices and its head."""


def batch_tokens(tokens: float) -> float:
  """2^19 · (D / 1.32e9)^0.383 tokens, to the nearest power of 2."""
  exact = _REFERENCE_BATCH * (tokens / _REFERENCE_TOKENS) ** 0.383
  return 2.0 ** round(math.log2(exact))


RULE = BatchRule(
  "nanochat",
  "nanochat 2026",
  "Bopt = 2^19 · (D / 1.32e9)^0.383, to a power of 2",
  "D tokens; tokens of a step",
  "karpathy/nanochat, scripts/base_train.py",
  "text or code",
  "one measured point, of a model of 12 layers under Muon; the exponent is Bergsma's",
  means="optimal",
  batch_tokens=lambda training: batch_tokens(training.tokens),
  fitted=(Fitted("tokens", 0.5e9, 10e9),),
)
