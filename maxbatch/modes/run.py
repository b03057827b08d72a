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

from maxbatch.batch.from_config import follows_noise_scale
from maxbatch.batch.host_loads import check_loads
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.checkpoints.checkpointer import Checkpointer, Restored
from maxbatch.checkpoints.record import identity, settings
from maxbatch.command_line.screen import for_screen
from maxbatch.compile.step_cache import step_compiler
from maxbatch.compile.step_file import check_loads_step, made_from, save_steps
from maxbatch.config.load import DERIVED, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.conversion.source import FROZEN
from maxbatch.core.phases import Position
from maxbatch.core.plan import BatchPlan
from maxbatch.data.mixture import MixedRows
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.hardware.agreement import check_shared, sync_errors, write_shared_file
from maxbatch.hardware.ending import Watchdog, ending_together
from maxbatch.metrics_writers.registry import open_writers
from maxbatch.modes.initialization import (
  ignored_key,
  no_steps_left,
  resumed_state,
)
from maxbatch.modes.method import Method, Purpose, ResolvedRun
from maxbatch.modes.prepare import Prepared, check_replaces_nothing, prepare
from maxbatch.modes.pretraining import PRETRAINING, calibration_programs, make_noise
from maxbatch.modes.run_log import RunLog, open_run_log, precision_report, write_profile
from maxbatch.modes.start import connected_devices, started
from maxbatch.modes.summary import (
  SampleTexts,
  print_next,
  show_sample,
  sum_up,
)
from maxbatch.run_folder.atomic import locked
from maxbatch.run_folder.events import COMPILED, DROPPED
from maxbatch.run_folder.metrics import MetricsLog, NoMetricsLog
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.progress import Progress
from maxbatch.training.build import (
  compiled_eval,
  eval_rows,
  following,
  row_hosts,
  streams,
  train_rows,
)
from maxbatch.training.evaluation import EvalStep
from maxbatch.training.job import RECORD, Evaluation, Job, Outputs, Profiler
from maxbatch.training.loop import first_record, show_text, train
from maxbatch.training.loss_scaling import nothing_learned
from maxbatch.training.noise_run import Noise, StepPrograms
from maxbatch.training.state import TrainState
from maxbatch.training.step import Trainer


@dataclasses.dataclass(frozen=True)
class _Start:
  """Where a run begins or resumes, and what it is from there on."""

  position: Position
  restored: Restored | None
  plan: BatchPlan
  trainer: Trainer
  noise: Noise | None

  def plan_as_decided(self) -> BatchPlan:
    """Returns the plan with what the noise scale has decided since."""
    return self.noise.planned(self.plan).starting_at(self.position) if self.noise else self.plan


def run(
  config: Config, *, retune: bool = False, advise: bool = True, method: Method = PRETRAINING
) -> tuple[TrainState, Position]:
  """Prepares, trains and sums up one run; returns its state and position at the end.

  Args:
    advise: end with commands that go on from here; not so where another command sets the budget.

  Raises:
    UserError: something in the configuration or the input does not work.
    TrainingDivergedError: the loss or a gradient is not finite.
    RowsError: a row did not reach its device as it was read.
  """
  with started(config), ending_together():
    prepared = prepare(config, connected_devices(config), method, Purpose.RUN, retune=retune)
    print(for_screen(prepared.description), flush=True)
    _check_compiled_step(prepared)
    write_report, folder = prepared.config.run.write_report, prepared.resolved.folder
    with (
      _held_by_one_process(prepared.resolved),
      open_run_log(folder.path, write_report=write_report) as run_log,
    ):
      return _run_in_folder(prepared, run_log, advise=advise)


def check_learned(state: TrainState, position: Position) -> None:
  """Refuses to call a run that is over, and saved, a success if every step was skipped.

  Raises:
    TrainingDivergedError: so it was.
  """
  if said := nothing_learned(state.loss_scale, position.step):
    raise TrainingDivergedError(said)


def _check_compiled_step(prepared: Prepared) -> None:
  """Refuses a file compiled_step that is not this run's before the run's folder is there.

  Where the run resumes, its steps are known only once a checkpoint is restored.

  Raises:
    UserError: the file cannot be read, or its steps are another run's.
  """
  resolved, config = prepared.resolved, prepared.config
  if not config.compile.compiled_step:
    return
  if resolved.saved or resolved.begins.step or follows_noise_scale(config.batch):
    made_from(config.compile.compiled_step)
  else:
    check_loads_step(config, prepared.plan, prepared.trainer, prepared.dataset.train)


def _run_in_folder(
  prepared: Prepared, run_log: RunLog, *, advise: bool
) -> tuple[TrainState, Position]:
  """Trains from where the folder's newest checkpoint is, and sums up."""
  resolved, dataset = prepared.resolved, prepared.dataset
  with _checkpointer(prepared, run_log) as checkpointer:
    start = _restore(prepared, checkpointer)
    if start.restored and start.position.step >= start.plan.steps:
      more = " For more, raise its budget." if advise else ""
      print(f"This run is complete at step {start.position.step}.{more}")
      state = resumed_state(resolved.config, start.trainer, start.restored)
      show_sample(resolved, start.trainer, state.parameters)
      return state, start.position
    run_log.begin(start.position, list(start.trainer.mesh.devices.flat), prepared.description)
    texts = SampleTexts(resolved, prepared.trainer)
    state, reached = _train(prepared, start, checkpointer, run_log, texts)
  plan = start.plan_as_decided()
  skipped = nothing_learned(state.loss_scale, reached.step)
  how = "finished" if reached.step == plan.steps else "stopped"
  run_log.end("diverged" if skipped else how, reached.step, skipped)
  sum_up(resolved, plan, reached, texts.latest, skipped)
  if isinstance(dataset.train, MixedRows):
    print(dataset.train.report(reached.samples))
  written = run_log.page.finish()
  if advise:
    print_next(resolved, plan, reached, has_report=written)
  if start.noise:
    print(f"  batch:   {start.noise.meter.line(plan.batch_at(reached.samples))}")
  return state, reached


@contextlib.contextmanager
def _held_by_one_process(resolved: ResolvedRun) -> Iterator[None]:
  """Locks the run's folder; all processes of one run share the lock of the first.

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


def _checkpointer(prepared: Prepared, run_log: RunLog) -> Checkpointer:
  resolved = prepared.resolved
  return Checkpointer(
    resolved.folder.checkpoints,
    resolved.config.checkpoint,
    identity(resolved.config, prepared.dataset),
    run_log.say,
    settings=settings(resolved.given),
    verified=run_log.verified,
  )


def _restore(prepared: Prepared, checkpointer: Checkpointer) -> _Start:
  """Restores the newest good checkpoint of the run, or the initialization, and plans from there."""
  config, plan, trainer = prepared.config, prepared.plan, prepared.trainer
  restored, position = None, prepared.initialization.position
  if config.checkpoint.enable_checkpointing:
    restored = checkpointer.restore(trainer.abstract_saved)
  if restored:
    position = restored.position
    print(f"Resuming after step {position.step} ({position.samples:,} samples)", flush=True)
    if line := ignored_key(config.checkpoint):
      print(line, flush=True)
  make_meter = functools.partial(prepared.resolved.training.meter, trainer.model)
  noise = make_noise(config, plan, make_meter, prepared.resolved.folder.path)
  if noise:
    noise.restore(restored.notes if restored else {}, position)
    plan = noise.planned(plan)
  plan = plan.starting_at(position)
  check_loads(plan, streamed=streams(config))
  if plan.phases != prepared.resolved.plan_ahead.phases:
    print(f"{for_screen(str(plan))}\n", flush=True)
  if restored:
    _print_changes(plan, restored)
  elif position.step >= plan.steps:
    raise UserError(no_steps_left(config, plan, position))
  if position.step:
    trainer = following(trainer, config, plan)
  return _Start(position, restored, plan, trainer, noise)


def _print_changes(plan: BatchPlan, restored: Restored) -> None:
  """Says if the batch schedule is another one than that of the run that wrote the checkpoint."""
  before, now = restored.plan.get("batch_schedule"), plan.as_dict()["batch_schedule"]
  if before != now:
    print(
      f"The batch schedule is another one from sample {restored.position.samples:,} on: "
      f"{now} instead of {before} ([from {plan.schedule.unit}, samples per step])"
    )


def _train(
  prepared: Prepared,
  start: _Start,
  checkpointer: Checkpointer,
  run_log: RunLog,
  texts: SampleTexts,
) -> tuple[TrainState, Position]:
  """Compiles and trains from `start` to the end of the plan, or until a signal."""
  config, resolved, dataset = prepared.config, prepared.resolved, prepared.dataset
  plan, trainer, position = start.plan, start.trainer, start.position
  compiler = step_compiler(config, plan, trainer, dataset.train)
  with sync_errors():
    first = jax.process_index() == 0
    records = _metrics_log(resolved, position, run_log) if first else NoMetricsLog()
  with (
    records as log,
    Progress(position.step, plan.steps, config.run.log_period) as progress,
    StepPrograms(compiler, plan.micro_batches) as programs,
    calibration_programs(config, plan, resolved.target.devices, dataset.train) as calibration,
  ):
    _write_start(config, start, resolved.folder, log)
    began = time.perf_counter()
    state, eval_step = _compile_and_init(prepared, start, programs)
    seconds = time.perf_counter() - began
    progress.say(f"\nCompiled in {seconds:.1f} s{trainer.compiler_flags.note}\n")
    run_log.events.note(COMPILED, seconds=seconds)
    if start.restored and (account := run_log.events.account(log.times)):
      progress.say(for_screen(f"{account}\n"))
    if config.compile.save_compiled_step:
      save_steps(config, plan, trainer, dataset.train, programs.all())
    profiler = Profiler(config.profiling, resolved.folder.profile, position.step)
    watchdog = Watchdog(config.distributed.hang_timeout_seconds)
    outputs = Outputs(
      log=log,
      progress=progress,
      profiler=profiler,
      checkpointer=checkpointer if config.checkpoint.enable_checkpointing else None,
      events=run_log.events,
      feed_watchdog=watchdog.feed,
      evaluated=run_log.page.update,
    )
    sample_text = texts if config.run.generate_length else None
    job = Job(
      plan=plan,
      run=config.run,
      checkpoint=config.checkpoint,
      learning_rate=learning_rate(config.optimizer, plan, config.run.schedule_unit),
      trainer=trainer,
      programs=programs,
      train_rows=train_rows(config, trainer, dataset),
      row_hosts=row_hosts(trainer, plan),
      evaluation=Evaluation(eval_step, eval_rows(config, plan, trainer, dataset), sample_text),
      outputs=outputs,
      noise=start.noise and dataclasses.replace(start.noise, calibration=calibration),
      data_counts={"data/skipped_records": dataset.num_skipped_records}
      if config.data.max_bad_records
      else {},
      notes=_notes(prepared, start, state),
    )
    if start.restored and first:
      _complete_records(log, start.restored)
    with profiler, resolved.training.setup(job, start.restored) as ready:
      trained = _train_job(ready, config, state, position, watchdog, texts)
    if profiler.traced:
      size = plan.phase_at(plan.samples_at(profiler.traced.first)).micro_batch
      write_profile(resolved.folder, profiler.traced, programs(size))
  if waited := progress.data_wait():
    print(f"\n{waited}", flush=True)
  if account := run_log.events.account(log.times):
    print(for_screen(str(account)), flush=True)
  return trained


def _train_job(
  job: Job,
  config: Config,
  state: TrainState,
  position: Position,
  watchdog: Watchdog,
  texts: SampleTexts,
) -> tuple[TrainState, Position]:
  """Trains, between what is noted of the state before and afterwards."""
  if position.step == 0:
    first_record(job, state.parameters)
    show_text(job, position, state.parameters)
    if config.run.generate_length:
      texts.keep()
  report = precision_report(config, job, RunFolder.of(config.run), position)
  if report:
    report.write(state.parameters, position.step)
  with ending_together(alone=True), watchdog:
    trained = train(job, state, position)
  if report:
    report.write(trained[0].parameters, trained[1].step)
  return trained


def _notes(prepared: Prepared, start: _Start, state: TrainState) -> dict[str, Any]:
  if start.restored:
    return {name: note for name, note in start.restored.notes.items() if name == FROZEN}
  return prepared.initialization.notes(start.trainer, state)


def _metrics_log(resolved: ResolvedRun, position: Position, run_log: RunLog) -> MetricsLog:
  config = resolved.config
  log = MetricsLog(
    resolved.folder.path,
    position.step,
    run_log.say,
    open_others=functools.partial(
      open_writers, config.run.metrics_writers, plugins=config.run.plugins
    ),
    keys=to_flat_dict(config),
  )
  if log.dropped.num_steps:
    steps, seconds, _ = log.dropped
    run_log.events.note(DROPPED, steps=steps, seconds=seconds)
  return log


def _complete_records(log: MetricsLog, restored: Restored) -> None:
  """Writes the record of the checkpoint's step, if kill -9 came between its save and its record.

  A branch has the checkpoint of another run, and no record before its own first step.
  """
  last = log.last_step
  if RECORD in restored.notes and last is not None and last < restored.position.step:
    log.write(restored.notes[RECORD])


def _compile_and_init(
  prepared: Prepared, start: _Start, programs: StepPrograms
) -> tuple[TrainState, EvalStep | None]:
  """Returns state and compiled functions, made side by side: compiling frees the interpreter."""
  plan, trainer, dataset = start.plan, start.trainer, prepared.dataset
  pool = ThreadPoolExecutor(2)
  try:
    first_step = pool.submit(programs, plan.phases[0].micro_batch)
    evaluation = None
    if dataset.validation or dataset.validation_by_source:
      rows = dataset.validation or dataset.train
      evaluation = pool.submit(compiled_eval, plan, trainer, rows)
    if start.restored:
      state = resumed_state(prepared.config, trainer, start.restored)
    else:
      state = prepared.initialization.state(trainer, prepared.config.model.init_weights_seed)
    first_step.result()
    eval_step = evaluation and evaluation.result()
  finally:
    pool.shutdown(wait=False, cancel_futures=True)  # An error or a signal waits for no compiler.
  return state, eval_step


def _write_start(config: Config, start: _Start, folder: RunFolder, log: MetricsLog) -> None:
  """Writes config.yml, every key and what was derived from them, also among those of all starts."""
  keys = to_flat_dict(config)
  derived = {"begins_after_step": start.position.step} | start.plan.as_dict()
  content = yaml.safe_dump(keys | {DERIVED: derived}, sort_keys=False)
  write_shared_file(folder.next_start(), content)
  write_shared_file(folder.config, content)
  if start.position.step == 0:
    log.write_text("plan", 0, str(start.plan))
    log.write_text("configuration", 0, yaml.safe_dump(keys, sort_keys=False))
  if start.noise:
    start.noise.write_decisions()
