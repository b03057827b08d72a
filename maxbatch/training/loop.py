"""The training loop: batch, step, metrics of the step before, now and then eval and checkpoint."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from maxbatch.command_line.signals import StopSignals
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.loader import EvalRows
from maxbatch.data.placement import WrongRowError
from maxbatch.data.rows import check_rows
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.hardware.devices import host_peak_bytes
from maxbatch.models.registry import Parameters
from maxbatch.precision.loss_scale import LossScaling
from maxbatch.run_folder.events import COPIED, EVALUATED, SAVED, TEXT
from maxbatch.run_folder.metrics import Record
from maxbatch.training.job import LOSS_SCALE, RECORD, DeviceClock, Job, StepLoader
from maxbatch.training.loss_scaling import check_skips, scaling_record
from maxbatch.training.metrics import by_name, token_values
from maxbatch.training.noise_run import decided, decides
from maxbatch.training.state import TrainState, has_flags, stop_flags
from maxbatch.training.step import StepMetrics


@dataclasses.dataclass(frozen=True)
class _Pending:
  """A step whose metrics may still be on the devices."""

  before: Position
  position: Position
  learning_rate: float
  data_wait_seconds: float
  metrics: StepMetrics
  seconds: Callable[[], float]
  """From the end of the step before, on the devices; waits for this one's."""


def train(job: Job, state: TrainState, position: Position) -> tuple[TrainState, Position]:
  """Trains from `position` to the end of the plan, or to the first stop signal.

  Returns the state and how far it came; all of it is saved. Metrics of a step are fetched after
  the next one is dispatched, so that the devices never wait for the host (but see `Hooks.waits`).

  Raises:
    TrainingDivergedError: a loss or gradient is not finite, and nothing of that step is saved; or
      the validation loss is not, and what was due to be saved is. With a loss scale such steps are
      skipped, until there are max_consecutive_skipped_steps in a row.
    RowsError: a row of a step is not what was read for it, and nothing of that step is saved.
  """
  job.outputs.progress.begin()
  with StopSignals(shared=has_flags(job.trainer.mesh)) as stop, DeviceClock() as clock:
    ended = False
    while not ended:
      state, position, plan, ended = _train_until_change(job, state, position, clock, stop)
      job = job.with_plan(plan)
    if job.outputs.checkpointer:
      job.outputs.checkpointer.wait()  # Afterwards a signal ends everything at once.
  return state, position


def _train_until_change(
  job: Job, state: TrainState, position: Position, clock: DeviceClock, stop: StopSignals
) -> tuple[TrainState, Position, BatchPlan, bool]:
  """Trains until the noise scale changes the plan, or to the end or a stop signal: then True."""
  since, pending, plan = time.perf_counter(), None, job.plan
  ending = position.step >= plan.steps
  job.hooks.publish(position, state.parameters)
  job.outputs.profiler.turn(position.step, state, ending=ending)
  with job.train_rows(plan, position) as loader:
    while not ending and plan is job.plan:
      rate = job.learning_rate(position)
      try:
        state, metrics = _dispatch(job, state, loader, position, rate, stop)
      except Exception:  # Whatever it is: the step before has a record.
        if pending:
          _note(job, _fetch(job, pending, stop))
        raise
      seconds = clock.timed(metrics, since)
      before, position = position, plan.advance(position)
      job.hooks.publish(position, state.parameters)
      if pending:
        _note(job, _fetch(job, pending, stop))
      pending = _Pending(before, position, rate, loader.waited_seconds(), metrics, seconds)
      ending = stop.agreed or position.step == plan.steps
      evaluating = ending or _due(job, before, position, job.run.eval_interval)
      saving = ending or _due(job, before, position, job.checkpoint.checkpoint_period)
      copying = not ending and _copy_due(job, position)
      profiling = job.outputs.profiler.is_due(position.step)
      due = evaluating or saving or copying or profiling or decides(job.noise, position)
      if due or job.hooks.waits:
        record, evaluation = _fetch(job, pending, stop), {}
        pending = None
        try:
          job.outputs.profiler.turn(position.step, state, ending=ending)
          plan = decided(job.noise, plan, position, job.outputs.progress.say)
          if saving:
            _save(job, state, position, plan, record)
          if copying:
            _copy(job, state, position, plan, record)
          if evaluating:
            evaluation = _timed_evaluation(job, position.step, state.parameters)
        finally:  # Without what fails or is interrupted.
          account = job.outputs.events.account(job.outputs.log.times.plus(record))
          _note(job, record | evaluation | (account.record() if account else {}))
        if evaluating and (not ending or position.step == plan.steps):
          show_text(job, position, state.parameters)
          if not ending:
            job.outputs.evaluated()
        since = time.perf_counter()
  return state, position, plan, ending


def _dispatch(
  job: Job,
  state: TrainState,
  loader: StepLoader,
  position: Position,
  rate: float,
  stop: StopSignals,
) -> tuple[TrainState, StepMetrics]:
  """Sends one whole step to the devices.

  Raises:
    RowsError: a row of it is not what was read for it.
  """
  trainer = job.trainer
  phase, learning_rate = job.plan.phase_at(position.samples), np.float32(rate)
  programs = job.programs
  if job.noise is not None:
    programs = job.noise.programs_at(position.step, programs)
    state = job.noise.ready(position.step, state)
  step, num_microbatches = programs(phase.micro_batch), phase.num_microbatches
  dispatches = num_microbatches if trainer.streamed else 1
  wrong, metrics = [], None

  def rows_of(dispatch: int) -> Any:
    try:
      return next(loader)
    except WrongRowError as error:
      unknown = [None] * (dispatch - len(wrong))
      _check_rows(job, position, [*wrong, *unknown, error.place])
      raise

  batches: Iterable[Any] = map(rows_of, range(dispatches))
  denominators = None
  if trainer.needs_denominators:
    batches = list(batches)
    denominators = trainer.denominators(batches, state.parameters)
  of_step = trainer.microbatches(num_microbatches, denominators)
  for number, rows in enumerate(batches, 1):
    flags = stop_flags(trainer.mesh, number == dispatches and stop.requested)
    inputs = rows, of_step, learning_rate, *(() if flags is None else (flags,))
    began = time.perf_counter()
    state, metrics = step(state, *inputs)
    job.hooks.dispatched(metrics, began)
    wrong.append(metrics.wrong_row)
  assert metrics is not None
  return state, metrics._replace(wrong_row=tuple(wrong))


def _due(job: Job, before: Position, after: Position, period: int) -> bool:
  return job.plan.is_due(before, after, period, job.run.schedule_unit)


def _fetch(job: Job, pending: _Pending, stop: StopSignals) -> Record:
  """Waits for a step to end; its record.

  Raises:
    TrainingDivergedError: it is not finite.
    RowsError: a row is not what was read for it.
  """
  metrics = jax.device_get(pending.metrics)
  job.outputs.feed_watchdog()
  stop.hear(metrics.stop)
  loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
  seconds, plan, position = pending.seconds(), job.plan, pending.position
  phase = plan.phase_at(pending.before.samples)
  _check_rows(job, pending.before, jax.tree.leaves(metrics.wrong_row))
  scaling = metrics.scaling
  is_skipped = scaling is not None and bool(scaling.is_skipped)
  if scaling is not None and job.trainer.loss_scaling is not None and is_skipped:
    limits = job.trainer.loss_scaling
    check_skips(limits, scaling, position.step, loss, lambda: _last_good(job))
  elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
    raise TrainingDivergedError(
      f"step {position.step}: loss={loss} and grad_norm={grad_norm}, which must be finite; "
      f"{_kept(job)}"
    )
  noise = job.noise.observe(pending.before.step, metrics) if job.noise and not is_skipped else {}
  record = (
    {
      "step": position.step,
      "samples": position.samples,
      "tokens": plan.tokens(position.samples),
      "loss": loss,
      "grad_norm": grad_norm,
      "learning_rate": pending.learning_rate,
      "global_batch_to_train": phase.batch,
      "micro_batch_to_train": phase.micro_batch,
      "gradient_accumulation_steps": phase.num_microbatches,
      "step_seconds": seconds,
      "data_wait_seconds": pending.data_wait_seconds,
      "tokens_per_second": plan.tokens(phase.batch) / seconds,
    }
    | by_name(metrics.metrics)
    | scaling_record(scaling)
    | noise
    | job.data_counts
  )
  # Of a skipped step some figures are not finite: not measured.
  return job.hooks.completed(
    {name: x for name, x in record.items() if math.isfinite(x)} if is_skipped else record
  )


def _check_rows(job: Job, before: Position, wrong: Sequence[int | None]) -> None:
  size, where = job.plan.phase_at(before.samples).micro_batch, f"step {before.step + 1}"
  hosts = functools.partial(job.row_hosts, size)

  def saved() -> str:
    return f"{_last_good(job)}. Nothing of that step is saved"

  check_rows(wrong, where, before.samples, size, hosts, saved)


def _note(job: Job, record: Record) -> None:
  job.outputs.log.write(record)
  job.outputs.progress.show(record)
  if job.noise is not None:
    job.noise.report(record, job.outputs.progress.say)
  if job.outputs.checkpointer:
    job.outputs.checkpointer.poll()


def _save(job: Job, state: TrainState, position: Position, plan: BatchPlan, record: Record) -> None:
  """Saves what a run needs to go on; before an evaluation, for which there may be no time left."""
  if job.outputs.checkpointer:
    notes = _notes(job, state, record)
    began = time.perf_counter()
    saved = job.trainer.to_save(state, job.hooks.policies(position))
    job.outputs.checkpointer.save(saved, position, plan.as_dict(), notes)
    job.outputs.events.note(SAVED, step=position.step, seconds=time.perf_counter() - began)
    job.outputs.feed_watchdog()


def _notes(job: Job, state: TrainState, record: Record) -> dict[str, Any]:
  """Returns what is noted beside a saved state."""
  notes = {RECORD: record} | job.notes | (job.noise.as_dict() if job.noise else {})
  if state.loss_scale is not None:
    notes[LOSS_SCALE] = LossScaling.note(state.loss_scale)
  return notes


def _copy_due(job: Job, position: Position) -> bool:
  return job.outputs.checkpointer is not None and job.outputs.checkpointer.copy_due(position)


def _copy(job: Job, state: TrainState, position: Position, plan: BatchPlan, record: Record) -> None:
  """Copies to the memory of hosts what a run needs to go on, where supervisors keep it."""
  assert job.outputs.checkpointer is not None
  notes, saved = (
    _notes(job, state, record),
    job.trainer.to_save(state, job.hooks.policies(position)),
  )
  seconds = float(record["step_seconds"])
  about = job.outputs.checkpointer.copy(saved, position, plan.as_dict(), notes, seconds)
  job.outputs.events.note(COPIED, step=position.step, **about)
  job.outputs.feed_watchdog()


def _timed_evaluation(job: Job, step: int, params: Parameters) -> Record:
  """Evaluates; notes how long it took, and the memory that the run has needed until then."""
  began = time.perf_counter()
  result = evaluate(job, params)
  peaks = [device.memory_stats() for device in job.trainer.mesh.local_devices]
  known = [peak["peak_bytes_in_use"] for peak in peaks if peak and "peak_bytes_in_use" in peak]
  on_devices = {"device_peak_bytes": max(known)} if known else {}
  seconds, on_host = time.perf_counter() - began, host_peak_bytes()
  memory = {"host_peak_bytes": on_host, **on_devices}
  job.outputs.events.note(EVALUATED, step=step, seconds=seconds, **memory)
  return result


def show_text(job: Job, position: Position, params: Parameters) -> None:
  """Has the model write, if the run asks for texts, and notes what it wrote."""
  if job.evaluation.sample_text is None:
    return
  began = time.perf_counter()
  text = job.evaluation.sample_text(params)
  seconds = time.perf_counter() - began
  job.outputs.events.note(TEXT, step=position.step, text=text, seconds=seconds)
  job.outputs.log.write_text("text", position.step, text)
  job.outputs.feed_watchdog()


def evaluate(job: Job, params: Parameters) -> Record:
  """Returns loss (nats) and metrics per token of the validation batches; {} without validation data.

  Of a mixture the sources' own too, and for the whole their means by the sources' shares.
  """
  record: Record = {}
  for each in job.evaluation.rows:
    for name, value in _evaluated(job, each, params).items():
      record[f"eval/{name}"] = record.get(f"eval/{name}", 0.0) + each.share * value
      if each.name:
        record[f"eval/{name}/{each.name}"] = value
  return record | job.hooks.evaluate(params)


def _evaluated(job: Job, rows: EvalRows, params: Parameters) -> Record:
  """Returns loss and metrics per token of the rows.

  Raises:
    TrainingDivergedError: the loss is not finite.
    RowsError: a row is not what was read for it.
    UserError: no token counts.
  """
  assert job.evaluation.step is not None
  with rows.open() as batches:
    # Each is fetched before the next begins: simulated devices have threads for two programs under
    # way (hardware/devices.py), and the other may be reading a checkpoint back.
    sums, wrong = [], []
    try:
      for batch in batches:
        result = jax.device_get(job.evaluation.step(params, batch))
        sums.append(result._replace(wrong_row=None))
        wrong.append(result.wrong_row)
        job.outputs.feed_watchdog()
    except WrongRowError as error:
      wrong.append(error.place)
  of_source = f" of {rows.name}" if rows.name else ""
  size = job.plan.eval_batch
  hosts, saved = functools.partial(job.row_hosts, size), functools.partial(_last_good, job)
  check_rows(wrong, f"validation{of_source}", 0, size, hosts, saved)
  total = jax.tree.map(lambda *each: sum(map(float, each)), *sums)
  if not total.weight:
    raise UserError(
      f"no token{of_source} of the validation data counts in the loss; give others (eval_dataset_path, "
      "grain_eval_files or hf_eval_files), or none: eval_fraction=0"
    )
  loss = total.loss / total.weight
  if not math.isfinite(loss):
    raise TrainingDivergedError(
      f"the validation loss{of_source} is {loss}, which must be finite; {_kept(job)}"
    )
  metrics = token_values(total.metrics, total.weight)
  return {"loss": loss} | {name: float(value) for name, value in metrics.items()}


def _last_good(job: Job) -> str:
  """Says what is saved."""
  if job.outputs.checkpointer:
    job.outputs.checkpointer.wait()
  saved = job.outputs.checkpointer.steps() if job.outputs.checkpointer else []
  return f"the last good checkpoint is step {saved[-1]}" if saved else "there is no checkpoint"


def _kept(job: Job) -> str:
  """Says what is left when a run diverges, and what may help."""
  return (
    f"{_last_good(job)}. Nothing after it is saved. A lower learning_rate, a longer warmup_steps or a smaller "
    "gradient_clipping_threshold may help."
  )


def first_record(job: Job, params: Parameters) -> None:
  """Writes the record of step 0: the model before training, on the validation set."""
  evaluation = _timed_evaluation(job, 0, params)
  _note(job, {"step": 0, "samples": 0, "tokens": 0} | evaluation | job.data_counts)
