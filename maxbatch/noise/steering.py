"""A batch that follows the noise scale: decision points, what was decided, and its file."""

import pathlib
from collections.abc import Mapping
from typing import Any

from maxbatch.batch.plan import BatchPlan, Position
from maxbatch.batch.schedule_file import Change, changes_until, with_change, write_changes
from maxbatch.config.schema import NoiseConfig
from maxbatch.errors import UserError
from maxbatch.noise.controller import Controller, ControllerLimits, Decision
from maxbatch.noise.tracker import Estimate


class Steering:
  """Decides every half window of steps; the plan that it changes belongs to the caller."""

  def __init__(self, config: NoiseConfig, plan: BatchPlan, warmup_samples: int):
    """Nothing decided yet.

    Args:
      config: how the controller waits.
      plan: the run's plan, from its very beginning.
      warmup_samples: the learning rate's warm-up, during which nothing is decided.
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
    """Every batch so far, from its sample on; in a dry run, as it would have been."""
    return self._changes

  def observe(self, loss: float) -> None:
    """Takes note of a step's loss."""
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
    """Writes what was decided where batch_schedule=file can follow it.

    Raises:
      UserError: the folder cannot be written to.
    """
    try:
      write_changes(folder, self._changes)
    except OSError as error:
      raise UserError(
        f"{folder} cannot be written to ({error.strerror}); make room there and start again: the "
        "run goes on from its last checkpoint"
      ) from None

  def as_dict(self) -> dict[str, Any]:
    """Plain JSON, from which a resumed run decides as this one would."""
    changes = [[change.samples, change.batch, change.reason] for change in self._changes]
    return {"controller": self._controller.as_dict(), "changes": changes, "is_dry": self.is_dry}

  def restore(self, content: Mapping[str, Any], position: Position) -> None:
    """Takes up what `as_dict` gave in the run that goes on at `position`.

    What was only said to be done, in a dry run, was not: decisions begin anew, and the reverse.
    """
    if content["is_dry"] != self.is_dry:
      return
    self._controller = Controller.from_dict(self._limits, content["controller"])
    changes = [Change(*entry) for entry in content["changes"]]
    self._changes = changes_until(changes, position.samples)
    self._batch = self._changes[-1].batch
