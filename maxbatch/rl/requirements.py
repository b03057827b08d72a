"""What a run of reinforcement learning asks of the other keys."""

import inspect

from maxbatch.batch.from_config import is_rl
from maxbatch.batch.rl_plan import RLPlan
from maxbatch.batch.rl_sizes import halving_micro_batch_sizes
from maxbatch.config.load import to_flat_dict
from maxbatch.config.registry import registered
from maxbatch.config.schema import Config, NoiseConfig
from maxbatch.errors import UserError
from maxbatch.rl.checkers import REWARDS
from maxbatch.rl.rewards import check_rewards
from maxbatch.rl.tasks import task_named

_ONLY: dict[str, tuple[object, str]] = {
  "accumulation": ("streamed", "microbatches come one by one, as they are sampled"),
  "dropout_rate": (0.0, "what is sampled has no dropout"),
  "z_loss_multiplier": (0.0, "the loss has no such term"),
  "precision_report": (False, "it is of the loss of text, of which there are no rows"),
  "gns": (
    "off",
    "completions of one prompt are no independent examples; gns_from_microbatches=true measures "
    "per prompt",
  ),
  "shard_optimizer_over_data": (
    False,
    "the weights sample too, and divided ones would be gathered for every token; "
    "ici_fsdp_parallelism divides the optimizer as well",
  ),
  "load_full_state_path": (
    "",
    "its position counts samples of text; load_parameters_path starts a new run",
  ),
}
"""By key, the only value that reinforcement learning takes, and why."""


def check_rl(config: Config) -> None:
  """Checks the keys of a run of reinforcement learning before anything is read.

  Raises:
    UserError: one cannot be used there, or not yet, or something is missing.
  """
  if not is_rl(config.rl):
    raise UserError(
      "num_generations=-1: this command trains by reinforcement learning, on groups of completions; for "
      "example num_generations=8, or config=configs/post_train/rl.yml; the command train trains "
      "on text"
    )
  flat = to_flat_dict(config)
  for key, (value, why) in _ONLY.items():
    if flat[key] != value:
      raise UserError(
        f"{key}={_shown(flat[key])} with num_generations={config.rl.num_generations}: {why}; "
        f"for example {key}={_shown(value)}"
      )
  if not config.run.decode_sampling_temperature:
    raise UserError(
      "decode_sampling_temperature=0 samples the same completion every time, so a group "
      "has nothing to compare; for example decode_sampling_temperature=1"
    )
  _check_beginning(config)
  _check_reward_columns(config)


def _check_reward_columns(config: Config) -> None:
  """Raises UserError: there are no reward functions, or the data have no column that one asks for."""
  keys, columns = config.rl, config.data.train_data_columns
  given = {"answer"} if keys.rl_task else {*columns[1:]}
  for name in check_rewards(keys):
    function = registered("reward_functions", name, REWARDS, keys.plugins)
    # Where it is no plain function, calling it will tell.
    own = inspect.signature(function).parameters.values() if inspect.isfunction(function) else ()
    asked = [one.name for one in own if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    missing = [column for column in asked if column not in {*given, "keys"}]
    if missing:
      raise UserError(
        f"reward_functions: {name} needs the column {missing[0]}, and train_data_columns="
        f"[{','.join(columns)}]{f' rl_task={keys.rl_task}' if keys.rl_task else ''} gives none; for "
        f"example train_data_columns=[{','.join([*columns[:1], *missing])}]"
      )


def check_prompt_noise(config: NoiseConfig, plan: RLPlan) -> None:
  """Checks that the noise scale, if it is to be measured, can be.

  Raises:
    UserError: there are no two microbatches of whole groups, or no two halves of a group.
  """
  if not config.gns_from_microbatches:
    return
  sizes = halving_micro_batch_sizes(plan.completions_per_step, plan.topology)
  if plan.micro_batch in sizes:
    return
  offer = f"micro_batch_size={sizes[-1]}, or " if sizes else ""
  raise UserError(
    f"gns_from_microbatches=true with num_generations={plan.num_generations} and a microbatch of "
    f"{plan.micro_batch} completions: the noise scale per prompt is estimated from the differences "
    "of at least two microbatches, or replicas of one, of whole groups, and of the halves of each "
    f"group, which the devices share alike; for example {offer}gns_from_microbatches=false"
  )


def _check_beginning(config: Config) -> None:
  """Checks the initialization: a warm start shows a task's demonstrations to a model that begins at
  random."""
  rl, keys = config.rl, config.checkpoint
  if rl.rl_task:
    task_named(rl.rl_task)
  if not rl.warm_start_steps:
    return
  if keys.load_parameters_path:
    raise UserError(
      f"warm_start_steps={rl.warm_start_steps} and "
      f"load_parameters_path={keys.load_parameters_path}: "
      "the run begins with one of them; for example warm_start_steps=0"
    )


def _shown(value: object) -> str:
  if isinstance(value, bool):
    return str(value).lower()
  return '""' if value == "" else str(value)
