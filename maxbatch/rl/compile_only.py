"""validate_only and compile_only of reinforcement learning: its step and its sampler."""

from maxbatch.batch.rl_plan import plan_rl
from maxbatch.command_line.screen import for_screen
from maxbatch.compile import cache
from maxbatch.config.keys.batch import Explore
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.devices import find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.modes.compile_only import compile_run, rank_sizes
from maxbatch.modes.resolve import resolve
from maxbatch.modes.start import started
from maxbatch.rl.candidates import rl_sizes_of
from maxbatch.rl.requirements import check_rl
from maxbatch.rl.resolve import resolve_rl, with_prompts
from maxbatch.rl.rollout_program import RolloutCompiler
from maxbatch.rl.trainer import build_policy_trainer
from maxbatch.rl.tuning import RLProber
from maxbatch.rl.validate import validate_rl


def prepare_rl_only(config: Config, *, forget: bool = False) -> None:
  """As `prepare_only`, of a configuration of reinforcement learning: step and sampler.

  Raises:
    UserError: as there.
  """
  check_rl(config)
  if config.compile.validate_only:
    validate_rl(config)
    return
  with started(config), ending_together():
    target = find_devices(config)
    cache.enable(config.compile.jax_cache_dir)
    config = _with_epoch(config)
    if isinstance(config.batch.micro_batch_size, Explore):
      print(f"{for_screen(str(plan_rl(config, target.layout)))}\n", flush=True)
      rank_sizes(config, target, RLProber(config, target), find=rl_sizes_of)
      return
    found = resolve_rl(config, target, forget=forget)
    print(f"{for_screen(str(found.plan))}\n", flush=True)
    run = resolve(found.in_samples, target)
    trainer = build_policy_trainer(run.config, found.plan, target.devices)
    compile_run(run, trainer, RolloutCompiler(found.place))


def _with_epoch(config: Config) -> Config:
  """With the prompts of an epoch counted; as it is, and a line, where they are not here."""
  try:
    return with_prompts(config)[0]
  except UserError as error:
    if not config.compile.compile_topology:
      raise
    print(f"The run's prompts are not looked at: {error}\n", flush=True)
    return config
