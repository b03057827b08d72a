"""The microbatch sizes that a run of reinforcement learning may choose from; needs no jax."""

import dataclasses
from fractions import Fraction
from typing import ClassVar

from maxbatch.batch.rl_plan import plan_rl
from maxbatch.batch.rl_sizes import halving_micro_batch_sizes, micro_batch_sizes
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.tuning.candidates import Candidate, asked, in_range, with_size


@dataclasses.dataclass(frozen=True)
class RLCandidate(Candidate):
  """A size where a sample is a completion: micro_batch_size counts those of all devices."""

  unit: ClassVar[str] = "completions"
  unit_of_microbatch: ClassVar[str] = "completions per microbatch"

  @property
  def size(self) -> Fraction:
    """Completions of one microbatch."""
    return Fraction(self.micro_batch)

  @property
  def words(self) -> str:
    """The size with its unit."""
    return counted(self.micro_batch, "completion")


def rl_sizes_of(config: Config, training: Topology) -> tuple[RLCandidate, ...]:
  """Returns the sizes that a run of reinforcement learning can have, ascending: whole groups.

  Args:
    config: counts prompts; micro_batch_size is auto or explore.
    training: the devices that train.

  Raises:
    UserError: other keys contradict each other, or no size lies in the range.
  """
  whole, noise = plan_rl(config, training), config.noise.gns_from_microbatches
  sizes_of_step = halving_micro_batch_sizes if noise else micro_batch_sizes
  plans = [
    plan_rl(dataclasses.replace(config, batch=with_size(config.batch, Fraction(size))), training)
    for size in sizes_of_step(whole.completions_per_step, whole.topology)
  ]
  if not plans:
    raise UserError(
      f"gns_from_microbatches=true: with no size of {asked(config.batch)} can a step of "
      f"{whole.completions_per_step:,} completions be halved and compared; for example "
      "gns_from_microbatches=false"
    )
  allowed = [
    RLCandidate(
      per_device=plan.batch_plan.per_device(plan.micro_batch),
      num_microbatches=plan.num_microbatches,
      micro_batch=plan.micro_batch,
      batch=plan.completions_per_step,
      max_target_length=plan.batch_plan.max_target_length,
    )
    for plan in plans
  ]
  return in_range(config.batch, allowed)
