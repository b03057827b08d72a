"""From what a configuration leaves open to a run in which everything is chosen and planned."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax

from maxbatch.batch.from_config import follows_noise_scale, plan_batches
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.loads import check_loads
from maxbatch.batch.resume import keep_batch, resumed_plan
from maxbatch.checkpoints.find import newest_record
from maxbatch.checkpoints.record import changed_settings, settings
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.devices import Target
from maxbatch.metrics_writers.registry import chosen_writers
from maxbatch.noise.requirements import check_noise
from maxbatch.run_folder.metrics import each_record
from maxbatch.run_folder.paths import RunFolder, remembered_choices
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.microbatch_size import choose
from maxbatch.tuning.pipeline_microbatches import (
  PipelineMicrobatchProber,
  choose_num_pipeline_microbatches,
)
from maxbatch.tuning.prober import Prober

_ORIGIN = Position(0, 0)


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
  """A run on its devices, with nothing left to choose."""

  given: Config
  """As its keys say, with what they leave open."""
  config: Config
  target: Target
  plan: BatchPlan
  """From the run's first step, wherever it resumes."""
  saved: Mapping[str, Any] | None = None
  """The record of the checkpoint to resume from; None if the run begins."""
  begins: Position = _ORIGIN
  """Where a run without one begins to count."""

  @property
  def folder(self) -> RunFolder:
    """The run's folder, which may not be there yet."""
    return RunFolder.of(self.config.run)

  @property
  def plan_ahead(self) -> BatchPlan:
    """From where the run is, if its newest checkpoint turns out to be whole."""
    if self.saved is None:
      return self.plan.starting_at(self.begins) if self.begins != _ORIGIN else self.plan
    steers = follows_noise_scale(self.config.batch) and not self.config.noise.gns_dry_run
    steered = steers and bool(self.saved.get("notes", {}).get("steering"))
    position = Position(self.saved["step"], self.saved["samples"])
    return resumed_plan(self.plan, self.saved["plan"], position, steered=steered)


def resolve(config: Config, target: Target, *, forget: bool = False) -> ResolvedRun:
  """The run with all chosen that was to be chosen on these devices.

  That is the microbatch size, then num_pipeline_microbatches, which divides it.

  Raises:
    UserError: nothing fits, the model cannot be split as the keys ask, there is no such metrics
      writer, the noise scale cannot be
      measured so, or the learning rate's schedule does not fit into the run.
  """
  chosen_writers(config.run.metrics_writers, config.run.plugins)
  saved = checkpoint_of(config)
  sized = keeping_batch(config, saved, target.layout)
  run = planned(resolve_micro_batch_size(sized, target, forget=forget), target)
  # Before anything is compiled for the pipeline.
  learning_rate(run.config.optimizer, run.plan, run.config.run.schedule_unit)
  prober = PipelineMicrobatchProber(run.config, target.devices, target.layout)
  chosen = choose_num_pipeline_microbatches(
    run.config, target, prober, remembered_choices(), forget=forget
  )
  # The plan knows nothing of the pipeline, so that it stays.
  return dataclasses.replace(run, config=chosen, given=config, saved=saved)


def check_replaces_nothing(config: Config) -> None:
  """Checks that a run which begins anew, without checkpoints, has a folder of its own.

  Raises:
    UserError: the folder has the steps of another run.
  """
  folder = RunFolder.of(config.run)
  if config.checkpoint.enable_checkpointing:
    return
  if any(record["step"] > 0 for record in each_record(folder.path)):
    raise UserError(
      f"enable_checkpointing=false run_name={folder.path.name}: a run without checkpoints begins at "
      f"step 0, and would replace {folder.metrics.name} and {folder.config.name} of the run in "
      f"{folder.path}; choose another name, for example run_name={folder.free_name()}, or go on "
      "with that run: enable_checkpointing=true"
    )


def checkpoint_of(config: Config) -> Mapping[str, Any] | None:
  """The record of the checkpoint that a start on these machines would resume from."""
  if config.compile.compile_topology or not config.checkpoint.enable_checkpointing:
    return None
  # Process 0's: a shared folder may not look alike on all hosts at once.
  first = jax.process_index() == 0
  return broadcast_one_to_all(
    newest_record(RunFolder.of(config.run).checkpoints) if first else None
  )


def keeping_batch(config: Config, saved: Mapping[str, Any] | None, layout: Topology) -> Config:
  """The configuration with the batch of the run that is resumed, unless keys give another."""
  if saved is None:
    return config
  changed = changed_settings(saved, settings(config))
  return with_batch_of(config, saved["plan"], changed, layout)


def with_batch_of(
  config: Config, saved: Mapping[str, Any], changed: Collection[str], layout: Topology
) -> Config:
  """The configuration with the batch of a saved plan, unless keys give another; says so.

  Args:
    config: as its keys say.
    saved: the plan of a checkpoint, as `BatchPlan.as_dict` gave it.
    changed: the keys that have other values than the checkpoint was written with.
    layout: the devices.

  Raises:
    UserError: that batch does not divide over these devices, or not as the keys ask.
  """
  batch = keep_batch(config.batch, layout, saved, changed)
  if batch != config.batch:
    print(
      f"The run keeps its {batch.batch_size} samples per step; batch_size=… gives it another batch"
    )
  return dataclasses.replace(config, batch=batch)


def planned(config: Config, target: Target) -> ResolvedRun:
  """A run whose microbatch size is known, with its plan.

  Raises:
    UserError: sizes that do not divide, or a noise scale that cannot be measured so.
  """
  plan = plan_batches(config.batch, config.run, target.layout)
  check_loads(plan, streamed=config.batch.accumulation == "streamed")
  check_noise(config, plan)
  return ResolvedRun(given=config, config=config, target=target, plan=plan)


def resolve_micro_batch_size(config: Config, target: Target, *, forget: bool = False) -> Config:
  """The configuration with its microbatch size chosen, if it was to be, on these devices.

  Raises:
    UserError: nothing fits, or the model cannot be split as the keys ask.
  """
  config = resolve_accumulation(config, target.layout)
  prober = Prober(config, target.devices, target.layout)
  return choose(config, target, prober, remembered_choices(), forget=forget)
