"""The noise scale in a run: which program a step takes, what is reported, what is decided."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from maxbatch.batch.resume import check_can_continue
from maxbatch.core.noise_scale import Estimate
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.hardware.agreement import sync_errors
from maxbatch.models.registry import Model
from maxbatch.noise.controller import Steering
from maxbatch.run_folder.metrics import Record
from maxbatch.training.programs import StepPrograms
from maxbatch.training.state import TrainState, measured_by
from maxbatch.training.step import StepMetrics


class Meter(Protocol):
  """What takes in each step's metrics, in order, and knows the noise scale from them."""

  def is_calibration(self, step: int) -> bool:
    """Returns whether the update after `step` others measures all layers, to calibrate what the
    norms measure."""
    ...

  def model_at(self, step: int) -> Model:
    """Returns the model that the update after `step` others runs."""
    ...

  def observe(self, step: int, metrics: StepMetrics) -> Record:
    """Returns what the update after `step` others adds to its record; `metrics` are on the host."""
    ...

  def total(self) -> Estimate:
    """Returns the noise scale of the whole model."""
    ...

  def line(self, batch: int) -> str:
    """Says what is known, and what it means for steps of `batch` samples."""
    ...

  def as_dict(self) -> dict[str, Any]:
    """Returns plain JSON, from which a resumed run goes on as this one would."""
    ...

  def restore(self, content: Mapping[str, Any]) -> None:
    """Takes up what `as_dict` gave; a window of another length begins anew."""
    ...


@dataclasses.dataclass(frozen=True)
class Noise:
  """What a run needs to measure the noise scale, and to steer by it."""

  meter: Meter
  calibration: StepPrograms | None
  """The steps that measure all layers where others measure the normalization layers."""
  report_every: int
  steering: Steering | None
  folder: pathlib.Path

  def programs_at(self, step: int, ordinary: StepPrograms) -> StepPrograms:
    """Returns the programs for the update after `step` others."""
    calibrating = self.calibration if self.meter.is_calibration(step) else None
    return calibrating or ordinary

  def ready(self, step: int, state: TrainState) -> TrainState:
    """Returns the state as that program takes it: between steps its sums are zeros, in their own
    shapes."""
    return state if self.calibration is None else measured_by(state, self.meter.model_at(step))

  def observe(self, step: int, metrics: StepMetrics) -> Record:
    """Returns what the update after `step` others adds to its record; `metrics` are on the host."""
    if self.steering is not None:
      self.steering.observe(float(metrics.loss))
    return self.meter.observe(step, metrics)

  def report(self, record: Record, say: Callable[[str], None]) -> None:
    """Says what the batch of a step is worth, when it is time to."""
    if self.report_every and int(record["step"]) % self.report_every == 0 and record["step"]:
      say(self.meter.line(int(record["global_batch_to_train"])))

  def as_dict(self) -> dict[str, Any]:
    """Returns plain JSON, from which a resumed run goes on as this one would."""
    steering = self.steering.as_dict() if self.steering else None
    return {"meter": self.meter.as_dict(), "steering": steering}

  def restore(self, notes: Mapping[str, Any], position: Position) -> None:
    """Takes up what `as_dict` gave in the run that goes on at `position`."""
    if "meter" in notes:
      self.meter.restore(notes["meter"])
      if self.steering is not None and notes["steering"] is not None:
        self.steering.restore(notes["steering"], position)

  def write_decisions(self) -> None:
    """Writes the batches so far for another run to follow, also where there is one alone."""
    if self.steering is None:
      return
    with sync_errors():
      if jax.process_index() == 0:
        self.steering.write(self.folder)

  def planned(self, plan: BatchPlan) -> BatchPlan:
    """Returns the plan of a run with what was decided in it so far.

    Raises:
      UserError: the run cannot go on from there with its present sizes.
    """
    if self.steering is None or self.steering.is_dry:
      return plan
    changes = [(change.samples, change.batch) for change in self.steering.changes]
    check_can_continue(plan, first=changes[0][1], now=changes[-1][1])
    return plan.with_schedule(changes)


def decides(noise: Noise | None, position: Position) -> bool:
  """Returns whether something is decided before the step at `position`."""
  return noise is not None and noise.steering is not None and noise.steering.is_due(position)


def decided(
  noise: Noise | None, plan: BatchPlan, position: Position, say: Callable[[str], None]
) -> BatchPlan:
  """Returns the plan from `position` on: the same object unless the batch changes."""
  if noise is None or noise.steering is None or not decides(noise, position):
    return plan
  steering = noise.steering
  before = steering.changes[-1].batch
  decision = steering.decide(position, noise.meter.total())
  if not decision.grew:
    return plan
  noise.write_decisions()
  verb = "would go" if steering.is_dry else "goes"
  say(
    f"step {position.step}: the batch {verb} from {before:,} to {decision.batch:,}: {decision.reason}"
  )
  return plan if steering.is_dry else plan.with_batch_from(position, decision.batch)
