"""Data against steps: what a batch costs, given the critical one (McCandlish et al. 2018).

(S/Smin − 1)(E/Emin − 1) = 1 with Bcrit = Emin / Smin, so that a batch of x · Bcrit takes
(1 + x) · Emin tokens and (1 + 1/x) · Smin steps. At x = 1 it costs twice the data. It holds for SGD on
a quadratic loss, and is the common heuristic elsewhere. arXiv 1812.06162, equation 2.11.
"""

from maxbatch.batch_rules.rule import BatchRule, Training


def data_overhead_of(batch_tokens: float, critical_tokens: float) -> float:
  """B / Bcrit."""
  return batch_tokens / critical_tokens


def data_factor(data_overhead: float) -> float:
  """E / Emin at B = data_overhead · Bcrit."""
  return 1 + data_overhead


def steps_factor(data_overhead: float) -> float:
  """S / Smin at B = data_overhead · Bcrit."""
  return 1 + 1 / data_overhead


def critical_tokens(rule: BatchRule, training: Training) -> float | None:
  """The critical batch in tokens that a rule implies; None for one of another meaning."""
  if rule.means == "critical":
    return rule.batch_tokens(training)
  if rule.means == "overhead":
    return rule.batch_tokens(training) / rule.data_overhead
  return None


def at_overhead(rule: BatchRule, training: Training, data_overhead: float) -> float | None:
  """The batch in tokens at which a rule expects (1 + data_overhead) times the data."""
  critical = critical_tokens(rule, training)
  return None if critical is None else data_overhead * critical
