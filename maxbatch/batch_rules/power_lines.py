"""Bergsma et al. 2025, "Power Lines": optimal and critical batch by data, and the weight decay."""

from maxbatch.batch_rules.rule import BatchRule, Fitted, Training, WeightDecayRule

_SEQUENCE_TOKENS = 2048
_SOURCE = "arXiv 2505.13738"
_FITTED = (Fitted("parameters", 111e6, 3.3e9), Fitted("tokens_per_parameter", 20, 1280))
_MEMORY = "coefficients from memory, exponents from a summary; µP, linear decay to 0"


def optimal_tokens(tokens: float) -> float:
  """0.0306 · D^0.383 sequences of 2048 tokens."""
  return 0.0306 * tokens**0.383 * _SEQUENCE_TOKENS


def critical_tokens(tokens: float) -> float:
  """0.0471 · Dmin^0.462 sequences of 2048 tokens."""
  return 0.0471 * tokens**0.462 * _SEQUENCE_TOKENS


def timescale(tokens_per_parameter: float) -> float:
  """The best τ = B / (η·λ·D), as a share of the run: 1.084 · (D/N)^−0.527."""
  return 1.084 * tokens_per_parameter**-0.527


def weight_decay(training: Training, batch_tokens: float, learning_rate: float) -> float:
  """λ = B / (η·D·τ), B and D in tokens."""
  share = timescale(training.tokens_per_parameter)
  return batch_tokens / (learning_rate * training.tokens * share)


OPTIMAL = BatchRule(
  "power-lines-optimal",
  "Bergsma 2025, optimal",
  "Bopt = 0.0306 · D^0.383",
  "D tokens; sequences of 2048 tokens",
  _SOURCE,
  "memory",
  f"{_MEMORY}; at 610M parameters and 20 tokens each the best of their grid was 252, this says 223",
  means="optimal",
  batch_tokens=lambda training: optimal_tokens(training.tokens),
  fitted=_FITTED,
)
CRITICAL = BatchRule(
  "power-lines-critical",
  "Bergsma 2025, critical",
  "Bcrit = 0.0471 · Dmin^0.462",
  "D tokens; sequences of 2048 tokens",
  _SOURCE,
  "memory",
  f"{_MEMORY}; Dmin is taken to be the run's tokens",
  means="critical",
  batch_tokens=lambda training: critical_tokens(training.tokens),
  fitted=_FITTED,
)
WEIGHT_DECAY = WeightDecayRule(
  "power-lines-timescale",
  "Bergsma 2025",
  "λ = B / (η · D · τ), τ = 1.084 · (D/N)^−0.527",
  "B and D tokens, η the peak rate of AdamW, τ a share of the run",
  _SOURCE,
  "memory",
  f"{_MEMORY}: under µP η is that of the matrices",
  weight_decay=weight_decay,
  fitted=_FITTED,
)
