"""What follows the batch: learning rate, β2 and weight decay, each with the rule that says so."""

import dataclasses
import math
from collections.abc import Sequence

from maxbatch.advice.asked import Asked
from maxbatch.batch_rules.malladi import RATE as SQUARE_ROOT
from maxbatch.batch_rules.marek import SECOND_MOMENT, half_life_tokens
from maxbatch.batch_rules.power_lines import WEIGHT_DECAY
from maxbatch.batch_rules.registry import rate_rules, scaling_rules
from maxbatch.batch_rules.rule import RateRule
from maxbatch.config.schema import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RateSaid:
  """What a rule says of the learning rate."""

  name: str
  title: str
  rate: float
  """At its own batch; of a rule that scales, at the batch of the run."""
  found_at_tokens: float
  carried: float
  """At the batch of the run."""


@dataclasses.dataclass(frozen=True)
class PhaseSettings:
  """The settings at the batch of one phase."""

  batch_tokens: float
  learning_rate: float
  adam_b2: float
  """That keeps the half-life in tokens; a run has one adam_b2, that of its last phase."""
  adam_weight_decay: float
  """That keeps the timescale; a run has one, likewise."""


@dataclasses.dataclass(frozen=True)
class Settings:
  """Of the optimizer, at the batch of the run."""

  opt_type: str
  learning_rate: float
  why: str
  said: Sequence[RateSaid]
  b2_half_life_tokens: float
  phases: Sequence[PhaseSettings]
  """One for each phase, the run's batch last."""
  coupling: str
  """learning_rate_batch_coupling."""
  advised: dict[str, object]
  """Keys to set."""

  def as_dict(self) -> dict[str, object]:
    """For --json."""
    return dataclasses.asdict(self)


def settings(asked: Asked, phases: Sequence[float], critical_tokens: float) -> Settings:
  """The settings at the last of the phases, and what they would be at each.

  Args:
    asked: the question.
    phases: tokens of a step in each phase.
    critical_tokens: the critical batch that is reckoned with.
  """
  optimizer, here = asked.config.optimizer, phases[-1]
  found_at = float(asked.wishes.rate_found_at)
  if found_at:
    said = _carried(optimizer.learning_rate, found_at, here, critical_tokens)
    rate = next(one.carried for one in said if one.name == SQUARE_ROOT.name)
    why = "yours, by the square root of the batch (malladi-rate)"
  elif "learning_rate" in asked.given or not _is_adam(optimizer):
    said = _by_rules(asked, here)
    rate = optimizer.learning_rate
    why = "yours, as it is: rate_found_at=TOKENS would carry it over"
    if not _is_adam(optimizer):
      said, why = [], f"yours: no rule here speaks of opt_type={optimizer.opt_type}"
  else:
    said = _by_rules(asked, here)
    rate = _rounded(math.exp(sum(math.log(one.carried) for one in said) / len(said)))
    why = "the mean of what two rules say, each carried here by the square root (malladi-rate)"
  found_b2 = optimizer.adam_b2
  b2 = SECOND_MOMENT.scaled(found_b2, here / found_at, 1.0) if found_at else found_b2
  decays = _is_adam(optimizer) and optimizer.opt_type != "muon"
  own_decay = "adam_weight_decay" in asked.given or not decays
  coupling = _coupling(asked)
  exponent = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}[coupling]
  of_phases = []
  for tokens in phases:
    of_phase = rate * (tokens / here) ** exponent
    of_phases.append(
      PhaseSettings(
        tokens,
        of_phase,
        SECOND_MOMENT.scaled(b2, tokens / here, 1.0),
        optimizer.adam_weight_decay
        if own_decay
        else _rounded(WEIGHT_DECAY.weight_decay(asked.training, tokens, of_phase)),
      )
    )
  advised: dict[str, object] = {"learning_rate": _rounded(rate)}
  if len(phases) > 1:
    advised["learning_rate_batch_coupling"] = coupling
  if found_at:
    advised["adam_b2"] = round(b2, 6)
  if not own_decay:
    advised["adam_weight_decay"] = of_phases[-1].adam_weight_decay
  return Settings(
    opt_type=optimizer.opt_type,
    learning_rate=_rounded(rate),
    why=why,
    said=said,
    b2_half_life_tokens=half_life_tokens(b2, here) if 0 < b2 < 1 else 0.0,
    phases=of_phases,
    coupling=coupling,
    advised=advised,
  )


def _is_adam(optimizer: OptimizerConfig) -> bool:
  return optimizer.opt_type == "adamw"


def _coupling(asked: Asked) -> str:
  """The run's own if it has one; else what fits the optimizer."""
  own = asked.config.optimizer.learning_rate_batch_coupling
  if own != "auto":
    return own
  return "linear" if asked.config.optimizer.opt_type == "sgd" else "sqrt"


def _by_rules(asked: Asked, here: float) -> list[RateSaid]:
  return [_of_rule(rule, asked, here) for rule in rate_rules()]


def _of_rule(rule: RateRule, asked: Asked, here: float) -> RateSaid:
  """A rule's rate, carried from its own batch to the run's."""
  rate, at = rule.learning_rate(asked.training), rule.batch_tokens(asked.training)
  return RateSaid(rule.name, rule.title, rate, at, SQUARE_ROOT.scaled(rate, here / at, 1.0))


def _carried(rate: float, at: float, here: float, critical_tokens: float) -> list[RateSaid]:
  """A rate found at another batch, by every rule that carries one."""
  return [
    RateSaid(rule.name, rule.title, rate, at, rule.scaled(rate, here / at, at / critical_tokens))
    for rule in scaling_rules("learning_rate")
  ]


def _rounded(value: float) -> float:
  """Two digits, which is more than is known."""
  return float(f"{value:.2g}")
