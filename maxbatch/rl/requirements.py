"""What a run of reinforcement learning asks of the other keys: none is accepted and without effect."""

import functools
from collections.abc import Iterable

from maxbatch.batch.from_config import is_rl
from maxbatch.batch.rl_plan import RLPlan
from maxbatch.batch.rl_sizes import halving_micro_batch_sizes
from maxbatch.config.load import assigned, load_config, to_flat_dict
from maxbatch.config.schema import Config, NoiseConfig, RLConfig
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import check_unused_keys
from maxbatch.rl.rewards import check_rewards
from maxbatch.rl.tasks import task_named

_NEVER: dict[str, str] = {
  "packing grain_packing_type use_truncation block_cross_document_attention": (
    "each completion has a row of its own"
  ),
  "add_eos sft_train_on_completion_only weights_column": (
    "the tokens that count are those that are sampled"
  ),
  "tokenize_train_data tokenize_eval_data": "prompts are texts",
  "dataset_path eval_dataset_path": "prompts are records of files, or of a built-in task",
  "dataset_mixture mixture_schedule grain_train_mixture_config_path": (
    "prompts come from one source; mix its records"
  ),
  "num_epoch": "the budget says how long a run is; the command plan shows the epochs",
  "dataset_cache_directory": "prompts are in memory",
  "grain_worker_count grain_num_threads grain_prefetch_buffer_size grain_per_worker_buffer_size": (
    "prompts are in memory"
  ),
  "expansion_factor_real_data loading_hosts": "prompts are not loaded in rows",
  "eval_per_device_batch_size": "an evaluation samples as many at once as a microbatch has",
  "per_device_batch_size_start per_device_batch_size_increment global_rampup_samples": (
    "the batch does not change"
  ),
  "batch_schedule_file batch_schedule_unit batch_schedule_length batch_size_start": (
    "the batch does not change"
  ),
  "batch_size_increment gns_max_batch_size": "the batch does not change",
}
"""By keys that have no effect there, why."""

_OF_FILES = (
  "dataset_type eval_fraction max_bad_records train_data_columns eval_data_columns grain_file_type "
  "grain_train_files grain_eval_files hf_path hf_name hf_data_dir hf_train_files hf_eval_files "
  "train_split hf_eval_split"
)
_OF_TYPE = {
  "grain": "grain_file_type grain_train_files grain_eval_files",
  "hf": "hf_path hf_name hf_data_dir hf_train_files hf_eval_files train_split hf_eval_split",
}
"""The keys of each type of dataset that prompts are read from."""


def check_unused(config: Config) -> None:
  """Refuses keys that have no effect on a run of reinforcement learning.

  Raises:
    UserError: one is set.
  """
  check_unused_keys(config.pipeline)
  for keys, why in _NEVER.items():
    _refuse(config, keys.split(), f"with num_generations={config.rl.num_generations}: {why}")
  if task := config.rl.rl_task:
    _refuse(config, _OF_FILES.split(), f"with rl_task={task}, which has prompts of its own")
    return
  for kind, keys in _OF_TYPE.items():
    if config.data.dataset_type != kind:
      _refuse(config, keys.split(), f"with dataset_type={config.data.dataset_type}")


def _refuse(config: Config, keys: Iterable[str], where: str) -> None:
  given, default = to_flat_dict(config), _defaults()
  for key in keys:
    if given[key] != default[key]:
      raise UserError(
        f"{assigned({key: given[key]})} has no effect {where}; leave it out, or set "
        f"{assigned({key: default[key]})}"
      )


@functools.cache
def _defaults() -> dict[str, object]:
  return to_flat_dict(load_config(["config=base"]))


_ONLY: dict[str, tuple[object, str]] = {
  "accumulation": ("streamed", "microbatches come one by one, as they are sampled"),
  "dropout_rate": (0.0, "what is sampled has no dropout"),
  "z_loss_multiplier": (0.0, "the loss has no such term"),
  "pipeline_schedule": ("none", "the sampler knows no pipeline"),
  "precision_report": (False, "it is of the loss of text, of which there are no rows"),
  "gns": (
    "off",
    "completions of one prompt are no independent examples; gns_from_microbatches=true measures "
    "per prompt",
  ),
  "load_full_state_path": (
    "",
    "its position counts samples of text; load_parameters_path begins anew",
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
      "num_generations=-1: this command trains by reinforcement, on groups of completions; for "
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
      "decode_sampling_temperature=0 writes the same completion each time, and groups would have "
      "nothing to compare; for example decode_sampling_temperature=1"
    )
  check_unused(config)
  _check_beginning(config)
  check_rewards(config.rl)


def check_rollout_devices(config: RLConfig, num_processes: int) -> None:
  """Checks that devices which only sample are this process's own.

  Raises:
    UserError: other processes have joined.
  """
  if config.rollout_devices and num_processes > 1:
    raise UserError(
      f"rollout_devices={config.rollout_devices} with num_processes={num_processes}: devices that "
      "only "
      "sample work with one process only so far; for example rollout_devices=0"
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
    f"{plan.micro_batch} completions: the noise scale per prompt is estimated from the "
    "differences of at least "
    "two microbatches, or replicas of one, of whole groups, and of the halves of each group, which "
    f"the devices share alike; for example {offer}gns_from_microbatches=false"
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
  if not rl.rl_task:
    raise UserError(
      f"warm_start_steps={rl.warm_start_steps} trains on the demonstrations of a built-in task, "
      "and "
      "rl_task is empty; for example warm_start_steps=0 load_parameters_path=runs/mine"
    )


def _shown(value: object) -> str:
  if isinstance(value, bool):
    return str(value).lower()
  return '""' if value == "" else str(value)
