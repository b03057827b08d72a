"""What the training loop is given: a job, and what a way to train adds to it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from maxbatch.batch.learning_rate import LearningRate
from maxbatch.checkpoints.checkpointer import Checkpointer
from maxbatch.config.schema import CheckpointConfig, RunConfig
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.loader import EvalRows
from maxbatch.models.registry import Parameters
from maxbatch.run_folder.events import EventLog, NoEventLog
from maxbatch.run_folder.metrics import MetricsLog, Record
from maxbatch.run_folder.progress import Progress
from maxbatch.training.evaluation import EvalStep
from maxbatch.training.noise_run import Noise
from maxbatch.training.profiling import Profiler
from maxbatch.training.programs import StepPrograms
from maxbatch.training.step import StepMetrics, Trainer

RECORD = "record"
"""In a checkpoint's notes: the record of its step, which metrics.jsonl may lack after kill -9."""
LOSS_SCALE = "loss_scale"
"""In a checkpoint's notes: the loss scale and its history, where the loss is scaled."""


class StepLoader(Protocol):
  """What brings the arrays that steps are fed, one dispatch after the other."""

  def __next__(self) -> Any:
    """Returns the batch of the next dispatch."""
    ...

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

  def dispatched(self, metrics: StepMetrics) -> None:
    """Runs after each dispatch of training, whose metrics may still be on the devices."""

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
