"""What a run of reinforcement learning asks of the other keys: none is accepted and without effect."""

from maxbatch.batch.rl_sizes import is_rl
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.rl.rewards import check_rewards
from maxbatch.rl.tasks import task_named

_ONLY: dict[str, tuple[object, str]] = {
  "accumulation": ("streamed", "microbatches come one by one, as they are sampled"),
  "decode_sampling_top_k": (0, "the gradient is that of the policy which samples, all of it"),
  "decode_sampling_nucleus_p": (1.0, "the gradient is that of the policy which samples, all of it"),
  "decode_sampling_min_p": (0.0, "the gradient is that of the policy which samples, all of it"),
  "dropout_rate": (0.0, "what is sampled has no dropout"),
  "z_loss_multiplier": (0.0, "the loss has no such term"),
  "pipeline_schedule": ("none", "the sampler knows no pipeline"),
  "precision_report": (False, "it is of the loss of text, of which there are no rows"),
  "gns": ("off", "the noise scale is not measured there yet"),
  "gns_from_microbatches": (False, "the noise scale is not measured there yet"),
  "rollout_devices": (0, "devices that only sample are not there yet: all do both in turn"),
  "load_full_state_path": (
    "",
    "its position counts samples of text; load_parameters_path begins anew",
  ),
  "compiled_step": ("", "a step for pairs is not read from a file yet"),
  "save_compiled_step": ("", "a step for pairs is not written to a file yet"),
  "compile_only": (False, "compiling without a run is not there yet"),
  "validate_only": (False, "checking without a run is not there yet; the command plan shows sizes"),
  "eval_per_device_batch_size": (0, "an evaluation samples as many at once as a microbatch has"),
  "expansion_factor_real_data": (-1, "prompts are not loaded in rows"),
  "loading_hosts": ([], "prompts are not loaded in rows"),
  "grain_worker_count": (0, "prompts are in memory"),
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
      "example num_generations=8, or config=configs/post_train/rl.yml; on text trains the command "
      "train"
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
  _check_beginning(config)
  check_rewards(config.rl)


def check_one_process(num_processes: int) -> None:
  """Checks that no other processes have joined.

  Raises:
    UserError: they have.
  """
  if num_processes > 1:
    raise UserError(
      f"num_processes={num_processes}: reinforcement learning runs in one process yet; for example "
      "num_processes=1, with all devices of one host"
    )


def _check_beginning(config: Config) -> None:
  """A warm start shows a task's demonstrations to a model that begins at random."""
  rl, keys = config.rl, config.checkpoint
  if rl.rl_task:
    task_named(rl.rl_task)
  if not rl.warm_start_steps:
    return
  if keys.load_parameters_path:
    raise UserError(
      f"warm_start_steps={rl.warm_start_steps} and load_parameters_path={keys.load_parameters_path}: "
      "the run begins with one of them; for example warm_start_steps=0"
    )
  if not rl.rl_task:
    raise UserError(
      f"warm_start_steps={rl.warm_start_steps} trains on the demonstrations of a built-in task, and "
      "rl_task is empty; for example warm_start_steps=0 load_parameters_path=runs/mine"
    )


def _shown(value: object) -> str:
  if isinstance(value, bool):
    return str(value).lower()
  return '""' if value == "" else str(value)
