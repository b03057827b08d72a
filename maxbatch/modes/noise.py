"""The noise scale's part in a run, made ready from the configuration."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from maxbatch.batch.from_config import follows_noise_scale
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.compile.step_file import step_compiler
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.dataset import RowSource
from maxbatch.hardware.devices import Device
from maxbatch.noise.controller import Steering
from maxbatch.noise.requirements import measures_noise
from maxbatch.training.build import build_trainer
from maxbatch.training.noise_run import Meter, Noise
from maxbatch.training.programs import StepPrograms


def make_noise(
  config: Config, plan: BatchPlan, make_meter: Callable[[], Meter], folder: pathlib.Path
) -> Noise | None:
  """Returns what measures, and steers if it is to; None for a run without either.

  Args:
    config: the run.
    plan: its plan from the very beginning.
    make_meter: makes what measures.
    folder: where decisions are written.
  """
  if not measures_noise(config.noise):
    return None
  steering = None
  if follows_noise_scale(config.batch):
    steering = Steering(config.noise, plan, _warmup_samples(config, plan))
  return Noise(make_meter(), None, config.noise.gns_report_every, steering, folder)


def calibration_programs(
  config: Config, plan: BatchPlan, devices: Sequence[Device], source: RowSource
) -> contextlib.AbstractContextManager[StepPrograms | None]:
  """Returns the steps that measure all layers, compiled when first called for; None if there are
  none."""
  if not calibrates(config):
    return contextlib.nullcontext()
  ordinary = dataclasses.replace(config.compile, compiled_step="", save_compiled_step="")
  noise = dataclasses.replace(config.noise, gns="all")
  config = dataclasses.replace(config, noise=noise, compile=ordinary)
  trainer = build_trainer(config, plan, devices)
  return StepPrograms(step_compiler(config, plan, trainer, source), plan.micro_batches)


def calibrates(config: Config) -> bool:
  """Returns whether some steps measure all layers, to tell what the norms' mean."""
  return config.noise.gns == "norm" and config.noise.gns_calibrate_every > 0


def _warmup_samples(config: Config, plan: BatchPlan) -> int:
  unit = config.run.schedule_unit
  warmup = learning_rate(config.optimizer, plan, unit).warmup
  return -int(-warmup // (plan.max_target_length if unit == "tokens" else 1))
