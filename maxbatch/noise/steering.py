"""batch_schedule=gns in a run: when to decide, the decisions so far, and their file."""

import pathlib
from collections.abc import Mapping
from typing import Any

from maxbatch.batch.schedule_file import Change, changes_until, with_change, write_changes
from maxbatch.config.schema import NoiseConfig
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.errors import UserError
from maxbatch.noise.controller import Controller, ControllerLimits, Decision
from maxbatch.noise.tracker import Estimate


class Steering:
  """Decides on the batch every half window of steps; the caller changes its plan accordingly."""

  def __init__(self, config: NoiseConfig, plan: BatchPlan, warmup_samples: int):
    """Starts with the run's first batch.

    Args:
      config: the limits of the controller.
      plan: the run's plan, from its first step on.
      warmup_samples: the learning rate's warm-up, during which the batch does not change.
    """
    dwell = config.gns_dwell_tokens
    self.is_dry = config.gns_dry_run
    self._period = config.gns_window_steps // 2
    self._limits = ControllerLimits(
      max_batch=plan.max_batch,
      unit=plan.micro_batch_to_train,
      dwell_samples=-(-dwell // plan.max_target_length)
      if dwell != -1
      else plan.total_samples // 50,
      windows_before_growth=config.gns_windows_before_growth,
      warmup_samples=warmup_samples,
      loss_window=config.gns_window_steps,
    )
    self._controller = Controller(self._limits)
    self._changes: tuple[Change, ...] = (Change(0, plan.global_batch_to_train, "the first batch"),)
    self._batch = plan.global_batch_to_train

  @property
  def changes(self) -> tuple[Change, ...]:
    """The batches so far and the samples at which they begin; in a dry run, as they would be."""
    return self._changes

  def observe(self, loss: float) -> None:
    """Records a step's loss."""
    self._controller.observe(loss)

  def is_due(self, position: Position) -> bool:
    """Whether to decide before the step at `position`."""
    return position.step % self._period == 0

  def decide(self, position: Position, estimate: Estimate) -> Decision:
    """The decision for the steps from `position` on."""
    decision = self._controller.decide(position, self._batch, estimate)
    if decision.grew:
      change = Change(position.samples, decision.batch, decision.reason)
      self._changes, self._batch = with_change(self._changes, change), decision.batch
    return decision

  def write(self, folder: pathlib.Path) -> None:
    """Writes the decisions to batch_schedule.yml, which batch_schedule=file can follow.

    Raises:
      UserError: the folder cannot be written to.
    """
    try:
      write_changes(folder, self._changes)
    except OSError as error:
      raise UserError(
        f"{folder} cannot be written to ({error.strerror}); free space or change its permissions, "
        "and start again: the run resumes from its last checkpoint"
      ) from None

  def as_dict(self) -> dict[str, Any]:
    """The state as plain JSON, for a checkpoint."""
    changes = [[change.samples, change.batch, change.reason] for change in self._changes]
    return {"controller": self._controller.as_dict(), "changes": changes, "is_dry": self.is_dry}

  def restore(self, content: Mapping[str, Any], position: Position) -> None:
    """Restores the state that `as_dict` gave, for a run that is resumed at `position`.

    A state of a dry run is dropped in a real one, and the reverse: the batches it decided on were
    not trained with.
    """
    if content["is_dry"] != self.is_dry:
      return
    self._controller = Controller.from_dict(self._limits, content["controller"])
    changes = [Change(*entry) for entry in content["changes"]]
    self._changes = changes_until(changes, position.samples)
    self._batch = self._changes[-1].batch
