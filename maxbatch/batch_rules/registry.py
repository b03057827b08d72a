"""Every rule, by its name. To add one: its file, and its line here."""

from collections.abc import Mapping

from maxbatch.batch_rules import (
  deepseek,
  gray,
  kaplan,
  malladi,
  marek,
  merrill,
  minicpm,
  minimax,
  nanochat,
  power_lines,
  step_law,
  surge,
  zhang,
)
from maxbatch.batch_rules.rule import (
  BatchRule,
  GrowthRule,
  RateRule,
  Rule,
  ScalingRule,
  WeightDecayRule,
)

RULES: Mapping[str, Rule] = {
  rule.name: rule
  for rule in (
    # The batch.
    zhang.BY_TOKENS,
    power_lines.CRITICAL,
    kaplan.RULE,
    minimax.RULE,
    zhang.BY_PARAMETERS,
    zhang.AT_EQUAL_TOKENS,
    merrill.RULE,
    step_law.BATCH,
    power_lines.OPTIMAL,
    deepseek.BATCH,
    nanochat.RULE,
    minicpm.RULE,
    # What follows it.
    step_law.RATE,
    deepseek.RATE,
    malladi.RATE,
    surge.RATE,
    marek.RATE,
    marek.SECOND_MOMENT,
    malladi.FIRST_MOMENT,
    malladi.SECOND_MOMENT,
    malladi.EPSILON,
    power_lines.WEIGHT_DECAY,
    # How it grows.
    zhang.GROWTH,
    gray.GROWTH,
  )
}


def batch_rules() -> list[BatchRule]:
  """Those that say a batch size."""
  return [rule for rule in RULES.values() if isinstance(rule, BatchRule)]


def rate_rules() -> list[RateRule]:
  """Those that say a learning rate."""
  return [rule for rule in RULES.values() if isinstance(rule, RateRule)]


def scaling_rules(key: str) -> list[ScalingRule]:
  """Those that say how a key follows the batch."""
  return [rule for rule in RULES.values() if isinstance(rule, ScalingRule) and rule.key == key]


def weight_decay_rules() -> list[WeightDecayRule]:
  """Those that say a weight decay."""
  return [rule for rule in RULES.values() if isinstance(rule, WeightDecayRule)]


def growth_rules() -> list[GrowthRule]:
  """Those that say how the batch may grow."""
  return [rule for rule in RULES.values() if isinstance(rule, GrowthRule)]
