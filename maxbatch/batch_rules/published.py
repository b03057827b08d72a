"""The published rules, each with its formula, units, range, source and caveat; RULES has them all."""

import math
from collections.abc import Mapping

from maxbatch.batch_rules.rule import (
  BatchRule,
  Fitted,
  GrowthRule,
  RateRule,
  Rule,
  ScalingRule,
  Training,
  WeightDecayRule,
)


def expected_loss(parameters: float, tokens: float) -> float:
  """Estimates nats per token after training: 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28.

  Hoffmann et al. 2022 (arXiv 2203.15556), equation 10, on MassiveText with its tokenizer. Another
  tokenizer or other data have another loss, so what follows from this one is indicative.
  """
  return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def half_life_tokens(decay: float, batch_tokens: float) -> float:
  """Returns tokens after which a gradient counts half in the second moment."""
  return batch_tokens * math.log(0.5) / math.log(decay)


_ZHANG = "arXiv 2410.21676; code hlzhang109/critical-batch-size"
_ZHANG_FITTED = (Fitted("parameters", 85e6, 1.2e9),)
_ZHANG_ROW, _MILLION = 512, 1e6

_BERGSMA = "arXiv 2505.13738"
_BERGSMA_FITTED = (Fitted("parameters", 111e6, 3.3e9), Fitted("tokens_per_parameter", 20, 1280))
_BERGSMA_ROW = 2048
_MEMORY = "coefficients from memory, exponents from a summary; µP, linear decay to 0"

_STEP_LAW = "arXiv 2503.04715; code step-law/steplaw"
_STEP_LAW_FITTED = (Fitted("parameters", 0.21e9, 1.07e9), Fitted("tokens", 4e9, 100e9))
_DEEPSEEK, _DEEPSEEK_FITTED = "arXiv 2401.02954, section 3.1", (Fitted("flops", 1e17, 2e19),)
_MALLADI, _MAREK = "arXiv 2205.10287", "arXiv 2507.07101; code martin-marek/batch-size"

MINIMAX_DOUBLED_AT = ((2.22, 16e6), (1.98, 32e6), (1.77, 64e6), (1.58, 128e6))
"""(loss, tokens of a step) at which MiniMax-01 doubled its batch, as published."""


def _step_law_tokens(training: Training) -> float:
  return 0.58 * training.tokens**0.571


def _deepseek_tokens(training: Training) -> float:
  return 0.2920 * training.flops**0.3271


def _nanochat_tokens(training: Training) -> float:
  """Returns tokens to the nearest power of 2, from 2^19 for 12 tokens for each of a 12-layer model's
  parameters in its matrices and its head."""
  measured = 12 * (12 * 12 * 768**2 + 768 * 32768)
  return 2.0 ** round(math.log2(2**19 * (training.tokens / measured) ** 0.383))


_BATCHES = (
  BatchRule(
    "zhang",
    "Zhang 2024, by data",
    "B* = 22.91 · D^0.47",
    "D millions of tokens; sequences of 512 tokens",
    _ZHANG,
    "summary",
    "20% more steps than linear scaling from a batch of 256; that D is in millions, we infer",
    means="overhead",
    batch_tokens=lambda training: 22.91 * (training.tokens / _MILLION) ** 0.47 * _ZHANG_ROW,
    data_overhead=0.2,
    fitted=_ZHANG_FITTED,
  ),
  BatchRule(
    "power-lines-critical",
    "Bergsma 2025, critical",
    "Bcrit = 0.0471 · Dmin^0.462",
    "D tokens; sequences of 2048 tokens",
    _BERGSMA,
    "memory",
    f"{_MEMORY}; Dmin is taken to be the run's tokens",
    means="critical",
    batch_tokens=lambda training: 0.0471 * training.tokens**0.462 * _BERGSMA_ROW,
    fitted=_BERGSMA_FITTED,
  ),
  BatchRule(
    "kaplan",
    "Kaplan 2020",
    "Bcrit = 2e8 · L^(−1/0.21)",
    "L nats per token; tokens of a step",
    "arXiv 2001.08361, equation 1.4 (its figure 10 has 2.1e8 · L^−4.8)",
    "summary",
    "L is bound to WebText2 and its tokenizer, and is guessed here unless final_loss= is given",
    means="critical",
    batch_tokens=lambda training: 2e8 / training.loss ** (1 / 0.21),
    fitted=(Fitted("parameters", 3e6, 85e6),),
  ),
  BatchRule(
    "minimax",
    "MiniMax-01 2025",
    "Bcrit = 2.10e9 · L^−6.12",
    "L nats per token; tokens of a step",
    "arXiv 2501.08313, section 4; the formula is our fit to its four points",
    "text or code",
    "L is on its own scale, and is guessed here unless final_loss= is given",
    means="critical",
    batch_tokens=lambda training: 2.10e9 * training.loss**-6.12,
    fitted=(Fitted("parameters", 50e6, 600e6),),
  ),
  BatchRule(
    "zhang-parameters",
    "Zhang 2024, by size",
    "B* = 93.20 · N^0.47",
    "N millions of parameters; sequences of 512 tokens",
    _ZHANG,
    "summary",
    "holds where data and model grow together, about 20 tokens a parameter; elsewhere by data",
    means="overhead",
    batch_tokens=lambda training: 93.20 * (training.parameters / _MILLION) ** 0.47 * _ZHANG_ROW,
    data_overhead=0.2,
    fitted=_ZHANG_FITTED,
    only=(Fitted("tokens_per_parameter", 10, 40),),
  ),
  BatchRule(
    "zhang-equal-tokens",
    "Zhang 2024, 3B tokens",
    "B* = 621.341 · N^0.087",
    "N millions of parameters; sequences of 512 tokens",
    _ZHANG,
    "summary",
    "after 3.07B tokens, whatever the size: it shows that the model hardly matters",
    means="overhead",
    batch_tokens=lambda training: 621.341 * (training.parameters / _MILLION) ** 0.087 * _ZHANG_ROW,
    data_overhead=0.2,
    fitted=_ZHANG_FITTED,
    only=(Fitted("tokens", 1.5e9, 6e9),),
  ),
  BatchRule(
    "merrill",
    "Merrill 2025",
    "B* about 4096 · 4096 tokens, late in training",
    "tokens of a step",
    "arXiv 2505.23971",
    "text or code",
    "a plateau read off figures, within 0.01 nats of smaller batches; early in training it is near 0. "
    "maxbatch critical_batch measures it for your run",
    means="tolerance",
    batch_tokens=lambda _: 4096.0 * 4096.0,
    fitted=(Fitted("parameters", 1e9, 7e9),),
  ),
  BatchRule(
    "step-law",
    "Step Law 2025",
    "Bopt = 0.58 · D^0.571",
    "D tokens; tokens of a step",
    _STEP_LAW,
    "text or code",
    "the optimum is broad: a batch twice as large loses little",
    means="optimal",
    batch_tokens=_step_law_tokens,
    fitted=_STEP_LAW_FITTED,
  ),
  BatchRule(
    "power-lines-optimal",
    "Bergsma 2025, optimal",
    "Bopt = 0.0306 · D^0.383",
    "D tokens; sequences of 2048 tokens",
    _BERGSMA,
    "memory",
    f"{_MEMORY}; at 610M parameters and 20 tokens each the best of their grid was 252, this says 223",
    means="optimal",
    batch_tokens=lambda training: 0.0306 * training.tokens**0.383 * _BERGSMA_ROW,
    fitted=_BERGSMA_FITTED,
  ),
  BatchRule(
    "deepseek",
    "DeepSeek LLM 2024",
    "Bopt = 0.2920 · C^0.3271",
    "C FLOPs, without embeddings; tokens of a step",
    _DEEPSEEK,
    "summary",
    "by compute, not by data: it grows with the model, unlike all the others",
    means="optimal",
    batch_tokens=_deepseek_tokens,
    fitted=_DEEPSEEK_FITTED,
  ),
  BatchRule(
    "nanochat",
    "nanochat 2026",
    "Bopt = 2^19 · (D / 1.32e9)^0.383, to a power of 2",
    "D tokens; tokens of a step",
    "karpathy/nanochat, scripts/base_train.py",
    "text or code",
    "one measured point, of a model of 12 layers under Muon; the exponent is Bergsma's",
    means="optimal",
    batch_tokens=_nanochat_tokens,
    fitted=(Fitted("tokens", 0.5e9, 10e9),),
  ),
  BatchRule(
    "minicpm",
    "MiniCPM 2024",
    "Bopt = 1.21e9 · L^−6.24",
    "L nats per token; tokens of a step",
    "arXiv 2404.06395, section 3.2",
    "summary",
    "the fewest tokens, not the least time; L is that of C4 with its tokenizer, and is guessed here "
    "unless final_loss= is given",
    means="optimal",
    batch_tokens=lambda training: 1.21e9 / training.loss**6.24,
    fitted=(Fitted("parameters", 9e6, 170e6),),
  ),
)

_RATES = (
  RateRule(
    "step-law-rate",
    "Step Law 2025",
    "η = 1.79 · N^−0.713 · D^0.307",
    "N parameters, D tokens; peak rate of AdamW at its batch",
    _STEP_LAW,
    "text or code",
    "for a cosine that ends at a rate of 1e-5",
    learning_rate=lambda training: 1.79 * training.parameters**-0.713 * training.tokens**0.307,
    batch_tokens=_step_law_tokens,
    fitted=_STEP_LAW_FITTED,
  ),
  RateRule(
    "deepseek-rate",
    "DeepSeek LLM 2024",
    "η = 0.3118 · C^−0.1250",
    "C FLOPs, without embeddings; peak rate of AdamW at its batch",
    _DEEPSEEK,
    "summary",
    "for a rate that falls in a few steps, not on a curve",
    learning_rate=lambda training: 0.3118 * training.flops**-0.1250,
    batch_tokens=_deepseek_tokens,
    fitted=_DEEPSEEK_FITTED,
  ),
)


def _moment(decay: float, factor: float, share: float) -> float:
  del share
  return max(0.0, 1 - factor * (1 - decay))


def _relative_rate(share: float) -> float:
  """Returns η / ηmax at B = share · Bn."""
  return 2 / (share**-0.5 + share**0.5)


SQUARE_ROOT = ScalingRule(
  "malladi-rate",
  "Malladi 2022",
  "η → η · √κ at κ times the batch",
  "κ a factor",
  _MALLADI,
  "summary",
  "where noise dominates, that is well below the critical batch",
  key="learning_rate",
  scaled=lambda value, factor, _: value * factor**0.5,
)
SURGE = ScalingRule(
  "surge-rate",
  "Li 2024",
  "η = ηmax / [½ · (√(Bn/B) + √(B/Bn))]",
  "B and Bn in one unit, Bn the batch with the highest rate",
  "arXiv 2405.14578",
  "text or code",
  "for Adam as sign descent; Bn, taken to be the critical batch, grows in training",
  key="learning_rate",
  scaled=lambda value, factor, share: (
    value * _relative_rate(factor * share) / _relative_rate(share)
  ),
)
SECOND_MOMENT = ScalingRule(
  "marek-b2",
  "Marek 2025",
  "β2 → β2^κ at κ times the batch: one half-life in tokens",
  "κ a factor",
  _MAREK,
  "text or code",
  "batches of 1 to 4096, models of 30M to 1.3B",
  key="adam_b2",
  scaled=lambda value, factor, _: value**factor,
)
_SCALINGS = (
  SQUARE_ROOT,
  SURGE,
  ScalingRule(
    "marek-rate",
    "Marek 2025",
    "η → η · κ^0.16: 3 times the rate from a batch of 1 to 1024",
    "κ a factor",
    _MAREK,
    "text or code",
    "the exponent is ours, from one pair of points, with the half-life of β2 kept",
    key="learning_rate",
    scaled=lambda value, factor, _: value * factor ** (math.log(3) / math.log(1024)),
  ),
  SECOND_MOMENT,
  ScalingRule(
    "malladi-b1",
    "Malladi 2022",
    "β1 → 1 − κ · (1 − β1)",
    "κ a factor",
    _MALLADI,
    "summary",
    "0.9 reaches 0 at κ = 10; no published rule scales β1",
    key="adam_b1",
    scaled=_moment,
  ),
  ScalingRule(
    "malladi-b2",
    "Malladi 2022",
    "β2 → 1 − κ · (1 − β2)",
    "κ a factor",
    _MALLADI,
    "summary",
    "as marek for small changes; reaches 0 for large ones",
    key="adam_b2",
    scaled=_moment,
  ),
  ScalingRule(
    "malladi-eps",
    "Malladi 2022",
    "ε → ε / √κ",
    "κ a factor",
    _MALLADI,
    "summary",
    "matters only where ε is near the size of the gradients",
    key="adam_eps",
    scaled=lambda value, factor, _: value / factor**0.5,
  ),
)

WEIGHT_DECAY = WeightDecayRule(
  "power-lines-timescale",
  "Bergsma 2025",
  "λ = B / (η · D · τ), τ = 1.084 · (D/N)^−0.527",
  "B and D tokens, η the peak rate of AdamW, τ a share of the run",
  _BERGSMA,
  "memory",
  f"{_MEMORY}: under µP η is that of the matrices",
  weight_decay=lambda training, batch_tokens, rate: (
    batch_tokens / (rate * training.tokens * 1.084 * training.tokens_per_parameter**-0.527)
  ),
  fitted=_BERGSMA_FITTED,
)

GROWTH = GrowthRule(
  "zhang-growth",
  "Zhang 2024",
  "B ∝ D^0.47",
  "D tokens so far",
  _ZHANG,
  "summary",
  "its D are whole runs; taken here for the tokens that a run has seen, which is conservative, since "
  "the batch at a run's end is worth more than over its whole length",
  exponent=0.47,
  fitted=_ZHANG_FITTED,
)
_CONTESTED_GROWTH = GrowthRule(
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

RULES: Mapping[str, Rule] = {
  rule.name: rule
  for rule in (*_BATCHES, *_RATES, *_SCALINGS, WEIGHT_DECAY, GROWTH, _CONTESTED_GROWTH)
}
"""By name: those of the batch, of what follows it, and of how it grows."""


def batch_rules() -> list[BatchRule]:
  """Returns those that say a batch size."""
  return [rule for rule in RULES.values() if isinstance(rule, BatchRule)]


def rate_rules() -> list[RateRule]:
  """Returns those that say a learning rate."""
  return [rule for rule in RULES.values() if isinstance(rule, RateRule)]


def scaling_rules(key: str) -> list[ScalingRule]:
  """Returns those that say how a key follows the batch."""
  return [rule for rule in RULES.values() if isinstance(rule, ScalingRule) and rule.key == key]
