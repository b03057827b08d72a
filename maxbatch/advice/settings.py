"""What follows the batch: learning rate, β2 and weight decay, each with the rule that says so."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from maxbatch.advice.asked import Asked
from maxbatch.batch.learning_rate import COUPLINGS
from maxbatch.batch_rules.published import (
  SECOND_MOMENT,
  SQUARE_ROOT,
  SURGE,
  WEIGHT_DECAY,
  half_life_tokens,
  rate_rules,
  scaling_rules,
)
from maxbatch.batch_rules.rule import ScalingRule

_RULED = "adamw"
"""The opt_type that the rules speak of."""
_ROOT_UNTIL = 0.25
"""Share of the critical batch above which a rate by the square root was too large where we measured
it (docs/advice_check.md), as Li et al. (2024) say."""
_LARGEST_B2 = 0.999999
"""That the configuration takes."""


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
  beyond: float
  """The factor by which the training is outside of what was fitted; 1 inside."""


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


def settings(asked: Asked, phases: Sequence[float], critical_tokens: float) -> Settings:
  """Returns the settings at the last of the phases, and what they would be at each.

  Args:
    phases: tokens of a step in each phase.
    critical_tokens: the critical batch that is reckoned with.
  """
  here = phases[-1]
  rate, why, said = _rate(asked, here, critical_tokens)
  b2, coupling = _second_moment(asked, here), _coupling(asked)
  of_phases = [_at(asked, tokens, here, rate, b2, coupling) for tokens in phases]
  advised: dict[str, object] = {"learning_rate": rate}
  if len(phases) > 1:
    advised["learning_rate_batch_coupling"] = coupling
  if asked.wishes.rate_found_at:
    advised["adam_b2"] = b2
  if not _keeps_decay(asked):
    advised["adam_weight_decay"] = of_phases[-1].adam_weight_decay
  return Settings(
    opt_type=asked.config.optimizer.opt_type,
    learning_rate=rate,
    why=why,
    said=said,
    b2_half_life_tokens=half_life_tokens(b2, here) if 0 < b2 < 1 else 0.0,
    phases=of_phases,
    coupling=coupling,
    advised=advised,
  )


def _rate(
  asked: Asked, here: float, critical_tokens: float
) -> tuple[float, str, Sequence[RateSaid]]:
  """Returns the rate at a batch, why, and what the rules say."""
  optimizer, found_at = asked.config.optimizer, float(asked.wishes.rate_found_at)
  own = optimizer.learning_rate
  if found_at:
    said = _carried(asked, found_at, here, critical_tokens)
    rule = _scaling(here, critical_tokens)
    rate = next(one.carried for one in said if one.name == rule.name)
    return _rounded(rate, 3), f"yours, carried here by {rule.name}: {rule.formula}", said
  if optimizer.opt_type != _RULED:
    return own, f"yours: no rule here speaks of opt_type={optimizer.opt_type}", []
  scaling, said = _scaling(here, critical_tokens), []
  for rule in rate_rules():
    # Carried from its own batch to the run's.
    rate, at = rule.learning_rate(asked.training), rule.batch_tokens(asked.training)
    carried = scaling.scaled(rate, here / at, at / critical_tokens)
    beyond = rule.beyond(asked.training)
    said.append(RateSaid(rule.name, rule.title, rate, at, carried, beyond))
  if "learning_rate" in asked.given:
    return own, "yours, as it is: rate_found_at=TOKENS would carry it over", said
  mean = math.exp(statistics.fmean(math.log(one.carried) for one in said))
  why = f"the mean of what {len(said)} rules say, each carried here by {scaling.name}"
  return _rounded(mean), why, said


def _second_moment(asked: Asked, here: float) -> float:
  """Returns adam_b2 at a batch: the run's own, with its half-life in tokens where its batch is
  known."""
  own, found_at = asked.config.optimizer.adam_b2, float(asked.wishes.rate_found_at)
  if not found_at:
    return own
  return min(round(SECOND_MOMENT.scaled(own, here / found_at, 1.0), 6), _LARGEST_B2)


def _at(
  asked: Asked, tokens: float, here: float, rate: float, b2: float, coupling: str
) -> PhaseSettings:
  """Returns the settings at the batch of a phase."""
  of_phase = rate * (tokens / here) ** COUPLINGS[coupling]
  decay = asked.config.optimizer.adam_weight_decay
  if not _keeps_decay(asked):
    decay = _rounded(WEIGHT_DECAY.weight_decay(asked.training, tokens, of_phase))
  return PhaseSettings(tokens, of_phase, SECOND_MOMENT.scaled(b2, tokens / here, 1.0), decay)


def _keeps_decay(asked: Asked) -> bool:
  """Returns whether the weight decay is left alone: it was set by hand, or no rule speaks of it."""
  optimizer = asked.config.optimizer
  has_rate = optimizer.learning_rate > 0 or "learning_rate" not in asked.given
  return "adam_weight_decay" in asked.given or optimizer.opt_type != _RULED or not has_rate


def _coupling(asked: Asked) -> str:
  """Returns the run's own if it has one; else what fits the optimizer."""
  own = asked.config.optimizer.learning_rate_batch_coupling
  if own != "auto":
    return own
  return "linear" if asked.config.optimizer.opt_type == "sgd" else "sqrt"


def _scaling(here: float, critical_tokens: float) -> ScalingRule:
  """Returns the rule that carries a rate: the square root well below the critical batch, else one
  that bends."""
  return SQUARE_ROOT if here <= _ROOT_UNTIL * critical_tokens else SURGE


def _carried(asked: Asked, at: float, here: float, critical_tokens: float) -> list[RateSaid]:
  """Returns a rate found at another batch, by every rule that carries one."""
  rate, share = asked.config.optimizer.learning_rate, at / critical_tokens
  results = []
  for rule in scaling_rules("learning_rate"):
    carried, beyond = rule.scaled(rate, here / at, share), rule.beyond(asked.training)
    results.append(RateSaid(rule.name, rule.title, rate, at, carried, beyond))
  return results


def _rounded(value: float, digits: int = 2) -> float:
  """Rounds to two digits, which is more than is known."""
  return float(f"{value:.{digits}g}")
