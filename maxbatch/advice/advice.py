"""All of the advice: the question, the batch, its ramp and settings, what runs where, what it costs."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from maxbatch.advice.asked import MESH_KEYS, Asked
from maxbatch.advice.batch_size import BatchSize, Measured, joined
from maxbatch.advice.experiment import Experiment, Running, next_experiment
from maxbatch.advice.prices import step_cost
from maxbatch.advice.ramp import RampPhase, dividing, overhead, ramp, round_batch, whole_steps
from maxbatch.advice.settings import Settings, settings
from maxbatch.advice.slices import (
  Curve,
  Goal,
  Point,
  curves,
  elsewhere,
  nearest,
  point,
  split_of,
)
from maxbatch.advice.words import DAY
from maxbatch.batch_rules.findings import FINDINGS
from maxbatch.batch_rules.rule import data_factor, data_overhead_of
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.estimate.best_split import BatchSplit, choosable
from maxbatch.estimate.step_roofline import StepRoofline

_NEAR = 1.25
"""So near another batch is as good as the one that the rules say: they agree no better."""
_SAME = ("global_batch_to_train", "tokens_per_step")
"""Other keys of what batch_size is."""
_FREE_SECONDS = 1.03
"""A microbatch that divides every phase may make the step so much slower: it saves a compilation."""


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The batch as it is divided, and its ramp."""

  samples: int
  """Samples of a step, at the end."""
  phases: Sequence[RampPhase]
  micro_batch: int
  """Samples of a microbatch on all devices; 0: no place is known that would say."""
  split: BatchSplit | None


@dataclasses.dataclass(frozen=True)
class Advice:
  """The answer."""

  asked: Asked
  size: BatchSize
  sizes: Sizes
  settings: Settings
  keys: Mapping[str, object]
  """All keys that are advised."""
  goal: Goal
  ramp_overhead: float
  """The data overhead of the run with its ramp."""
  curves: Sequence[Curve]
  """On half the chips, these, and twice as many."""
  here: Point | None
  """The batch held constant, on the place that was asked about."""
  elsewhere: Sequence[Point]
  """That batch on the other places that were asked about, to the same loss."""
  neighbours: Sequence[Point]
  """The next smaller and larger batch that divide as well, likewise."""
  experiment: Experiment

  @property
  def batch_tokens(self) -> int:
    """Tokens of a step, at the end."""
    return self.sizes.samples * self.asked.length

  @property
  def constant_overhead(self) -> float:
    """The data overhead of the batch without its ramp."""
    return data_overhead_of(self.batch_tokens, self.goal.critical_tokens)


def advise(asked: Asked, measured: Sequence[Measured]) -> Advice:
  """Answers the question.

  Raises:
    UserError: the model does not fit on the place.
  """
  size = joined(asked.training, asked.wishes.data_overhead, measured)
  sizes = _sizes(asked, size)
  batch_tokens = sizes.samples * asked.length
  phases = [phase.samples * asked.length for phase in sizes.phases]
  advised = settings(asked, phases, size.critical_tokens)
  ramped = overhead(sizes.phases, asked.length, asked.tokens, size.critical_tokens)
  # What is trained on with this batch is what was asked for.
  constant = data_factor(data_overhead_of(batch_tokens, size.critical_tokens))
  goal = Goal(asked.tokens / constant, size.critical_tokens)
  result = curves(asked, goal, sizes.samples) if asked.place else []
  here = point(asked, goal, asked.place, sizes.samples) if asked.place else None
  unit = sizes.micro_batch or asked.batch_unit
  running = Running(sizes.samples, unit, advised.learning_rate)
  return Advice(
    asked=asked,
    size=size,
    sizes=sizes,
    settings=advised,
    keys=_keys(asked, sizes, advised),
    goal=goal,
    ramp_overhead=ramped,
    curves=result,
    here=here,
    elsewhere=elsewhere(asked, goal, sizes.samples),
    neighbours=_neighbours(asked, goal, sizes),
    experiment=next_experiment(asked, size, measured, running, here),
  )


def _sizes(asked: Asked, size: BatchSize) -> Sizes:
  """Returns the batch in samples that the place divides, with its ramp and its split."""
  exact = float(asked.own_batch or size.tokens / asked.length)
  wanted = max(1, round(exact)) if asked.own_batch else round_batch(exact)
  if asked.place is None:
    samples = dividing(wanted, asked.batch_unit)
    return Sizes(samples, _phases(asked, size, samples, asked.batch_unit), 0, None)
  samples = nearest(asked.work, asked.place, wanted, asked.stages)
  if not asked.own_batch:
    samples = _faster(asked, size, samples)
  split = split_of(asked.work, asked.place, samples, asked.stages)
  unit = _micro_batch(split)
  # Of a pipeline a phase has whole microbatches.
  groups = unit if split.stages else split.mesh.num_batch_groups
  phases = _phases(asked, size, samples, min(unit, groups))
  common = math.gcd(*(phase.samples for phase in phases))
  if common % unit:
    # A microbatch that divides every phase needs one program alone.
    shared = split_of(asked.work, asked.place, common, asked.stages)
    again = _with_microbatch(asked, shared, samples)
    if again.step.step_seconds <= _FREE_SECONDS * split.step.step_seconds:
      split = again
  return Sizes(samples, phases, _micro_batch(split), split)


def _phases(asked: Asked, size: BatchSize, samples: int, unit: int) -> list[RampPhase]:
  if not asked.wishes.ramp or samples % unit:
    return [RampPhase(0.0, samples)]
  # A batch of one's own has an overhead of its own, which its ramp keeps to.
  share = 1.0 if asked.own_batch else samples * asked.length / size.tokens
  return ramp(samples, unit, asked.tokens, share)


def _micro_batch(split: BatchSplit) -> int:
  return split.batch // split.num_microbatches


def _with_microbatch(asked: Asked, split: BatchSplit, samples: int) -> BatchSplit:
  """Returns the same microbatch, for another batch."""
  assert asked.place is not None
  count = samples // _micro_batch(split)
  return dataclasses.replace(
    split,
    batch=samples,
    num_microbatches=count,
    step=_step(asked, split, split.per_device, count),
  )


def _step(
  asked: Asked, split: BatchSplit, per_device: Fraction, num_microbatches: int
) -> StepRoofline:
  assert asked.place is not None
  return choosable(
    asked.work,
    asked.place.chip,
    split.mesh,
    per_device,
    num_microbatches,
    split.remat,
    split.stages,
  )


def _faster(asked: Asked, size: BatchSize, samples: int) -> int:
  """Returns a batch of whole samples on every device instead, if one near is sooner at the same
  loss."""
  assert asked.place
  # The multiple of the place's devices next to what the rules say; 0 below half of them.
  devices = asked.place.slices * asked.place.devices_per_slice
  whole = round((size.tokens / asked.length) / devices) * devices
  if not whole or max(whole / samples, samples / whole) > _NEAR:
    return samples
  goal = Goal(asked.tokens, size.critical_tokens)
  results = {}
  for each in (samples, whole):
    with contextlib.suppress(UserError):
      results[each] = point(asked, goal, asked.place, each).seconds
  return min(results, key=lambda each: results[each], default=samples)


def _neighbours(asked: Asked, goal: Goal, sizes: Sizes) -> list[Point]:
  """Returns the batches about a quarter below and above, as they divide, with their price."""
  if asked.place is None:
    return []
  # About a quarter of the batch, in whole samples of each device, or else in whole microbatches.
  devices = asked.place.slices * asked.place.devices_per_slice
  unit = devices if devices <= sizes.samples else sizes.micro_batch
  apart = max(1, round(sizes.samples / unit / 4)) * unit
  below, above = (sizes.samples - 1) // apart * apart, (sizes.samples // apart + 1) * apart
  results = list[Point]()
  for each in (below or sizes.samples // 2, above):
    # A smaller one may divide no more, a larger one leave no memory.
    with contextlib.suppress(UserError):
      results += [point(asked, goal, asked.place, each)] if each else []
  return results


def _keys(asked: Asked, sizes: Sizes, advised: Settings) -> dict[str, object]:
  """Returns what to set, in the order of base.yml."""
  run, length = asked.config.run, asked.length
  phases = [(round(phase.at_tokens / length), phase.samples) for phase in sizes.phases]
  total_samples = whole_steps(phases, asked.tokens / length)
  keys: dict[str, object] = {
    "steps": -1,
    "total_samples": -1,
    "total_tokens": total_samples * length,
  }
  if run.schedule_unit == "steps":
    keys |= _in_samples(asked, sizes.samples)
  keys |= {key: -1 for key in _SAME if key in asked.given}
  keys["batch_size"] = sizes.samples
  if sizes.split:
    split = sizes.split.keys
    # Axes that were asked for and that the split does not have.
    keys |= {key: 1 for key in MESH_KEYS if key in asked.given and key not in split}
    keys |= {key: int(split[key]) if split[key].isdecimal() else split[key] for key in split}
  if len(sizes.phases) > 1:
    keys["batch_schedule"] = [list(phase) for phase in phases]
    keys["batch_schedule_unit"] = "samples"
  return keys | advised.advised


def _in_samples(asked: Asked, samples: int) -> dict[str, object]:
  """Returns intervals in steps as samples, since steps of a ramp differ in size."""
  config = asked.config
  own = {
    "eval_interval": config.run.eval_interval,
    "checkpoint_period": config.checkpoint.checkpoint_period,
    "warmup_steps": config.optimizer.warmup_steps,
    "learning_rate_schedule_steps": config.optimizer.learning_rate_schedule_steps,
  }
  counted = {key: steps * samples for key, steps in own.items() if steps > 0}
  return {"schedule_unit": "samples", **counted}


@dataclasses.dataclass(frozen=True)
class Planned:
  """The advised configuration as any run is planned, with its times."""

  plan: BatchPlan
  step_seconds: Sequence[float]
  """In each phase; empty: no place is known."""

  @property
  def seconds(self) -> float:
    """Seconds of all steps."""
    timed = zip(self.plan.phases, self.step_seconds, strict=False)
    return sum(phase.num_steps * seconds for phase, seconds in timed)

  def tokens_per_second(self) -> float:
    """Returns the speed over the whole run."""
    return self.plan.total_tokens / self.seconds


def timed(advice: Advice, plan: BatchPlan) -> Planned:
  """Returns the times of the phases that the plan has, with the split of the advice."""
  split = advice.sizes.split
  if split is None:
    return Planned(plan, [])
  sizes = [(plan.per_device(one.micro_batch), one.num_microbatches) for one in plan.phases]
  return Planned(plan, [_step(advice.asked, split, *size).step_seconds for size in sizes])


def layout(advice: Advice) -> Topology:
  """Returns the mesh of the advised run."""
  return advice.sizes.split.mesh if advice.sizes.split else advice.asked.mesh


def mixture_of(advice: Advice) -> dict[str, Any] | None:
  """Returns the parameters of a mixture of experts, and what an expert sees of a step when the ramp begins
  and at the end; None: the model is none."""
  asked, model = advice.asked, advice.asked.config.model
  if model.num_experts == 1:
    return None
  of_expert = asked.length * model.num_experts_per_tok / model.num_experts
  ends = advice.sizes.phases[0].samples, advice.sizes.samples
  return {
    "parameters": asked.work.parameters,
    "active_parameters": asked.training.parameters,
    "tokens_per_expert": [samples * of_expert for samples in ends],
  }


def as_dict(advice: Advice, planned: Planned) -> dict[str, Any]:
  """Returns plain values for --json: numbers are numbers; null where not known."""
  asked, size = advice.asked, advice.size
  seconds = planned.seconds if planned.step_seconds else None
  chips = asked.place.chips if asked.place else 0
  hours = chips * seconds / 3600 if seconds else None
  price = asked.price(asked.place) if asked.place else None
  known = asked.place.chip.eight_bits if asked.place else {}
  each = (
    step_cost(price, chips, advice.here.split.step.step_seconds) if price and advice.here else None
  )
  return {
    "asked": {
      "model_name": asked.config.model.model_name,
      "parameters": asked.training.parameters,
      "tokens": asked.tokens,
      "expected_loss": asked.training.loss,
      "quantization": asked.work.quantization,
      **dataclasses.asdict(asked.wishes),
      "slices": str(asked.place) if asked.place else None,
      "chips": chips or None,
    },
    "keys": dict(advice.keys),
    "batch": {
      "samples": advice.sizes.samples,
      "tokens": advice.batch_tokens,
      "interval_tokens": [size.low, size.high],
      "by_rules_tokens": size.by_rules,
      "wanted_tokens": size.tokens,
      "critical_tokens": size.critical_tokens,
      "data_overhead": advice.constant_overhead,
      "data_overhead_with_ramp": advice.ramp_overhead,
    },
    "rules": [one.as_dict() for one in size.said],
    "measured": [one.as_dict() for one in size.measured],
    "findings": [
      {"rule": one.name, "says": one.says, "misfit": one.misfit(asked.setting)} for one in FINDINGS
    ],
    "phases": [
      {
        "first_sample": phase.first.samples,
        "samples_per_step": phase.batch,
        "steps": phase.num_steps,
      }
      for phase in planned.plan.phases
    ],
    "settings": dataclasses.asdict(advice.settings),
    "mixture": mixture_of(advice),
    "run": {
      "steps": planned.plan.steps,
      "tokens": planned.plan.total_tokens,
      "days": seconds / DAY if seconds else None,
      "chip_hours": hours,
      "cost": hours * price.price if hours and price and price.price else None,
      "price": dataclasses.asdict(price) if price and price.price else None,
      "step_cost": (each and each.cost) or None,
      "step_joules": (each and each.joules) or None,
      "tokens_per_second": planned.tokens_per_second() if seconds else None,
      "utilisation": advice.here.split.step.utilisation if advice.here else None,
      "limited_by": advice.here.split.step.limited_by if advice.here else None,
      "how": advice.here.split.step.how if advice.here else None,
      "eight_bit_product": known.get(asked.work.quantization),
    },
    "elsewhere": [
      {**one.as_dict(), "price": dataclasses.asdict(asked.price(one.place))}
      for one in advice.elsewhere
    ],
    "neighbours": [one.as_dict() for one in advice.neighbours],
    "frontier": [one.as_dict() for curve in advice.curves for one in curve.points],
    "next_experiment": advice.experiment.as_dict(),
  }
