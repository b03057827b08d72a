"""One run from its configuration to its end: plan, prepare, train, sum up."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import yaml

from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.loads import check_loads
from maxbatch.checkpoints.checkpointer import Checkpointer, Restored
from maxbatch.checkpoints.record import identity, settings
from maxbatch.command_line.screen import for_screen
from maxbatch.compile import cache
from maxbatch.compile.step_file import save_steps, step_compiler
from maxbatch.config.load import DERIVED, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.conversion.source import FROZEN
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.dataset import Dataset
from maxbatch.data.mixture import MixedRows
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import (
  check_shared,
  one_process_at_a_time,
  sync_errors,
  write_shared_file,
)
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.hardware.ending import Watchdog, ending_together
from maxbatch.metrics_writers.registry import open_writers
from maxbatch.modes.beginning import (
  Beginning,
  beginning_of,
  key_that_is_over,
  no_steps_left,
  resumed_state,
  saving_frozen,
)
from maxbatch.modes.chronicle import Chronicle, chronicled
from maxbatch.modes.memory import check_memory
from maxbatch.modes.method import ON_TEXT, Method
from maxbatch.modes.noise import calibration_programs, make_noise
from maxbatch.modes.precision import precision_report
from maxbatch.modes.profile import write_profile
from maxbatch.modes.resolve import ResolvedRun, check_replaces_nothing, resolve
from maxbatch.modes.start import check_same_run, started
from maxbatch.modes.summary import (
  SampleTexts,
  description,
  print_next,
  show_sample,
  sum_up,
)
from maxbatch.run_folder.events import COMPILED
from maxbatch.run_folder.lock import locked
from maxbatch.run_folder.metrics import MetricsLog, NoMetricsLog, Record
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.progress import Progress
from maxbatch.training.build import (
  build_trainer,
  compiled_eval,
  eval_rows,
  following,
  row_hosts,
  streams,
  train_rows,
)
from maxbatch.training.loop import RECORD, Job, first_record, show_text, train
from maxbatch.training.noise_run import Noise
from maxbatch.training.profiling import Profiler
from maxbatch.training.programs import StepPrograms
from maxbatch.training.state import TrainState
from maxbatch.training.step import EvalStep, Trainer


@dataclasses.dataclass(frozen=True)
class _Start:
  """Where a run begins or resumes, and what it is from there on."""

  beginning: Beginning
  position: Position
  restored: Restored | None
  plan: BatchPlan
  trainer: Trainer
  noise: Noise | None

  def notes(self, state: TrainState) -> dict[str, Any]:
    """What all checkpoints note."""
    if self.restored:
      return {FROZEN: self.restored.notes[FROZEN]} if FROZEN in self.restored.notes else {}
    return self.beginning.notes(self.trainer, state)


@dataclasses.dataclass(frozen=True)
class _Made:
  """What a run is made of, before its folder is looked at."""

  resolved: ResolvedRun
  trainer: Trainer
  dataset: Dataset
  beginning: Beginning
  about: str
  """The same in words."""


def run(
  config: Config, *, forget: bool = False, advise: bool = True, method: Method = ON_TEXT
) -> tuple[TrainState, Position]:
  """Plans, prepares, trains and sums up one run; its state and position at the end.

  Args:
    config: the run.
    forget: choose anew what the keys leave open, whatever is remembered.
    advise: end with commands that go on from here; not so where another command sets the budget.
    method: how it trains.

  Raises:
    UserError: something in the configuration or the input does not work.
    TrainingDivergedError: the loss or a gradient is not finite.
    RowsError: a row did not reach its device as it was read.
  """
  with started(config), ending_together():
    return _run(config, find_devices(config), method, forget=forget, advise=advise)


def _run(
  config: Config, target: Target, method: Method, *, forget: bool, advise: bool
) -> tuple[TrainState, Position]:
  cache.enable(config.compile.jax_cache_dir)
  resolved = resolve(config, target, forget=forget)
  beginning = Beginning() if resolved.saved else beginning_of(config.checkpoint, resolved.folder)
  resolved = dataclasses.replace(resolved, begins=beginning.position)
  print(f"{for_screen(str(resolved.plan_ahead))}\n", flush=True)
  trainer = build_trainer(
    resolved.config,
    resolved.plan,
    target.devices,
    loss=method.loss(resolved.config),
    num_saved_policies=method.num_saved_policies,
  )
  trainer = saving_frozen(trainer, resolved.saved, beginning)
  with sync_errors():
    beside = method.held_beside(trainer)
    check_memory(resolved.config, resolved.plan, trainer.abstract, target.devices, beside)
  with one_process_at_a_time():
    dataset = method.dataset(resolved)
  check_same_run(resolved.config, resolved.plan, dataset)
  taken_up = beginning.check(resolved.config, trainer)
  about = description(resolved, trainer, dataset.description, taken_up)
  print(for_screen(about), flush=True)
  write_report = resolved.config.run.write_report
  with (
    _held_by_one_process(resolved),
    chronicled(resolved.folder.path, write_report=write_report) as chronicle,
  ):
    made = _Made(resolved, trainer, dataset, beginning, about)
    return _run_in_folder(made, chronicle, method, advise=advise)


def _run_in_folder(
  made: _Made, chronicle: Chronicle, method: Method, *, advise: bool
) -> tuple[TrainState, Position]:
  """Trains from where the folder's newest checkpoint is, and sums up."""
  resolved, trainer, dataset = made.resolved, made.trainer, made.dataset
  with _checkpointer(resolved, dataset, chronicle) as checkpointer:
    start = _restore(resolved, trainer, checkpointer, made.beginning, method)
    if start.restored and start.position.step >= start.plan.steps:
      more = " For more, raise its budget." if advise else ""
      print(f"This run is complete at step {start.position.step}.{more}")
      state = resumed_state(resolved.config, start.trainer, start.restored)
      show_sample(resolved, start.trainer, state.parameters)
      return state, start.position
    chronicle.begin(start.position, list(trainer.mesh.devices.flat), made.about)
    texts = SampleTexts(resolved, trainer)
    state, reached = _train(resolved, start, dataset, checkpointer, method, chronicle, texts)
  plan = _as_decided(start)
  chronicle.end("finished" if reached.step == plan.steps else "stopped", reached.step)
  sum_up(resolved, plan, reached, texts.latest)
  if isinstance(dataset.train, MixedRows):
    print(dataset.train.report(reached.samples))
  written = chronicle.page.finish()
  if advise:
    print_next(resolved, plan, reached, has_report=written)
  if start.noise:
    print(f"  batch:   {start.noise.meter.line(plan.batch_at(reached.samples))}")
  return state, reached


@contextlib.contextmanager
def _held_by_one_process(resolved: ResolvedRun) -> Iterator[None]:
  """The run's folder, locked; all processes of one run share the lock of the first.

  Raises:
    UserError: another run is under way there, or this one would replace what is there.
  """
  with contextlib.ExitStack() as held:
    with sync_errors():
      if jax.process_index() == 0:
        held.enter_context(locked(resolved.folder))
        check_replaces_nothing(resolved.config)
    if resolved.config.checkpoint.enable_checkpointing:
      check_shared(resolved.folder)
    yield


def _checkpointer(resolved: ResolvedRun, dataset: Dataset, chronicle: Chronicle) -> Checkpointer:
  return Checkpointer(
    resolved.folder.checkpoints,
    resolved.config.checkpoint,
    identity(resolved.config, dataset),
    chronicle.say,
    settings=settings(resolved.given),
    verified=chronicle.verified,
  )


def _restore(
  resolved: ResolvedRun,
  trainer: Trainer,
  checkpointer: Checkpointer,
  beginning: Beginning,
  method: Method,
) -> _Start:
  """The newest good checkpoint of the run's folder, or the beginning, and the plan from there."""
  restored = None
  if resolved.config.checkpoint.enable_checkpointing:
    restored = checkpointer.restore(trainer.abstract_saved)
  position = restored.position if restored else beginning.position
  if restored:
    print(f"Resuming after step {position.step} ({position.samples:,} samples)", flush=True)
    if line := key_that_is_over(resolved.config.checkpoint):
      print(line, flush=True)
  plan = resolved.plan
  make_meter = functools.partial(method.meter, resolved.config, trainer.model)
  noise = make_noise(resolved.config, plan, make_meter, resolved.folder.path)
  if noise:
    noise.restore(restored.notes if restored else {}, position)
    plan = noise.planned(plan)
  plan = plan.starting_at(position)
  check_loads(plan, streamed=streams(resolved.config))
  if plan.phases != resolved.plan_ahead.phases:
    print(f"{for_screen(str(plan))}\n", flush=True)
  if restored:
    _print_changes(plan, restored)
  elif position.step >= plan.steps:
    raise UserError(no_steps_left(resolved.config, plan, position))
  if position.step:
    trainer = following(trainer, resolved.config, plan)
  return _Start(beginning, position, restored, plan, trainer, noise)


def _as_decided(start: _Start) -> BatchPlan:
  """The plan with what the noise scale has decided since."""
  return start.noise.planned(start.plan).starting_at(start.position) if start.noise else start.plan


def _print_changes(plan: BatchPlan, restored: Restored) -> None:
  """Says if the batch schedule is another one than that of the run that wrote the checkpoint."""
  before, now = restored.plan.get("batch_schedule"), plan.as_dict()["batch_schedule"]
  if before != now:
    print(
      f"The batch schedule is another one from sample {restored.position.samples:,} on: "
      f"{now} instead of {before} ([from {plan.schedule.unit}, samples per step])"
    )


def _train(
  resolved: ResolvedRun,
  start: _Start,
  dataset: Dataset,
  checkpointer: Checkpointer,
  method: Method,
  chronicle: Chronicle,
  texts: SampleTexts,
) -> tuple[TrainState, Position]:
  """Compiles and trains from `start` to the end of the plan, or until a signal."""
  config, plan, trainer, position = resolved.config, start.plan, start.trainer, start.position
  compiler = step_compiler(config, plan, trainer, dataset.train)
  with sync_errors():
    first = jax.process_index() == 0
    records = _metrics_log(resolved, position, chronicle) if first else NoMetricsLog()
  with (
    records as log,
    Progress(position.step, plan.steps, config.run.log_period) as progress,
    StepPrograms(compiler, plan.micro_batches) as programs,
    calibration_programs(config, plan, resolved.target.devices, dataset.train) as calibration,
  ):
    _write_config(config, start, resolved.folder)
    if position.step == 0:
      log.write_text("plan", 0, str(plan))
      log.write_text("configuration", 0, yaml.safe_dump(to_flat_dict(config), sort_keys=False))
    if start.noise:
      start.noise.write_decisions()
    began = time.perf_counter()
    state, eval_step = _compile_and_init(config, start, dataset, programs)
    seconds = time.perf_counter() - began
    progress.say(f"\nCompiled in {seconds:.1f} s\n")
    chronicle.events.note(COMPILED, seconds=seconds)
    if config.compile.save_compiled_step:
      save_steps(config, plan, trainer, dataset.train, programs.all())
    profiler = Profiler(config.profiling, resolved.folder.profile, position.step)
    watchdog = Watchdog(config.distributed.hang_timeout_seconds)
    job = Job(
      plan=plan,
      run=config.run,
      checkpoint=config.checkpoint,
      learning_rate=learning_rate(config.optimizer, plan, config.run.schedule_unit),
      programs=programs,
      streamed=streams(config),
      trainer=trainer,
      eval_step=eval_step,
      train_rows=train_rows(config, trainer, dataset),
      row_hosts=row_hosts(trainer, plan),
      eval_rows=eval_rows(config, plan, trainer, dataset),
      checkpointer=checkpointer if config.checkpoint.enable_checkpointing else None,
      log=log,
      progress=progress,
      feed_watchdog=watchdog.feed,
      profiler=profiler,
      noise=start.noise and dataclasses.replace(start.noise, calibration=calibration),
      data_counts=_data_counts(config, dataset),
      notes=start.notes(state),
      events=chronicle.events,
      sample_text=texts if config.run.generate_length else None,
      evaluated=chronicle.page.update,
    )
    if start.restored and first:
      _complete_records(log, start.restored)
    with profiler, method.equipped(job, resolved, start.restored) as ready:
      if position.step == 0:
        first_record(ready, state.parameters)
        show_text(ready, position, state.parameters)
        if config.run.generate_length:
          texts.keep()
      report = precision_report(config, ready, resolved.folder, position)
      if report:
        report.write(state.parameters, position.step)
      with ending_together(alone=True), watchdog:
        trained = train(ready, state, position)
      if report:
        report.write(trained[0].parameters, trained[1].step)
    if profiler.traced:
      size = plan.phase_at(plan.samples_at(profiler.traced.first)).micro_batch
      write_profile(resolved.folder, profiler.traced, programs(size))
  if waited := progress.data_wait():
    print(f"\n{waited}", flush=True)
  return trained


def _metrics_log(resolved: ResolvedRun, position: Position, chronicle: Chronicle) -> MetricsLog:
  """metrics.jsonl, and what metrics_writers names."""
  config = resolved.config
  return MetricsLog(
    resolved.folder.path,
    position.step,
    chronicle.say,
    open_others=functools.partial(
      open_writers, config.run.metrics_writers, plugins=config.run.plugins
    ),
    keys=to_flat_dict(config),
  )


def _data_counts(config: Config, dataset: Dataset) -> Record:
  """How many records were skipped, where any may be."""
  if config.data.max_bad_records == 0:
    return {}
  return {"data/skipped_records": dataset.num_skipped_records}


def _complete_records(log: MetricsLog, restored: Restored) -> None:
  """Writes the record of the checkpoint's step, if kill -9 came between its save and its record.

  A branch has the checkpoint of another run, and no record before its own first step.
  """
  last = log.last_step
  if RECORD in restored.notes and last is not None and last < restored.position.step:
    log.write(restored.notes[RECORD])


def _compile_and_init(
  config: Config, start: _Start, dataset: Dataset, programs: StepPrograms
) -> tuple[TrainState, EvalStep | None]:
  """State and compiled functions, side by side: compiling leaves the interpreter free."""
  plan, trainer = start.plan, start.trainer
  pool = ThreadPoolExecutor(2)
  try:
    first_step = pool.submit(programs, plan.phases[0].micro_batch)
    evaluation = None
    if dataset.validation or dataset.validation_by_source:
      rows = dataset.validation or dataset.train
      evaluation = pool.submit(compiled_eval, plan, trainer, rows)
    if start.restored:
      state = resumed_state(config, trainer, start.restored)
    else:
      state = start.beginning.state(trainer, config.model.init_weights_seed)
    first_step.result()
    eval_step = evaluation and evaluation.result()
  finally:
    pool.shutdown(wait=False, cancel_futures=True)  # An error or a signal waits for no compiler.
  return state, eval_step


def _write_config(config: Config, start: _Start, folder: RunFolder) -> None:
  """config.yml, every key and what was derived from them; and the same among those of all starts."""
  derived = {"begins_after_step": start.position.step} | start.plan.as_dict()
  content = yaml.safe_dump(to_flat_dict(config) | {DERIVED: derived}, sort_keys=False)
  write_shared_file(folder.next_start(), content)
  write_shared_file(folder.config, content)
