"""The microbatch sizes that a run of reinforcement learning may choose from; needs no jax."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

from maxbatch.batch.rl_plan import RLPlan, in_samples, plan_rl
from maxbatch.batch.rl_sizes import halving_micro_batch_sizes, micro_batch_sizes
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import pipeline_of, with_least_bubble
from maxbatch.tuning.candidates import (
  LEAST_TOKENS,
  Candidate,
  asked,
  in_range,
  with_batch,
  with_powers_of_two,
  with_size,
)


@dataclasses.dataclass(frozen=True)
class RLCandidate(Candidate):
  """A size where a sample is a completion: micro_batch_size counts those of all devices."""

  num_generations: int = 1

  unit: ClassVar[str] = "completions"
  unit_of_microbatch: ClassVar[str] = "completions per microbatch"

  @property
  def size(self) -> Fraction:
    """Completions of one microbatch."""
    return Fraction(self.micro_batch)

  @property
  def batch_size(self) -> int:
    """Prompts of a step."""
    return self.batch // self.num_generations

  @property
  def words(self) -> str:
    """The size with its unit."""
    return counted(self.micro_batch, "completion")


def rl_sizes_of(config: Config, training: Topology) -> tuple[RLCandidate, ...]:
  """Returns the sizes that a run of reinforcement learning can have, ascending: whole groups.

  They divide the step; explore tries powers of two besides, each with the step nearest to the one that is
  given.

  Args:
    config: counts prompts; micro_batch_size is auto or explore.
    training: the devices that train.

  Raises:
    UserError: other keys contradict each other, or no size lies in the range.
  """
  whole = plan_rl(config, training)
  least = Fraction(LEAST_TOKENS * training.num_devices, config.batch.max_target_length)
  divisors = map(Fraction, micro_batch_sizes(whole.completions_per_step, whole.topology))
  sizes = with_powers_of_two(config.batch, [*divisors], Fraction(whole.topology.unit), least)
  tried = (_planned(config, training, whole, int(size)) for size in sizes)
  plans = [plan for plan in tried if plan]
  if not plans:
    raise UserError(
      f"gns_from_microbatches=true: with no size of {asked(config.batch)} can a step of "
      f"{whole.completions_per_step:,} completions be halved and compared; for example "
      "gns_from_microbatches=false"
    )
  plans = _divided(config, plans)
  allowed = [
    RLCandidate(
      per_device=plan.batch_plan.per_device(plan.micro_batch),
      num_microbatches=plan.num_microbatches,
      micro_batch=plan.micro_batch,
      batch=plan.completions_per_step,
      max_target_length=plan.batch_plan.max_target_length,
      batch_is_near=plan.completions_per_step != whole.completions_per_step,
      num_generations=plan.num_generations,
    )
    for plan in plans
  ]
  return in_range(config.batch.micro_batch_size, allowed)


def _divided(config: Config, plans: Sequence[RLPlan]) -> list[RLPlan]:
  """Returns the plans whose microbatches the pipeline, if there is one, can divide."""
  result, problem = [], None
  for plan in plans:
    try:
      with_settled_pipeline(in_samples(config, plan), plan)
    except UserError as error:
      problem = problem or error
    else:
      result.append(plan)
  if problem and not result:
    raise UserError(f"{asked(config.batch)}: no size works; the smallest: {problem}")
  return result


def with_settled_pipeline(config: Config, plan: RLPlan) -> tuple[Config, list[str]]:
  """Returns a configuration that counts completions with its schedule and num_pipeline_microbatches, and a line
  for each that was open.

  Raises:
    UserError: the pipeline cannot divide the layers, or a microbatch.
  """
  if config.pipeline.pipeline_schedule == "none":
    return config, []
  pipeline = pipeline_of(config, plan.topology.training, plan.batch_plan)
  config, count = (
    with_least_bubble(config, plan.topology.training),
    pipeline.num_pipeline_microbatches,
  )
  keys = dataclasses.replace(
    config.pipeline, num_pipeline_microbatches=count, pipeline_saved_activations=pipeline.stash
  )
  settled = dataclasses.replace(config, pipeline=keys)
  repeats = f"{pipeline.schedule} num_pipeline_repeats={pipeline.repeats}, the smallest bubble"
  taken = {
    "pipeline_schedule=auto": repeats if len(pipeline.repeats_choices) > 1 else "",
    "pipeline_saved_activations=auto": "input, the least memory" if pipeline.stash_is_open else "",
    "num_pipeline_microbatches=-1": f"{count}, the fewest of {', '.join(map(str, pipeline.choices))}"
    if pipeline.is_open
    else "",
  }
  untimed = "reinforcement learning does not time the others"
  return settled, [f"{key}: {one}; {untimed}" for key, one in taken.items() if one]


def _planned(config: Config, training: Topology, whole: RLPlan, size: int) -> RLPlan | None:
  """Returns the plan of the step nearest to the whole one that a microbatch divides; None: such a run
  cannot be, or its noise scale not be measured."""
  given = whole.completions_per_step
  near = max(1, round(Fraction(given, size))) * size
  measured = config.noise.gns_from_microbatches
  if measured and size not in halving_micro_batch_sizes(near, whole.topology):
    return None
  batch = with_size(config.batch, Fraction(size))
  if near == given:
    return plan_rl(dataclasses.replace(config, batch=batch), training)
  batch = with_batch(batch, near // whole.num_generations)
  try:
    return plan_rl(dataclasses.replace(config, batch=batch), training)
  except UserError:
    return None  # Prompts or budget do not divide into such steps.
