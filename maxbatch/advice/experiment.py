"""The cheapest experiment that would narrow the interval most, as commands with their price.

Branches from a checkpoint of the run itself, as Merrill et al. (2025) train them, find the batch that
loses nothing at that moment to about a factor of 1.5; the run goes on from the same checkpoint, so that
only the branches cost. What they find is carried to the length of the run by the rules' growth with
the data, about which they disagree, the more the earlier the checkpoint is.

The noise scale costs next to nothing while a run trains, and can be too low by orders of magnitude
(Merrill et al. 2025): branches are advised although it is known.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from maxbatch.advice.asked import Asked
from maxbatch.advice.batch_size import BatchSize
from maxbatch.advice.measured import Measured, growth_to
from maxbatch.advice.slices import Point
from maxbatch.batch.arithmetic import tokens_of
from maxbatch.batch_rules.chinchilla import expected_loss
from maxbatch.batch_rules.registry import batch_rules
from maxbatch.batch_rules.rule import Training
from maxbatch.batch_rules.tradeoff import at_overhead

_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
_BRACKET = 1.5
"""Between neighbours of these, about."""
_BRANCH_STEPS = 40
"""Of the largest branch: the default of python -m maxbatch.critical_batch."""
_SHARES = (0.005, 0.02, 0.1)
"""Of the run's tokens, where branches may begin."""
_WORTH = 1.05
"""An experiment that narrows the interval by less is none."""
_ONE_HOST_CHIPS = 8


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What to do next."""

  at_tokens: float
  """Where in a run the branches begin."""
  is_own_run: bool
  """Whether that is the run itself, which goes on afterwards."""
  commands: Sequence[str]
  tokens: float
  """Of all branches."""
  chip_hours: float
  """Of the branches, on the place of the question; 0: none is known."""
  cost: float
  spread_now: float
  """The factor between the ends of the interval."""
  spread_after: float

  @property
  def is_worth_it(self) -> bool:
    """Whether it narrows the interval."""
    return self.spread_now > _WORTH * self.spread_after

  def as_dict(self) -> dict[str, object]:
    """For --json."""
    return {**dataclasses.asdict(self), "is_worth_it": self.is_worth_it}


def next_experiment(
  asked: Asked, size: BatchSize, measured: Sequence[Measured], samples: int, here: Point | None
) -> Experiment:
  """The one with the most narrowing for its tokens; the latest where none is worth it."""
  found = list(_candidates(asked, size, measured, samples, here))
  worth = [one for one in found if one.is_worth_it]
  if not worth:
    return min(found, key=lambda one: one.spread_after)
  return max(worth, key=lambda one: math.log(one.spread_now / one.spread_after) / one.tokens)


def _candidates(
  asked: Asked, size: BatchSize, measured: Sequence[Measured], samples: int, here: Point | None
) -> Iterator[Experiment]:
  known = [one for one in measured if one.kind == "noise scale"]
  for one in known:
    yield _branches(asked, size, one.at_tokens, one.where, samples, here)
  for share in _SHARES:
    yield _branches(asked, size, share * asked.tokens, "", samples, here)


def _branches(
  asked: Asked, size: BatchSize, at: float, run: str, samples: int, here: Point | None
) -> Experiment:
  """Branches around the batch that is worth using at `at` tokens."""
  worth = size.tokens / growth_to(asked.tokens, at)
  tokens = len(_FACTORS) * max(_FACTORS) * _BRANCH_STEPS * worth
  hours = tokens / here.tokens * here.chip_hours if here else 0.0
  folder = run or f"{asked.config.run.base_output_directory}/{asked.config.run.run_name}"
  return Experiment(
    at_tokens=at,
    is_own_run=not run,
    commands=_commands(asked, folder, at, worth, samples),
    tokens=tokens,
    chip_hours=hours,
    cost=hours * asked.wishes.price_per_chip_hour,
    spread_now=size.spread,
    spread_after=_BRACKET * _carried_spread(asked.training, at),
  )


def _commands(asked: Asked, folder: str, at: float, worth: float, samples: int) -> tuple[str, ...]:
  """One process can branch by itself; on more hosts each branch is a run from the same checkpoint."""
  factor = worth / tokens_of(samples, asked.length)
  if asked.place is None or asked.place.chips <= _ONE_HOST_CHIPS:
    return (f"python -m maxbatch.critical_batch checkpoint={folder} factors=1/2,3/4,1,3/2,2",)
  end = at + max(_FACTORS) * _BRANCH_STEPS * worth
  return (
    f"python -m maxbatch.train config=advice.yml run_name=branch-x2 load_full_state_path={folder} "
    f"batch_schedule=[] batch_size={max(round(2 * factor * samples), 1)} "
    f"lr_schedule_type=constant warmup_steps=0 total_tokens={end:.0f}",
  )


def _carried_spread(training: Training, at: float) -> float:
  """How far the rules disagree about the growth of the critical batch from `at` to the end."""
  then = dataclasses.replace(training, tokens=at, loss=training.loss + _later_fall(training, at))
  growths = []
  for rule in batch_rules():
    now, before = at_overhead(rule, training, 1.0), at_overhead(rule, then, 1.0)
    if now is not None and before is not None and not rule.only:
      growths.append(now / before)
  return max(growths) / min(growths)


def _later_fall(training: Training, at: float) -> float:
  """By how much the loss still falls."""
  size = training.parameters
  return expected_loss(size, at) - expected_loss(size, training.tokens)
