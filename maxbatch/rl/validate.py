"""validate_only for reinforcement learning: prompts, rewards and sampler, and all that other runs have."""

from collections.abc import Callable, Generator, Iterator, Sequence

import jax

from maxbatch.batch.rl_plan import RLPlan, in_samples, plan_rl
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.topology import Topology
from maxbatch.data.dataset import Dataset
from maxbatch.errors import UserError
from maxbatch.hardware.devices import describe_devices, find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.modes.resolve import ResolvedRun
from maxbatch.modes.start import started
from maxbatch.modes.validate import Check, check_of_keys, checks_of_run, show_checks
from maxbatch.rl.candidates import rl_sizes_of
from maxbatch.rl.prompt_set import PromptSet
from maxbatch.rl.prompts import Prompts
from maxbatch.rl.requirements import check_prompt_noise, check_rl, check_rollout_devices
from maxbatch.rl.resolve import with_prompts
from maxbatch.rl.rewards import check_rewards
from maxbatch.rl.rollout_program import RolloutPlace, traced_rollout
from maxbatch.rl.run import ByReinforcement, warm_start, warms_up
from maxbatch.rl.sampled import completion_sampler
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.step import Trainer
from maxbatch.tuning.candidates import is_open, offered
from maxbatch.tuning.exploration import without_variants

_LOOKED_AT = 256
"""Prompts whose lengths are looked at."""
_NONE = PromptSet(Prompts([].__getitem__, 0), (), "", "", "")


def validate_rl(config: Config, say: Callable[[str], None] = print) -> None:
  """As `validate`, of a configuration of reinforcement learning.

  Raises:
    UserError: the first check that fails, as the run itself would put it.
  """
  check_rl(config)
  with started(config, leaves_files=False), ending_together():
    check_rollout_devices(config.rl, jax.process_count())
    show_checks(_checks(config), say)


def _checks(config: Config) -> Iterator[Check]:
  yield check_of_keys(config)
  target = find_devices(config)
  config, prompts, unseen = _with_prompts(config)
  config, choice = _with_smallest_choice(config, target.layout)
  plan = plan_rl(config, target.layout)
  check_prompt_noise(config.noise, plan)
  batches = counted(plan.num_batches, "batch", "batches")
  yield (
    "rollout plan",
    f"{batches} of {plan.completions_per_step:,} completions",
    [*choice, *str(plan).splitlines()],
  )
  place = RolloutPlace(plan, target.rollout)

  def examine(run: ResolvedRun, trainer: Trainer) -> Generator[Check, None, Dataset]:
    yield "prompts", unseen or _lengths(run.config, trainer, place, prompts), ()
    yield "rewards", f"{', '.join(check_rewards(config.rl))} can be imported", ()
    yield "sampler", _sampler(run.config, trainer, place), ()
    return method.dataset(run)

  method = ByReinforcement(plan, prompts)
  warm = _warm_start(config, plan) if warms_up(config) else ""
  yield from checks_of_run(in_samples(config, plan), target, method, examine, warm)


def _with_prompts(config: Config) -> tuple[Config, PromptSet, str]:
  """The configuration with its epoch counted, and the prompts; or a line, where they are not here.

  Raises:
    UserError: they cannot be read, and the run is to take place here.
  """
  try:
    return *with_prompts(config), ""
  except UserError as error:
    if not config.compile.compile_topology:
      raise
    return config, _NONE, f"are not looked at: {error}"


def _with_smallest_choice(config: Config, training: Topology) -> tuple[Config, Sequence[str]]:
  """The configuration with a microbatch to check, and a line if that is still to be chosen."""
  config = without_variants(config)
  if not is_open(config.batch):
    return config, ()
  sizes = rl_sizes_of(config, training)
  line = f"{offered(config.batch, sizes)}; checked with {sizes[0].words}"
  return sizes[0].applied_to(config), [line]


def _lengths(config: Config, trainer: Trainer, place: RolloutPlace, prompts: PromptSet) -> str:
  """How long the first prompts are.

  Raises:
    UserError: one is too long.
  """
  sampler, train = completion_sampler(config, trainer.model, place.mesh(trainer)), prompts.train
  count = min(_LOOKED_AT, train.count) if train.count != -1 else _LOOKED_AT
  some = [*map(train.at, range(count)), *prompts.validation[:_LOOKED_AT]]
  longest = sampler.longest(some)
  most = f"{len(some):,} looked at, of {longest} tokens at most (max_prefill_predict_length allows "
  most += f"{sampler.max_prompt_length})"
  return f"{prompts.description}; {most}"


def _sampler(config: Config, trainer: Trainer, place: RolloutPlace) -> str:
  """Traces how a rollout begins, which compiles nothing."""
  traced_rollout(config, trainer, place)
  where = describe_devices(place.devices) if place.devices else "the devices that train"
  completions = counted(place.plan.micro_batch, "completion")
  return f"can be traced, for {completions} at once on {where}"


def _warm_start(config: Config, plan: RLPlan) -> str:
  warm = warm_start(config, plan)
  return (
    f"a warm start: {counted(warm.run.steps, 'step')} of {warm.batch.batch_size} demonstrations, in "
    f"{RunFolder.of(warm.run).path}"
  )
