"""What a published rule is: a formula, its units, where it was fitted, and who says so.

The rules answer different questions, so what a value means stays beside it:

    optimal    the batch with the least loss after a given number of tokens
    critical   the batch that takes twice the data of a small one to the same loss (E = 2·Emin)
    overhead   the batch that takes (1 + data_overhead) times the data of a small one
    tolerance  the largest batch whose loss ends within a tolerance of all smaller ones

Only critical and overhead can be carried to another data overhead. A batch of x · Bcrit takes (1 + x)
times the least data and (1 + 1/x) times the fewest steps: (S/Smin − 1)(E/Emin − 1) = 1 with
Bcrit = Emin / Smin (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11). It holds for SGD on a
quadratic loss, and is the common heuristic elsewhere.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

Meaning = Literal["optimal", "critical", "overhead", "tolerance"]
Read = Literal["text or code", "summary", "memory"]
"""Where we have the constants from: the paper or its code, a summary by others, or memory."""


@dataclasses.dataclass(frozen=True)
class Training:
  """What a rule may ask: the model and its data."""

  parameters: float
  """All of them, embeddings too."""
  tokens: float
  flops_per_token: float
  """Forward and backward, without embeddings, with attention."""
  loss: float
  """At the end, nats per token."""

  @property
  def tokens_per_parameter(self) -> float:
    """D / N."""
    return self.tokens / self.parameters

  @property
  def flops(self) -> float:
    """C, of the whole training."""
    return self.flops_per_token * self.tokens


@dataclasses.dataclass(frozen=True)
class Fitted:
  """The range of one quantity in which the rule was fitted."""

  quantity: Literal["parameters", "tokens", "flops", "tokens_per_parameter"]
  low: float
  high: float

  def of(self, training: Training) -> float:
    """Returns the quantity of this training."""
    return {
      "parameters": training.parameters,
      "tokens": training.tokens,
      "flops": training.flops,
      "tokens_per_parameter": training.tokens_per_parameter,
    }[self.quantity]

  def beyond(self, training: Training) -> float:
    """Returns the factor by which the training is outside of the range; 1 inside."""
    value = self.of(training)
    return max(self.low / value, value / self.high, 1.0)


@dataclasses.dataclass(frozen=True)
class Rule:
  """What is said of every rule."""

  name: str
  """By which --explain finds it."""
  title: str
  formula: str
  units: str
  """Units of what goes in and what comes out."""
  source: str
  read: Read
  caveat: str
  fitted: tuple[Fitted, ...] = dataclasses.field(default=(), kw_only=True)

  def beyond(self, training: Training) -> float:
    """Returns the largest factor by which the training is outside of what was fitted; 1 inside."""
    return max((each.beyond(training) for each in self.fitted), default=1.0)


@dataclasses.dataclass(frozen=True)
class BatchRule(Rule):
  """A batch size."""

  means: Meaning
  batch_tokens: Callable[[Training], float]
  """Tokens of a step."""
  data_overhead: float = 0.0
  """Where it means overhead: x, for (1 + x) times the data."""
  only: tuple[Fitted, ...] = dataclasses.field(default=(), kw_only=True)
  """Outside of these it says nothing."""

  def speaks_of(self, training: Training) -> bool:
    """Returns whether the rule says anything about this training."""
    return all(each.beyond(training) == 1 for each in self.only)


@dataclasses.dataclass(frozen=True)
class RateRule(Rule):
  """A peak learning rate of AdamW, at the batch that the same paper recommends."""

  learning_rate: Callable[[Training], float]
  batch_tokens: Callable[[Training], float]
  """The batch for which the rate holds."""


@dataclasses.dataclass(frozen=True)
class ScalingRule(Rule):
  """How a setting follows the batch: its value at `factor` times the batch it was found at."""

  key: str
  """The configuration key: learning_rate, adam_b1, adam_b2 or adam_eps."""
  scaled: Callable[[float, float, float], float]
  """(value, factor, share) to the value at `factor` times the batch; share: the batch that the value
  was found at, over the critical one."""


@dataclasses.dataclass(frozen=True)
class WeightDecayRule(Rule):
  """The weight decay that follows from the run, its batch and its rate."""

  weight_decay: Callable[[Training, float, float], float]
  """(training, tokens of a step, learning rate) to adam_weight_decay."""


@dataclasses.dataclass(frozen=True)
class GrowthRule(Rule):
  """How the batch that is worth using grows with the tokens that a run has seen."""

  exponent: float
  """batch ∝ tokens to this power."""


def data_overhead_of(batch_tokens: float, critical_tokens: float) -> float:
  """Returns B / Bcrit."""
  return batch_tokens / critical_tokens


def data_factor(data_overhead: float) -> float:
  """Returns E / Emin at B = data_overhead · Bcrit."""
  return 1 + data_overhead


def steps_factor(data_overhead: float) -> float:
  """Returns S / Smin at B = data_overhead · Bcrit."""
  return 1 + 1 / data_overhead


def critical_tokens(rule: BatchRule, training: Training) -> float | None:
  """Returns the critical batch in tokens that a rule implies; None for one of another meaning."""
  if rule.means == "critical":
    return rule.batch_tokens(training)
  if rule.means == "overhead":
    return rule.batch_tokens(training) / rule.data_overhead
  return None


def at_overhead(rule: BatchRule, training: Training, data_overhead: float) -> float | None:
  """Returns the batch in tokens at which a rule expects (1 + data_overhead) times the data."""
  critical = critical_tokens(rule, training)
  return None if critical is None else data_overhead * critical
