"""From what a configuration leaves open to a run in which everything is chosen and planned."""

import dataclasses

from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.plan import BatchPlan, plan_batches
from maxbatch.config.schema import Config
from maxbatch.hardware.devices import Target
from maxbatch.noise.requirements import check_noise
from maxbatch.run_folder.cache import remembered_choices
from maxbatch.run_folder.paths import RunFolder
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.microbatch_size import choose
from maxbatch.tuning.pipeline_microbatches import (
  PipelineMicrobatchProber,
  choose_num_pipeline_microbatches,
)
from maxbatch.tuning.prober import Prober


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
  """A run on its devices, with nothing left to choose."""

  given: Config
  """As its keys say, with what they leave open."""
  config: Config
  target: Target
  plan: BatchPlan
  """From the run's first step, wherever it resumes."""

  @property
  def folder(self) -> RunFolder:
    """The run's folder, which may not be there yet."""
    return RunFolder.of(self.config.run)


def resolve(config: Config, target: Target, *, forget: bool = False) -> ResolvedRun:
  """The run with all chosen that was to be chosen on these devices.

  That is the microbatch size, then num_pipeline_microbatches, which divides it.

  Raises:
    UserError: nothing fits, the model cannot be split as the keys ask, the noise scale cannot be
      measured so, or the learning rate's schedule does not fit into the run.
  """
  run = planned(resolve_micro_batch_size(config, target, forget=forget), target)
  # Before anything is compiled for the pipeline.
  learning_rate(run.config.optimizer, run.plan, run.config.run.schedule_unit)
  prober = PipelineMicrobatchProber(run.config, target.devices, target.layout)
  chosen = choose_num_pipeline_microbatches(
    run.config, target, prober, remembered_choices(), forget=forget
  )
  # The plan knows nothing of the pipeline, so that it stays.
  return dataclasses.replace(run, config=chosen, given=config)


def planned(config: Config, target: Target) -> ResolvedRun:
  """A run whose microbatch size is known, with its plan.

  Raises:
    UserError: sizes that do not divide, or a noise scale that cannot be measured so.
  """
  plan = plan_batches(config.batch, config.run, target.layout)
  check_noise(config, plan)
  return ResolvedRun(config, config, target, plan)


def resolve_micro_batch_size(config: Config, target: Target, *, forget: bool = False) -> Config:
  """The configuration with its microbatch size chosen, if it was to be, on these devices.

  Raises:
    UserError: nothing fits, or the model cannot be split as the keys ask.
  """
  config = resolve_accumulation(config, target.layout)
  prober = Prober(config, target.devices, target.layout)
  return choose(config, target, prober, remembered_choices(), forget=forget)
