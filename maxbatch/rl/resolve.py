"""From what a configuration of reinforcement learning leaves open to sizes, prompts and devices."""

import dataclasses

from maxbatch.batch.rl_plan import RLPlan, in_samples, plan_rl
from maxbatch.compile import cache
from maxbatch.config.schema import Config
from maxbatch.hardware.devices import Target
from maxbatch.rl.prompt_set import PromptSet, prompt_set
from maxbatch.rl.prompts import epoch_size
from maxbatch.rl.requirements import check_prompt_noise
from maxbatch.rl.rollout_program import RolloutPlace
from maxbatch.rl.tuning import RLProber, choose_rl
from maxbatch.run_folder.paths import remembered_choices


@dataclasses.dataclass(frozen=True)
class ResolvedRL:
  """A run with its microbatch and its epoch known."""

  config: Config
  """Its batch counts prompts."""
  plan: RLPlan
  target: Target

  @property
  def in_samples(self) -> Config:
    """The same, as training reads it."""
    return in_samples(self.config, self.plan)

  @property
  def place(self) -> RolloutPlace:
    """What is sampled, and where."""
    return RolloutPlace(self.plan, self.target.rollout)


def with_prompts(config: Config) -> tuple[Config, PromptSet]:
  """The prompts, and the configuration with those of an epoch counted.

  Raises:
    UserError: they cannot be read, or are fewer than num_prompts.
  """
  found = prompt_set(config)
  size = epoch_size(config.rl.num_prompts, found.train)
  return dataclasses.replace(config, rl=dataclasses.replace(config.rl, num_prompts=size)), found


def resolve_rl(config: Config, target: Target, *, forget: bool = False) -> ResolvedRL:
  """The run, with its microbatch chosen if it was to be, on these devices.

  Args:
    config: with the prompts of an epoch counted, where that is known.
    target: the devices.
    forget: choose anew, whatever is remembered.

  Raises:
    UserError: sizes contradict each other, or nothing fits.
  """
  cache.enable(config.compile.jax_cache_dir)
  prober = RLProber(config, target)
  config = choose_rl(config, target, prober, remembered_choices(), forget=forget)
  plan = plan_rl(config, target.layout)
  check_prompt_noise(config.noise, plan)
  return ResolvedRL(config, plan, target)
