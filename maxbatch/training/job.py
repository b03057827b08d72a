"""What the training loop is given: a job, and what a way to train adds to it.

It may have a trace of chosen steps, by jax's profiler: an XPlane, which TensorBoard and xprof read too.
How long the devices are at a step, a clock in a thread says.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self

import jax

from maxbatch.batch.learning_rate import LearningRate
from maxbatch.checkpoints.checkpointer import Checkpointer
from maxbatch.config.schema import CheckpointConfig, ProfilingConfig, RunConfig
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.loader import EvalRows
from maxbatch.models.registry import Parameters
from maxbatch.run_folder.events import EventLog, NoEventLog
from maxbatch.run_folder.metrics import MetricsLog, Record
from maxbatch.run_folder.progress import Progress
from maxbatch.training.evaluation import EvalStep
from maxbatch.training.noise_run import Noise, StepPrograms
from maxbatch.training.state import TrainState
from maxbatch.training.step import StepMetrics, Trainer


class DeviceClock:
  """Waits, in a thread, for all that is dispatched to the devices, in that order; a context manager.

  When a dispatch returns says nothing: it may be at once, or, as on GPUs of a loop whose number of rounds
  is on the device, when nearly all is done. Devices run their programs in the order of dispatch. (A CPU
  that is one device runs several at once; the later then counts from the end of the earlier.)
  """

  def __init__(self) -> None:
    """Starts with nothing under way."""
    self._waiting = ThreadPoolExecutor(1, thread_name_prefix="device_clock")
    self._ended = 0.0

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._waiting.shutdown(wait=False, cancel_futures=True)

  def timed(self, result: object, since: float) -> Callable[[], float]:
    """Takes note of what was dispatched last; returns what waits for it, and gives its seconds.

    They end when the devices have made `result`, and begin where the one before ended, or at `since`
    (of time.perf_counter) if that is later.
    """
    return self._waiting.submit(self._until, result, since).result

  def _until(self, result: object, since: float) -> float:
    jax.block_until_ready(result)
    began, self._ended = max(since, self._ended), time.perf_counter()
    return self._ended - began


@dataclasses.dataclass(frozen=True)
class Traced:
  """Which steps to trace, counted as positions are: those after `first` up to `last`."""

  first: int
  last: int


class Profiler:
  """Traces some steps of a run; a context manager. In other processes than the first it waits alike."""

  def __init__(self, config: ProfilingConfig, folder: Path, begins: int):
    """Traces nothing yet, in a start that begins after step `begins`."""
    first = begins + config.skip_first_n_steps_for_profiler
    self._steps = Traced(first, first + config.profiler_steps) if config.profiler else None
    self._folder, self._is_tracing = folder, False
    self.traced: Traced | None = None
    """What was traced; None: nothing yet."""

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    if self._is_tracing:
      jax.profiler.stop_trace()

  def is_due(self, step: int) -> bool:
    """Returns whether a trace begins or ends after this step, which then has to be waited for."""
    return self._steps is not None and step in (self._steps.first, self._steps.last)

  def turn(self, step: int, state: TrainState, *, ending: bool = False) -> None:
    """Begins the trace after its step, and ends it after its last, or where the run ends.

    Waits for `state`, which those steps made, on all devices: the trace has whole steps.
    """
    if self._steps is None or not (ending or self.is_due(step)):
      return
    jax.block_until_ready(state)
    if self._is_tracing and (ending or step == self._steps.last):
      self._is_tracing = False
      jax.profiler.stop_trace()
      self.traced = Traced(self._steps.first, step)
    elif step == self._steps.first and not (ending or self._is_tracing or jax.process_index()):
      jax.profiler.start_trace(self._folder)
      self._is_tracing = True


RECORD = "record"
"""In a checkpoint's notes: the record of its step, which metrics.jsonl may lack after kill -9."""
LOSS_SCALE = "loss_scale"
"""In a checkpoint's notes: the loss scale and its history, where the loss is scaled."""


class StepLoader(Protocol):
  """What brings the arrays that steps are fed, one dispatch after the other."""

  def __next__(self) -> Any: ...

  def waited_seconds(self) -> float:
    """Returns how long `next` has waited for it to be made since this was last asked."""
    ...

  def __enter__(self) -> Self: ...

  def __exit__(self, *_: object) -> None: ...


class Hooks:
  """What a way to train adds to the loop; these add nothing."""

  waits: bool = False
  """Whether the loader waits for each step to end anyway, so that its metrics are fetched before more
  is loaded, and its seconds are its own."""

  def publish(self, position: Position, params: Parameters) -> None:
    """Receives the parameters before each step, which that step uses up."""

  def dispatched(self, metrics: StepMetrics, since: float) -> None:
    """Runs after each dispatch of training, which began at `since`; it may still be on the devices."""

  def completed(self, record: Record) -> Record:
    """Returns the record of a step with what else is known of it; raises where that is wrong."""
    return record

  def evaluate(self, params: Parameters) -> Record:
    """Returns what else an evaluation finds."""
    del params
    return {}

  def policies(self, position: Position) -> Sequence[Parameters]:
    """Returns those of earlier steps that a checkpoint needs (Trainer.num_saved_policies)."""
    del position
    return ()


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What is evaluated, and by which program."""

  step: EvalStep | None
  """None: there are no rows to evaluate on."""
  rows: Sequence[EvalRows]
  sample_text: Callable[[Parameters], str] | None = None
  """What the model writes, before the first step and at evaluations; None: nothing."""


@dataclasses.dataclass(frozen=True)
class Outputs:
  """Where the loop writes, and whom it tells how far it is."""

  log: MetricsLog
  progress: Progress
  profiler: Profiler
  checkpointer: Checkpointer | None
  events: EventLog = dataclasses.field(default_factory=NoEventLog)
  feed_watchdog: Callable[[], None] = lambda: None
  evaluated: Callable[[], None] = lambda: None
  """Is called when an evaluation is noted, but the last one."""


@dataclasses.dataclass(frozen=True)
class Job:
  """All that the loop needs, made ready: compiled functions, loaders and open files."""

  plan: BatchPlan
  run: RunConfig
  checkpoint: CheckpointConfig
  learning_rate: LearningRate
  trainer: Trainer
  programs: StepPrograms
  train_rows: Callable[[BatchPlan, Position], StepLoader]
  row_hosts: Callable[[int, int], str]
  evaluation: Evaluation
  outputs: Outputs
  hooks: Hooks = dataclasses.field(default_factory=Hooks)
  noise: Noise | None = None
  data_counts: Record = dataclasses.field(default_factory=dict)
  """What is known of the data before the first step; noted with every step."""
  notes: dict[str, Any] = dataclasses.field(default_factory=dict)
  """What every checkpoint notes beside what it saves."""

  def with_plan(self, plan: BatchPlan) -> "Job":
    """Returns the job after the plan has changed."""
    self.outputs.progress.expect(plan.steps)
    rate = dataclasses.replace(self.learning_rate, plan=plan)
    return dataclasses.replace(self, plan=plan, learning_rate=rate)
