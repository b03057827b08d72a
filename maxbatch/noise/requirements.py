"""Checks of the keys that measuring the noise scale, or batch_schedule=gns, depends on."""

from maxbatch.batch.from_config import follows_noise_scale
from maxbatch.config.schema import Config, NoiseConfig
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError


def measures_noise(config: NoiseConfig) -> bool:
  """Returns whether steps measure what the noise scale is estimated from."""
  return config.gns != "off" or config.gns_from_microbatches


def check_noise(config: Config, plan: BatchPlan) -> None:
  """Refuses keys with which the noise scale cannot be measured, or the batch cannot follow it.

  Raises:
    UserError: naming the keys, their values and values that work.
  """
  gns = config.noise.gns
  _check_pipeline(config, plan)
  if gns != "off" and min(point.batch for point in plan.schedule.points) < 2:
    where = "global_batch_to_train=1" if plan.global_batch_to_train == 1 else "a phase of 1 sample"
    raise UserError(
      f"gns={gns} needs at least 2 samples per step, and {where} has one; for example batch_size=2 "
      "gradient_accumulation_steps=-1, or gns=off"
    )
  if config.batch.batch_schedule_file and config.batch.batch_schedule != "file":
    raise UserError(
      f"batch_schedule_file={config.batch.batch_schedule_file} needs batch_schedule=file; for "
      'example batch_schedule=file, or batch_schedule_file=""'
    )
  if not follows_noise_scale(config.batch):
    if config.noise.gns_dry_run:
      raise UserError(
        "gns_dry_run=true needs batch_schedule=gns, whose decisions it logs; for example "
        "batch_schedule=gns gns_dry_run=true"
      )
    return
  _check_measured(config)
  _check_counted(config, plan)
  if config.batch.accumulation == "streamed":
    raise UserError(
      "batch_schedule=gns changes the number of microbatches during the run, which "
      "accumulation=streamed compiles into the step; for example accumulation=fused"
    )


def _check_pipeline(config: Config, plan: BatchPlan) -> None:
  """Refuses what a pipeline cannot measure: of an example, or of a microbatch, no stage ever has the whole
  gradient. Replicas and dispatches have one each."""
  schedule, noise = config.pipeline.pipeline_schedule, config.noise
  if schedule == "none":
    return
  where = f"and pipeline_schedule={schedule}"
  if noise.gns != "off":
    raise UserError(
      f"gns={noise.gns} {where}: stages do not measure the gradients of single examples; for example "
      "gns=off gns_from_microbatches=true, which measures replicas, or pipeline_schedule=none"
    )
  if follows_noise_scale(config.batch):
    raise UserError(
      f"batch_schedule=gns {where}: the timetable of a pipeline is made for sizes that are known; for "
      "example batch_schedule=[], or pipeline_schedule=none"
    )
  replicas = plan.topology.shape["data"]
  fewest = min(point.num_microbatches for point in plan.schedule.points)
  parts = replicas * (fewest if config.batch.accumulation == "streamed" else 1)
  if noise.gns_from_microbatches and parts < 2:
    raise UserError(
      f"gns_from_microbatches=true {where}: in a pipeline it compares replicas, and there is one; for "
      "example ici_data_parallelism=2, accumulation=streamed with several microbatches, or "
      "gns_from_microbatches=false"
    )


def _check_measured(config: Config) -> None:
  """Checks that the noise scale of the whole model is measured or predicted."""
  gns, every = config.noise.gns, config.noise.gns_calibrate_every
  if not measures_noise(config.noise):
    raise UserError("batch_schedule=gns needs the noise scale, and gns=off; for example gns=norm")
  if gns == "norm" and every == 0:
    raise UserError(
      "batch_schedule=gns needs the noise scale of the whole model, which gns=norm predicts from "
      "calibration steps, and gns_calibrate_every=0; for example gns_calibrate_every=10, or gns=all"
    )


def _check_counted(config: Config, plan: BatchPlan) -> None:
  """Checks that budget and schedules count samples or tokens: steps differ when the batch grows."""
  run = config.run
  if run.steps != -1:
    raise UserError(
      f"steps={run.steps}: with batch_schedule=gns the steps of a run are not known beforehand; "
      f"give its samples or tokens, for example steps=-1 total_tokens={plan.total_tokens}"
    )
  if run.schedule_unit == "steps":
    raise UserError(
      "schedule_unit=steps: with batch_schedule=gns steps are of different sizes; for example "
      "schedule_unit=samples, in which the learning rate's schedule, evaluations and checkpoints "
      "are then counted"
    )
