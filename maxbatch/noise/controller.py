"""batch_schedule=gns: when to increase the batch, and to what, and the decisions of a run.

The batch grows only if the lower end of the noise scale's confidence interval is above twice the
batch in several windows in a row. It never shrinks. The rule's whole state is saved in checkpoints,
so that a resumed run takes the same decisions as an uninterrupted one.

Checks of the keys that measuring the noise scale, or batch_schedule=gns, depends on.
"""

import dataclasses
import math
import pathlib
import statistics
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from maxbatch.batch.from_config import follows_noise_scale
from maxbatch.batch.schedule_file import Change, changes_until, with_change, write_changes
from maxbatch.config.schema import Config, NoiseConfig
from maxbatch.core.keys import counted
from maxbatch.core.noise_scale import Estimate
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.errors import UserError

_FEWEST_LOSSES = 8
_NEWEST_SHARE = 8
"""A spike compares the newest eighth of the losses with the others, so that one outlier is none."""

_MIN_RATIO = Fraction(2)
"""The noise scale over the batch above which a larger batch is considered."""

_DEVIATIONS_PER_MAD = 1.4826
"""Standard deviations per median absolute deviation, of a normal distribution."""


@dataclasses.dataclass(frozen=True)
class ControllerLimits:
  """The limits of the rule.

  Raises:
    UserError: a limit is out of range.
  """

  max_batch: int
  unit: int = 1
  """The microbatch, in samples: every batch is a multiple of it."""
  dwell_samples: int = 0
  windows_before_growth: int = 3
  """Consecutive decision points that must agree; their windows share at most half of their steps."""
  growth_limit: Fraction = Fraction(2)
  max_relative_half_width: float = 0.5
  """Maximum of half the interval's width over the noise scale."""
  warmup_samples: int = 0
  """Samples at the beginning during which the batch stays and no window counts."""
  spike_deviations: float = 4.0
  """The newest losses are a spike if they exceed the earlier ones by this many deviations."""
  loss_window: int = 64
  """Number of newest losses, one per step, in which spikes are looked for."""

  def __post_init__(self) -> None:
    _check_at_least("unit", self.unit, 1)
    _check_at_least("max_batch", self.max_batch, self.unit)
    _check_at_least("dwell_samples", self.dwell_samples, 0)
    _check_at_least("windows_before_growth", self.windows_before_growth, 1)
    _check_above("growth_limit", self.growth_limit, 1)
    _check_above("max_relative_half_width", self.max_relative_half_width, 0)
    _check_at_least("warmup_samples", self.warmup_samples, 0)
    _check_above("spike_deviations", self.spike_deviations, 0)
    _check_at_least("loss_window", self.loss_window, _FEWEST_LOSSES)


@dataclasses.dataclass(frozen=True)
class Decision:
  """The batch from the decision point on, and the reason."""

  batch: int
  reason: str
  grew: bool


class Controller:
  """Decides on the batch at decision points; call `observe` with the loss of every step between."""

  def __init__(self, limits: ControllerLimits):
    self.limits = limits
    self._agreeing = 0
    self._counted_at_step: int | None = None
    self._changed_at_samples = 0
    self._losses: deque[float] = deque(maxlen=limits.loss_window)

  def observe(self, loss: float) -> None:
    """Records a step's loss."""
    self._losses.append(loss)

  def decide(self, position: Position, batch: int, estimate: Estimate) -> Decision:
    """Decides the batch from `position` on, where a step took `batch` samples until now."""
    objection = self._objection(position, batch, estimate)
    if objection:
      self._agreeing = 0
      return Decision(batch, objection, grew=False)
    # A window that shares at most half of its steps with the last one that counted.
    counted = self._counted_at_step
    if counted is None or 2 * (position.step - counted) >= estimate.window_steps:
      self._agreeing += 1
      self._counted_at_step = position.step
    waiting = self._waiting(position, batch)
    if waiting:
      return Decision(batch, waiting, grew=False)
    return self._grown(position, batch, estimate)

  def as_dict(self) -> dict[str, Any]:
    """Returns the state as plain JSON, without the limits."""
    return {
      "agreeing": self._agreeing,
      "counted_at_step": self._counted_at_step,
      "changed_at_samples": self._changed_at_samples,
      "losses": [loss if math.isfinite(loss) else None for loss in self._losses],
    }

  @classmethod
  def from_dict(cls, limits: ControllerLimits, content: Mapping[str, Any]) -> "Controller":
    """Returns the controller whose state `as_dict` gave."""
    controller = cls(limits)
    controller._agreeing = content["agreeing"]
    controller._counted_at_step = content["counted_at_step"]
    controller._changed_at_samples = content["changed_at_samples"]
    controller._losses.extend(math.nan if loss is None else loss for loss in content["losses"])
    return controller

  def _objection(self, position: Position, batch: int, estimate: Estimate) -> str | None:
    """Returns the reason not to grow the batch now; None if there is none."""
    limits = self.limits
    if position.samples < limits.warmup_samples:
      return f"warm-up until {limits.warmup_samples:,} samples"
    if batch >= limits.max_batch:
      return f"batch {batch:,} is at its maximum: max_batch={limits.max_batch}"
    return _doubt(estimate, batch, limits) or _spike(list(self._losses), limits.spike_deviations)

  def _waiting(self, position: Position, batch: int) -> str | None:
    """Returns what to wait for before the batch may grow; None if nothing."""
    limits = self.limits
    if self._agreeing < limits.windows_before_growth:
      return (
        f"the noise scale's interval is above 2 × {batch:,} in {self._agreeing} of "
        f"{limits.windows_before_growth} windows"
      )
    rest = self._changed_at_samples + limits.dwell_samples - position.samples
    if rest > 0:
      return (
        f"batch {batch:,} stays for {rest:,} more samples: dwell_samples={limits.dwell_samples}"
      )
    return None

  def _grown(self, position: Position, batch: int, estimate: Estimate) -> Decision:
    """Returns the largest batch that the limits and the noise scale's lower bound allow."""
    assert estimate.scale is not None
    limits, low = self.limits, math.floor(estimate.scale.low)
    ceiling = min(math.floor(limits.growth_limit * batch), limits.max_batch, low)
    larger = ceiling // limits.unit * limits.unit
    if larger <= batch:
      return Decision(
        batch, f"no multiple of {limits.unit:,} is above {batch:,} and at most {ceiling:,}", False
      )
    seen = self._agreeing
    self._agreeing, self._changed_at_samples = 0, position.samples
    return Decision(
      larger,
      f"the noise scale is at least {low:,} samples, above 2 × {batch:,}, in "
      f"{counted(seen, 'window')} in a row; at most {ceiling:,} allowed",
      grew=True,
    )


def _doubt(estimate: Estimate, batch: int, limits: ControllerLimits) -> str | None:
  """Returns why the noise scale may not be above twice the batch; None if it is."""
  scale = estimate.scale
  if scale is None:
    return f"no noise scale: {estimate.status}"
  width = (scale.high - scale.low) / 2
  if width > limits.max_relative_half_width * scale.value:
    widest = f"max_relative_half_width={limits.max_relative_half_width:g}"
    return f"the noise scale, {scale.value:,.0f} ± {width:,.0f}, is too uncertain: {widest}"
  if scale.low <= _MIN_RATIO * batch:
    return f"the noise scale may be {scale.low:,.0f} samples, not above 2 × {batch:,}"
  return None


def _spike(losses: list[float], deviations: float) -> str | None:
  """Returns the reason not to grow because the median loss has jumped; None if it has not."""
  if len(losses) < _FEWEST_LOSSES:
    return f"{len(losses)} of the {_FEWEST_LOSSES} losses that detecting a spike needs"
  if not all(map(math.isfinite, losses)):
    return "a loss was not finite"
  newest = max(1, len(losses) // _NEWEST_SHARE)
  now, earlier = statistics.median(losses[-newest:]), losses[:-newest]
  usual = statistics.median(earlier)
  deviation = _DEVIATIONS_PER_MAD * statistics.median(abs(loss - usual) for loss in earlier)
  if now > usual + deviations * deviation:
    return f"loss spike: {now:.4g} now, {usual:.4g} ± {deviation:.2g} before"
  return None


def _check_at_least(name: str, value: int, least: int) -> None:
  if value < least:
    raise UserError(f"{name}={value} must be at least {least}; for example {name}={least}")


def _check_above(name: str, value: float | Fraction, bound: int) -> None:
  if value <= bound:
    raise UserError(f"{name}={value} must be above {bound}; for example {name}={bound + 1}")


class Steering:
  """Decides on the batch every half window of steps; the caller changes its plan accordingly."""

  def __init__(self, config: NoiseConfig, plan: BatchPlan, warmup_samples: int):
    """Starts with the run's first batch.

    Args:
      plan: the run's plan, from its first step on.
      warmup_samples: the learning rate's warm-up, during which the batch does not change.
    """
    dwell = config.gns_hold_tokens
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
    """Returns whether to decide before the step at `position`."""
    return position.step % self._period == 0

  def decide(self, position: Position, estimate: Estimate) -> Decision:
    """Returns the decision for the steps from `position` on."""
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
    """Returns the state as plain JSON, for a checkpoint."""
    changes = [[change.samples, change.batch, change.reason] for change in self._changes]
    return {"controller": self._controller.as_dict(), "changes": changes, "is_dry": self.is_dry}

  def restore(self, content: Mapping[str, Any], position: Position) -> None:
    """Restores the state that `as_dict` gave, for a run that is resumed at `position`.

    A dry run's state is dropped in a real one, and the reverse: its batches were not trained with.
    """
    if content["is_dry"] != self.is_dry:
      return
    self._controller = Controller.from_dict(self._limits, content["controller"])
    changes = [Change(*entry) for entry in content["changes"]]
    self._changes = changes_until(changes, position.samples)
    self._batch = self._changes[-1].batch


def measures_noise(config: NoiseConfig) -> bool:
  """Returns whether steps measure what the noise scale is estimated from."""
  return config.gns != "off" or config.gns_from_microbatches


def check_noise(config: Config, plan: BatchPlan) -> None:
  """Refuses keys with which the noise scale cannot be measured, or the batch cannot follow it.

  Raises:
    UserError: naming the keys, their values and values that work.
  """
  gns = config.noise.gns
  if gns != "off" and min(point.batch for point in plan.schedule.points) < 2:
    where = "global_batch_to_train=1" if plan.global_batch_to_train == 1 else "a phase of 1 sample"
    raise UserError(
      f"gns={gns} needs at least 2 samples per step, and {where} has one; for example batch_size=2 "
      "gradient_accumulation_steps=-1, or gns=off"
    )
  replicas, is_pipeline = plan.topology.shape["data"], config.pipeline.pipeline_schedule != "none"
  # A pipeline cuts any microbatch into several.
  if (config.noise.gns_from_microbatches and not is_pipeline) and not any(
    point.num_microbatches * replicas > 1 for point in plan.schedule.points
  ):
    raise UserError(
      "gns_from_microbatches=true compares the gradients of microbatches, and a step has one microbatch "
      "and one replica of the model (data 1); for example gradient_accumulation_steps=2, or gns=norm "
      "gns_from_microbatches=false"
    )
  if not follows_noise_scale(config.batch):
    return
  _check_measured(config)
  _check_counted(config, plan)
  if config.batch.accumulation == "streamed":
    raise UserError(
      "batch_schedule=gns changes the number of microbatches during the run, which "
      "accumulation=streamed compiles into the step; for example accumulation=fused"
    )


def _check_measured(config: Config) -> None:
  """Checks that the noise scale of the whole model is measured or predicted."""
  gns, every = config.noise.gns, config.noise.gns_calibrate_every
  if not measures_noise(config.noise):
    raise UserError("batch_schedule=gns needs the noise scale, and gns=off; for example gns=norm")
  if gns == "norm" and every == 0:
    raise UserError(
      "batch_schedule=gns needs the noise scale of the whole model, which gns=norm predicts from "
      "calibration steps, and gns_calibrate_every=0; for example gns_calibrate_every=10, or gns=all"
    )


def _check_counted(config: Config, plan: BatchPlan) -> None:
  """Checks that budget and schedules count samples or tokens: steps differ when the batch grows."""
  run = config.run
  if run.steps != -1:
    raise UserError(
      f"steps={run.steps}: with batch_schedule=gns the steps of a run are not known beforehand; "
      f"give its samples or tokens, for example steps=-1 total_tokens={plan.total_tokens}"
    )
  if run.schedule_unit == "steps":
    raise UserError(
      "schedule_unit=steps: with batch_schedule=gns steps are of different sizes; for example "
      "schedule_unit=samples, in which the learning rate's schedule, evaluations and checkpoints "
      "are then counted"
    )
