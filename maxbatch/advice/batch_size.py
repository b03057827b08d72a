"""What the rules say together: an interval of batches at one data overhead, and one taken from it.

Rules for the critical batch, and for the batch at some data overhead, are carried to the overhead
that is asked for (B = x · Bcrit). Rules for the optimal batch answer another question, and so stand
beside them. What is taken is the middle one, so that a single rule far off moves nothing.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from maxbatch.advice.asked import Asked
from maxbatch.advice.measured import Measured
from maxbatch.batch_rules.registry import batch_rules
from maxbatch.batch_rules.rule import BatchRule, Training
from maxbatch.batch_rules.tradeoff import at_overhead


@dataclasses.dataclass(frozen=True)
class Said:
  """What one rule says of this training."""

  rule: BatchRule
  tokens: float
  """Its own value, tokens of a step."""
  at_overhead: float | None
  """At the data overhead that was asked for; None where the rule answers another question."""
  beyond: float
  """The factor by which the training is outside of what was fitted; 1 inside."""

  def as_dict(self) -> dict[str, object]:
    """For --json."""
    return {
      "rule": self.rule.name,
      "means": self.rule.means,
      "tokens_per_step": self.tokens,
      "tokens_per_step_at_overhead": self.at_overhead,
      "times_beyond_fitted_range": self.beyond,
      "formula": self.rule.formula,
      "source": self.rule.source,
      "constants_from": self.rule.read,
      "caveat": self.rule.caveat,
    }


@dataclasses.dataclass(frozen=True)
class BatchSize:
  """The answer in tokens of a step, before it is divided over devices."""

  data_overhead: float
  said: Sequence[Said]
  measured: Sequence[Measured]
  low: float
  high: float
  """Of the rules and measurements at the asked overhead."""
  by_rules: float
  """The middle of the rules, without what was measured."""
  tokens: float
  """What is taken."""

  @property
  def critical_tokens(self) -> float:
    """The critical batch that follows from what is taken."""
    return self.tokens / self.data_overhead

  @property
  def spread(self) -> float:
    """The factor between the ends of the interval."""
    return self.high / self.low


def batch_size(asked: Asked, measured: Sequence[Measured]) -> BatchSize:
  """Joins the rules, and what was measured."""
  return joined(asked.training, asked.wishes.data_overhead, measured)


def joined(
  training: Training, data_overhead: float, measured: Sequence[Measured] = ()
) -> BatchSize:
  """The rules of a training, at a data overhead."""
  said = [
    Said(
      rule,
      rule.batch_tokens(training),
      at_overhead(rule, training, data_overhead),
      rule.beyond(training),
    )
    for rule in batch_rules()
    if rule.speaks_of(training)
  ]
  estimates = [one.at_overhead for one in said if one.at_overhead is not None]
  noise = [one.at_overhead(data_overhead).value for one in measured if one.kind == "noise scale"]
  by_rules, taken = _middle(estimates), _middle([*estimates, *noise])
  low, high = min([*estimates, *noise]), max([*estimates, *noise])
  for one in measured:
    # Up to its lower end branches lost nothing, and beyond its upper end they did.
    if one.kind != "noise scale":
      ends = one.at_overhead(data_overhead)
      low, high, taken = (ends.clamped(each) for each in (low, high, taken))
  return BatchSize(data_overhead, said, measured, low, high, by_rules, taken)


def _middle(values: Sequence[float]) -> float:
  """The median; of an even number the geometric mean of the two in the middle."""
  return (statistics.median_low(values) * statistics.median_high(values)) ** 0.5
