"""Training on text: from what its keys leave open to a run with everything chosen and planned.

The noise scale's part in a run, made ready from the configuration.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from maxbatch.batch.from_config import follows_noise_scale, keep_batch, mesh_of, plan_batches
from maxbatch.batch.host_loads import check_loads
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.checkpoints.checkpointer import Restored
from maxbatch.checkpoints.find import newest_record
from maxbatch.checkpoints.record import changed_settings, settings
from maxbatch.compile.step_cache import step_compiler
from maxbatch.config.keys.batch import Explore
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted, text
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.data.input_report import input_report
from maxbatch.data.registry import build_dataset, check_epochs
from maxbatch.data.rows import Dataset, RowSource
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.copies import own_copies
from maxbatch.hardware.devices import Device, Target
from maxbatch.hardware.sharding import num_processes
from maxbatch.metrics_writers.registry import chosen_writers
from maxbatch.models.registry import Model, build_model
from maxbatch.modes.method import Passed, Purpose, ResolvedRun
from maxbatch.noise.controller import Steering, check_noise, measures_noise
from maxbatch.run_folder.paths import RunFolder, remembered_choices
from maxbatch.training.build import build_trainer
from maxbatch.training.job import Job
from maxbatch.training.noise_run import Meter, Noise, NoiseMeter, StepPrograms
from maxbatch.training.objective import TEXT
from maxbatch.training.step import Trainer
from maxbatch.tuning.candidates import (
  Candidate,
  asked,
  is_open,
  sizes_of,
  with_default_batch,
  with_size,
)
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.eval_candidates import asked_to_evaluate, eval_sizes_of, is_eval_open
from maxbatch.tuning.exploration import with_shared_rows, without_variants
from maxbatch.tuning.microbatch_size import (
  RematProber,
  before_remat,
  check_explored,
  choose,
  choose_remat_policy,
  choose_to_evaluate,
  is_remat_open,
)
from maxbatch.tuning.pipeline_microbatches import (
  PipelineMicrobatchProber,
  choose_num_pipeline_microbatches,
)
from maxbatch.tuning.pipeline_schedules import ScheduleProber, choose_pipeline_schedule
from maxbatch.tuning.search import CompilingProber, EvalProber, Prober


def make_noise(
  config: Config, plan: BatchPlan, make_meter: Callable[[], Meter], folder: pathlib.Path
) -> Noise | None:
  """Returns what measures, and steers if it is to; None for a run without either.

  Args:
    plan: its plan from the very beginning.
    folder: where decisions are written.
  """
  if not measures_noise(config.noise):
    return None
  steering = None
  if follows_noise_scale(config.batch):
    unit = config.run.schedule_unit
    warmup = learning_rate(config.optimizer, plan, unit).warmup
    samples = -int(-warmup // (plan.max_target_length if unit == "tokens" else 1))
    steering = Steering(config.noise, plan, samples)
  return Noise(make_meter(), None, config.noise.gns_report_every, steering, folder)


def calibration_programs(
  config: Config, plan: BatchPlan, devices: Sequence[Device], source: RowSource
) -> contextlib.AbstractContextManager[StepPrograms | None]:
  """Returns the steps that measure all layers, compiled when first called; None without any."""
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


@dataclasses.dataclass(frozen=True)
class TextTraining:
  """Training on the rows of a dataset (see `Training` in method.py)."""

  config: Config
  plan: BatchPlan
  loss = TEXT
  num_saved_policies = 0
  sampler = None

  def extra_bytes(self, trainer: Trainer) -> Mapping[str, int]:
    """Returns nothing: the state and the rows are all."""
    del trainer
    return {}

  def dataset(self) -> Dataset:
    """Reads the dataset; raises UserError if it cannot be read for as long as the run is."""
    config = self.config
    dataset = build_dataset(config.data, config.batch.max_target_length)
    check_epochs(config.data, dataset.train, self.plan.total_samples)
    return dataset

  def examine(self, trainer: Trainer, passed: Passed) -> Dataset:
    """Reads the dataset and its first rows, and says what is known of it."""
    given = input_report(self.config.data, self.plan, num_processes(trainer.mesh))
    passed(("input", given.headline, given.lines()))
    dataset = self.dataset()
    for source in filter(None, (dataset.train, dataset.validation)):
      _read_first_row(source)
    passed(("dataset", "the first rows can be read", dataset.description.splitlines()))
    return dataset

  def meter(self, model: Model) -> NoiseMeter:
    """Returns what measures the noise scale, with the model of calibration steps if there are any."""
    calibrating = None
    if calibrates(self.config):
      length = self.config.batch.max_target_length
      calibrating = build_model(model.config, length, "all", model.trainable, model.policy)
    return NoiseMeter(self.config.noise, model, calibrating)

  def setup(self, job: Job, restored: Restored | None) -> contextlib.AbstractContextManager[Job]:
    """Returns the job as it is: it reads rows."""
    del restored
    return contextlib.nullcontext(job)


def _read_first_row(source: RowSource) -> dict[str, np.ndarray]:
  return source.rows(np.zeros(1, np.int64))


class Pretraining:
  """Training on text, as a `Method`."""

  def resolve(
    self, config: Config, target: Target, purpose: Purpose, *, retune: bool = False
  ) -> ResolvedRun:
    """Chooses the microbatch size, then the pipeline's schedule and num_pipeline_microbatches, which divides it.

    Raises:
      UserError: nothing fits, the model cannot be split as the keys ask, a metrics writer is
        unknown, or the noise scale or the learning rate's schedule does not go with the run.
    """
    chosen_writers(config.run.metrics_writers, config.run.plugins)
    if purpose is Purpose.VALIDATE:
      check_explored(config)
    saved = saved_record(config)
    sized = keeping_batch(before_remat(config), saved, target.layout)
    if purpose is Purpose.VALIDATE:
      sized, plan, notes = _with_smallest_size(sized, target)
    else:
      find = functools.partial(with_shared_rows, sizes_of)
      (sized, plan), notes = _sized(sized, target, find, retune=retune), ()
      if sized.mesh != config.mesh:
        target = dataclasses.replace(target, layout=plan.topology)
    check_plan(sized, plan)
    if purpose is not Purpose.VALIDATE:
      # Before anything is compiled for the pipeline.
      learning_rate(sized.optimizer, plan, sized.run.schedule_unit)
      # The plan knows nothing of the pipeline, so that it stays.
      tries_schedule = ScheduleProber(sized, target.devices, target.layout)
      sized = choose_pipeline_schedule(
        sized, target, tries_schedule, remembered_choices(), retune=retune, plan=plan
      )
      prober = PipelineMicrobatchProber(sized, target.devices, target.layout)
      sized = choose_num_pipeline_microbatches(
        sized, target, prober, remembered_choices(), retune=retune, plan=plan
      )
      if is_remat_open(config):
        tries = RematProber(sized, target.devices, target.layout)
        sized = choose_remat_policy(sized, plan, target, tries, remembered_choices(), retune=retune)
      sized, plan = _with_eval_batch(sized, plan, target, retune=retune)
    else:
      if is_eval_open(config.batch):
        notes = [*notes, f"{asked_to_evaluate(config.batch)} {_SMALLEST_EVALUATION}"]
      if is_remat_open(config):
        notes = [*notes, "remat_policy=auto is chosen when the run starts; checked with full"]
    return ResolvedRun(config, sized, target, plan, TextTraining(sized, plan), saved, notes=notes)

  def explored(
    self, config: Config, target: Target
  ) -> tuple[Config, CompilingProber[Candidate], Callable[[Config, Topology], Sequence[Candidate]]]:
    """Returns the run, what tries a size of it or of its evaluation, and the sizes; says what is not explored.

    Raises:
      UserError: the model has no sizes to explore, or both are to be explored.
    """
    if not isinstance(config.batch.micro_batch_size, Explore):
      config, _ = resolve_micro_batch_size(config, target)
      return config, EvalProber(config, target.devices, target.layout), eval_sizes_of
    if is_eval_open(config.batch):
      raise UserError(
        f"{asked(config.batch)} {asked_to_evaluate(config.batch)}: the evaluation is tried beside a training "
        "whose microbatch is known; first eval_per_device_batch_size=0"
      )
    if resolve_accumulation(config, target.layout) != config:
      raise UserError(
        "micro_batch_size=explore: the model's samples depend on each other, so that a step has one "
        "microbatch of the whole batch; micro_batch_size=none is the only size"
      )
    pipeline = config.pipeline
    if pipeline.pipeline_schedule == "auto":
      print(
        "pipeline_schedule=auto: every size is tried with interleaved_1f1b and the most repeats; "
        "compile_only=true with the size that you take ranks the others too",
        flush=True,
      )
    if pipeline.pipeline_schedule != "none" and pipeline.num_pipeline_microbatches == -1:
      print(
        "num_pipeline_microbatches=-1: every size is tried with the fewest microbatches that work; "
        "compile_only=true with the size that you take ranks the others too",
        flush=True,
      )
    return config, Prober(config, target.devices, target.layout), sizes_of


PRETRAINING = Pretraining()
_SMALLEST_EVALUATION = "is chosen when the run starts; checked with training's microbatch"


def _with_eval_batch(
  config: Config, plan: BatchPlan, target: Target, *, retune: bool
) -> tuple[Config, BatchPlan]:
  """Returns the configuration with its evaluation batch chosen, if it was to be, and the plan with it."""
  prober = EvalProber(config, target.devices, target.layout)
  chosen = choose_to_evaluate(config, target, prober, remembered_choices(), retune=retune)
  size = chosen.batch.eval_per_device_batch_size
  if chosen is config or not isinstance(size, Fraction):
    return config, plan
  return chosen, dataclasses.replace(plan, eval_batch=int(size * target.layout.num_devices))


def saved_record(config: Config) -> Mapping[str, Any] | None:
  """Returns the record of the checkpoint that a start on these machines would resume from."""
  if config.compile.compile_topology or not config.checkpoint.enable_checkpointing:
    return None
  # Process 0's: a shared folder may not look alike on all hosts at once.
  first = jax.process_index() == 0
  record = newest_record(RunFolder.of(config.run).checkpoints) if first else None
  if first and (copies := own_copies()) and (copies.step or -1) >= (record or {"step": 0})["step"]:
    with contextlib.suppress(OSError):  # The restore says so, and takes what is stored.
      record = copies.record()
  return broadcast_one_to_all(record)


def keeping_batch(config: Config, saved: Mapping[str, Any] | None, layout: Topology) -> Config:
  """Returns the configuration with the batch of the run that is resumed, unless keys give another."""
  if saved is None:
    return config
  return with_batch_of(config, saved["plan"], changed_settings(saved, settings(config)), layout)


def with_batch_of(
  config: Config, saved: Mapping[str, Any], changed: Collection[str], layout: Topology
) -> Config:
  """Returns the configuration with the batch of a saved plan, unless keys give another; says so.

  Args:
    saved: the plan of a checkpoint, as `BatchPlan.as_dict` gave it.
    changed: the keys that have other values than the checkpoint was written with.

  Raises:
    UserError: that batch does not divide over these devices, or not as the keys ask.
  """
  batch = keep_batch(config.batch, layout, saved, changed)
  if batch != config.batch:
    print(
      f"The run keeps its {batch.batch_size} samples per step; batch_size=… gives it another batch"
    )
  return dataclasses.replace(config, batch=batch)


def check_plan(config: Config, plan: BatchPlan) -> None:
  """Checks what a plan is asked for beside its sizes.

  Raises:
    UserError: loads that do not divide, or a noise scale that cannot be measured so.
  """
  check_loads(plan, streamed=config.batch.accumulation == "streamed")
  check_noise(config, plan)


def resolve_micro_batch_size(
  config: Config, target: Target, *, retune: bool = False
) -> tuple[Config, BatchPlan]:
  """Returns the configuration with its microbatch size chosen, if it was to be, and its plan.

  Raises:
    UserError: nothing fits, or the model cannot be split as the keys ask.
  """
  return _sized(config, target, sizes_of, retune=retune)


def _sized(
  config: Config,
  target: Target,
  find: Callable[[Config, Topology], Sequence[Candidate]],
  *,
  retune: bool,
) -> tuple[Config, BatchPlan]:
  """Returns the same, of the sizes, and meshes, that `find` offers."""
  config, plan = _accumulating(config, target)
  prober, layout = Prober(config, target.devices, target.layout), target.layout
  chosen = choose(config, target, prober, remembered_choices(), find=find, retune=retune)
  if chosen.mesh != config.mesh:
    layout = mesh_of(chosen, layout.num_devices, layout.num_slices)
  return chosen, plan or plan_batches(chosen.batch, chosen.run, layout, chosen.optimizer)


def _accumulating(config: Config, target: Target) -> tuple[Config, BatchPlan | None]:
  """Returns the configuration with how it accumulates, and its plan where no size is to be chosen."""
  plan = None
  if not is_open(config.batch):
    plan = plan_batches(config.batch, config.run, target.layout, config.optimizer)
  return resolve_accumulation(config, target.layout, plan), plan


def _with_smallest_size(config: Config, target: Target) -> tuple[Config, BatchPlan, Sequence[str]]:
  """Returns the configuration with a microbatch to check, its plan, and a line if it is still to choose."""
  config, plan = _accumulating(config, target)
  config, layout, notes = without_variants(config), target.layout, []
  if is_open(config.batch):
    config, notes = _smallest(config, layout)
  return (
    config,
    plan or plan_batches(config.batch, config.run, layout, config.optimizer),
    notes,
  )


def _smallest(config: Config, layout: Topology) -> tuple[Config, list[str]]:
  """Returns the configuration with its smallest size, and a line that it is still to choose."""
  config = with_default_batch(config, layout)
  sizes = sizes_of(config, layout)
  smallest, largest = sizes[0].per_device, sizes[-1].per_device
  line = (
    f"{asked(config.batch)} will choose from {counted(len(sizes), 'size')}, {text(smallest)} to "
    f"{text(largest)}; checked with {text(smallest)}"
  )
  batch = with_size(config.batch, smallest)
  return dataclasses.replace(config, batch=batch), [line]
