"""Where there is no pipeline: keys that would have no effect."""

from maxbatch.config.schema import PipelineConfig
from maxbatch.config.suggestions import assigned
from maxbatch.errors import UserError


def check_unused(config: PipelineConfig) -> None:
  """Refuses keys of a pipeline where there is none.

  Raises:
    UserError: something is set that only a schedule uses.
  """
  if config.pipeline_schedule != "none":
    return
  unused = (
    ("num_pipeline_microbatches", config.num_pipeline_microbatches, -1),
    ("num_pipeline_repeats", config.num_pipeline_repeats, -1),
    ("num_layers_per_pipeline_stage", config.num_layers_per_pipeline_stage, -1),
    ("pipeline_delay_activation_forwarding", config.pipeline_delay_activation_forwarding, False),
    ("pipeline_stash", config.pipeline_stash, "input"),
  )
  for key, value, off in unused:
    if value != off:
      raise UserError(
        f"{assigned({key: value})} has no effect with pipeline_schedule=none; leave it out, or set "
        f"{assigned({key: off})}"
      )
