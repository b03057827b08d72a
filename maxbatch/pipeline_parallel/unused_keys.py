"""Where there is no pipeline: keys that would have no effect."""

from maxbatch.config.schema import PipelineConfig
from maxbatch.config.suggestions import assigned
from maxbatch.errors import UserError

_NUMBERS = ("num_pipeline_microbatches", "num_pipeline_repeats", "num_layers_per_pipeline_stage")


def check_unused(config: PipelineConfig) -> None:
  """Refuses keys of a pipeline where there is none.

  Raises:
    UserError: something is set that only a schedule uses.
  """
  if config.pipeline_schedule != "none":
    return
  unset = dict.fromkeys(_NUMBERS, -1) | {
    "pipeline_delay_activation_forwarding": False,
    "pipeline_stash": "input",
  }
  for key, value in unset.items():
    if vars(config)[key] != value:
      raise UserError(
        f"{assigned({key: vars(config)[key]})} has no effect with pipeline_schedule=none; leave it "
        f"out, or set {assigned({key: value})}"
      )
