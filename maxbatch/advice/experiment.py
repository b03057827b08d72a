"""The cheapest experiment that would narrow the interval most, as commands with their price.

Branches from a checkpoint of the run itself, as Merrill et al. (2025) train them, find the batch that
loses nothing at that moment to about a factor of 1.5; the run goes on from the same checkpoint, so that
only the branches cost. What they find is carried to the length of the run by the rules' growth with
the data, about which they disagree, the more the earlier the checkpoint is.

The noise scale costs next to nothing while a run trains, and can be too low by orders of magnitude
(Merrill et al. 2025): branches are advised although it is known.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from maxbatch.advice.asked import Asked
from maxbatch.advice.batch_size import BatchSize, Measured, growth_to
from maxbatch.advice.slices import Point
from maxbatch.batch_rules.published import batch_rules, expected_loss
from maxbatch.batch_rules.rule import Training, at_overhead

_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Factors of the batch that is worth using where the branches begin."""
_BRANCH_STEPS = 40
"""Steps of the largest branch: the default of maxbatch critical_batch."""
_SHARES = (0.005, 0.02, 0.1)
"""Shares of the run's tokens at which branches may begin."""
_WORTH = 1.05
"""An experiment that narrows the interval by less is none."""
_ONE_HOST_CHIPS = 8


@dataclasses.dataclass(frozen=True)
class Running:
  """The run that is advised, as far as branches follow it."""

  samples: int
  """Samples of a step, at the end."""
  unit: int
  """Samples of which every batch is a multiple."""
  learning_rate: float
  """At that batch."""


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What to do next."""

  at_tokens: float
  """Where in a run the branches begin."""
  batches: Sequence[int]
  """Batches of the branches, in samples of a step."""
  is_own_run: bool
  """Whether that is the run itself, which goes on afterwards."""
  commands: Sequence[str]
  tokens: float
  """Total over all branches."""
  chip_hours: float
  """Chip hours of the branches, on the place that was asked about; 0: none is known."""
  cost: float
  spread_now: float
  """The factor between the ends of the interval."""
  spread_after: float

  @property
  def is_worth_it(self) -> bool:
    """Whether it narrows the interval."""
    return self.spread_now > _WORTH * self.spread_after

  def as_dict(self) -> dict[str, object]:
    """Returns plain values for --json."""
    return {**dataclasses.asdict(self), "is_worth_it": self.is_worth_it}


def next_experiment(
  asked: Asked, size: BatchSize, measured: Sequence[Measured], run: Running, here: Point | None
) -> Experiment:
  """Returns the one with the most narrowing for its tokens; the latest where none is worth it."""
  known = [(one.at_tokens, one.where) for one in measured if one.kind == "noise scale"]
  places = [*known, *((share * asked.tokens, "") for share in _SHARES)]
  results = [_branches(asked, size, *at, run, here) for at in places]
  worth = [one for one in results if one.is_worth_it]
  if not worth:
    return min(results, key=lambda one: one.spread_after)
  return max(worth, key=lambda one: math.log(one.spread_now / one.spread_after) / one.tokens)


def _branches(
  asked: Asked, size: BatchSize, at: float, folder: str, run: Running, here: Point | None
) -> Experiment:
  """Plans branches around the batch that is worth using at `at` tokens, as far as the devices
  divide it."""
  worth = size.tokens / growth_to(asked.tokens, at) / asked.length
  batches = sorted({max(1, round(factor * worth / run.unit)) * run.unit for factor in _FACTORS})
  if len(batches) < 2:
    batches = [run.unit, 2 * run.unit]
  tokens = len(batches) * _branch_tokens(asked, batches)
  hours = tokens / here.tokens * here.chip_hours if here else 0.0
  own = f"{asked.config.run.base_output_directory}/{asked.config.run.run_name}"
  bracket = max(after / before for before, after in itertools.pairwise(batches))
  return Experiment(
    at_tokens=at,
    batches=batches,
    is_own_run=not folder,
    commands=_commands(asked, folder or own, at, batches, run),
    tokens=tokens,
    chip_hours=hours,
    cost=hours * asked.price(asked.place).price if asked.place else 0.0,
    spread_now=size.spread,
    spread_after=bracket * _carried_spread(asked.training, at),
  )


def _branch_tokens(asked: Asked, batches: Sequence[int]) -> int:
  """Returns the tokens of each branch: steps of the largest."""
  return _BRANCH_STEPS * batches[-1] * asked.length


def _commands(
  asked: Asked, folder: str, at: float, batches: Sequence[int], run: Running
) -> tuple[str, ...]:
  """Returns the commands: one process can branch by itself; on more hosts each branch is a run from
  the same checkpoint."""
  if asked.place is None or asked.place.chips <= _ONE_HOST_CHIPS:
    return (f"maxbatch critical_batch checkpoint={folder} factors=1/2,3/4,1,3/2,2",)
  unit = run.unit * asked.length
  end = round(at / unit) * unit + _branch_tokens(asked, batches)
  rate = run.learning_rate * (batches[-1] / run.samples) ** 0.5
  return (
    f"maxbatch train config=advice.yml run_name=branch-{batches[-1]} "
    f"load_full_state_path={folder} batch_schedule=[] batch_size={batches[-1]} "
    f"learning_rate={rate:.2g} learning_rate_batch_coupling=none lr_schedule_type=constant "
    f"warmup_steps=0 total_tokens={end}",
  )


def _carried_spread(training: Training, at: float) -> float:
  """Returns how far the rules disagree about the growth of the critical batch from `at` to the
  end."""
  size = training.parameters
  later_fall = expected_loss(size, at) - expected_loss(size, training.tokens)
  then = dataclasses.replace(training, tokens=at, loss=training.loss + later_fall)
  growths = []
  for rule in batch_rules():
    now, before = at_overhead(rule, training, 1.0), at_overhead(rule, then, 1.0)
    if now is not None and before is not None and not rule.only:
      growths.append(now / before)
  return max(growths) / min(growths)
