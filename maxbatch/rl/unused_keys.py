"""Keys of a run on text that reinforcement learning would not read: none is set without effect."""

import functools
from collections.abc import Iterable

from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.config.suggestions import assigned
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import check_unused_keys

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
