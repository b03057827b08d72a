"""What the advice does not speak of, refused by name instead of being ignored."""

from collections.abc import Iterable

from maxbatch.config.schema import Config
from maxbatch.errors import UserError

_CHOSEN = {
  "micro_batch_size": "micro_batch_size",
  "per_device_batch_size": "per_device_batch_size",
  "gradient_accumulation_steps": "gradient_accumulation_steps",
  "batch_schedule": "the ramp",
  "batch_schedule_type": "the ramp",
  "enable_rampup_batch_size": "the ramp",
}
"""Keys whose values are what is asked for."""


def check_scope(config: Config, named: Iterable[str]) -> None:
  """Refuses what the rules and the estimate know nothing of, and keys that are the answer.

  Args:
    config: the configuration.
    named: keys on the command line.

  Raises:
    UserError: with what to leave out.
  """
  for key in named:
    if key in _CHOSEN:
      raise UserError(
        f"{key}: {_CHOSEN[key]} is what the advice chooses; leave it out, and set it after "
        "config=advice.yml"
      )
  run = config.run
  if "steps" in named and run.steps != -1 and (run.total_tokens, run.total_samples) != (-1, -1):
    raise UserError(
      f"steps={run.steps}: the steps follow from the batch that is advised; leave it out, or "
      "steps=-1"
    )
  if config.pipeline.pipeline_schedule != "none":
    raise UserError(
      f"pipeline_schedule={config.pipeline.pipeline_schedule}: the advice estimates no pipelines, which "
      "python -m maxbatch.pipeline does; for example pipeline_schedule=none"
    )
  if config.model.lora_rank or config.optimizer.trainable:
    raise UserError(
      "lora_rank and trainable: the rules were found by training all parameters from the beginning, "
      "and say nothing of adapters; for example lora_rank=0 trainable=[]"
    )
