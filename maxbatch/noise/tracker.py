"""The gradient noise scale of a whole model from that of its normalization layers.

With gns=norm only the normalization layers are measured at every step. The noise scale of the whole
model is then predicted from theirs, times a factor that is measured in calibration steps, which
measure both. The factor has no default, because it differs between runs (1.2 to 2.3 seen).
"""

import math
from collections.abc import Mapping
from typing import Any

from maxbatch.core.confidence import FEWEST_STEPS, Interval, product_of_means
from maxbatch.core.noise_scale import (
  TOTAL,
  Calibration,
  Estimate,
  Moments,
  NoiseGroups,
  Status,
  Window,
)

NORM = "norm"
FEWEST_CALIBRATION_STEPS = FEWEST_STEPS

_CALIBRATION_STEPS = 256
"""Minimum length of their window: they are rare, and the factor changes slowly."""


class NoiseTracker(NoiseGroups):
  """The moments of the last `window_steps` steps and of the last calibration steps."""

  def __init__(self, window_steps: int):
    """Makes an empty tracker.

    Raises:
      ValueError: window_steps is less than 1.
    """
    super().__init__(window_steps)
    self._calibration = Window(max(window_steps, _CALIBRATION_STEPS))

  def add(self, step_moments: Mapping[str, Moments | None]) -> None:
    """Adds a step's moments by group; a group that is absent or None was not measured."""
    super().add(step_moments)
    both = {name: step_moments.get(name) for name in (NORM, TOTAL)}
    if None not in both.values():
      self._calibration.add(both)

  def calibration(self) -> Calibration:
    """Returns the factor from the normalization layers' noise scale to the whole model's.

    Over all calibration steps of the window, or the newest half, quarter, … of them: the gradients
    of a run's first steps may be a hundred times as large as later ones, and while they are among
    them the mean signal cannot be told from 0.
    """
    signal_GN, noise_GN = self._calibration.newest(NORM, TOTAL)
    count = steps = signal_GN.shape[1]
    while steps >= FEWEST_CALIBRATION_STEPS:
      signal, noise = signal_GN[:, :steps], noise_GN[:, :steps]
      slope = product_of_means((noise[1], signal[0]), (signal[1], noise[0]))
      if slope is not None:
        return Calibration("ok", steps, slope)
      steps //= 2
    status = "insufficient" if count >= FEWEST_CALIBRATION_STEPS else "unavailable"
    return Calibration(status, count)

  def predicted_total(self) -> Estimate:
    """Returns the noise scale of the whole model, predicted from its normalization layers'."""
    norm, calibration = self.estimate(NORM), self.calibration()
    scale = None
    if norm.scale is not None and norm.scale.value > 0 and calibration.slope is not None:
      scale = _product(norm.scale, calibration.slope)
    status = _worst(norm.status, calibration.status)
    return Estimate(
      group=TOTAL,
      status="insufficient" if status == "ok" and scale is None else status,
      window_steps=self.window_steps,
      steps=norm.steps,
      negative_share=norm.negative_share,
      scale=scale,
      calibration=calibration,
    )

  def as_dict(self) -> dict[str, Any]:
    """Returns the state as plain JSON; `from_dict` restores it exactly."""
    return super().as_dict() | {"calibration": self._calibration.as_dict()}

  @classmethod
  def from_dict(cls, content: Mapping[str, Any]) -> "NoiseTracker":
    """Returns the tracker whose state `as_dict` gave."""
    tracker = super().from_dict(content)
    tracker._calibration = Window.from_dict(content["calibration"])
    return tracker


def _worst(*statuses: Status) -> Status:
  order: tuple[Status, ...] = ("unavailable", "insufficient", "ok")
  return min(statuses, key=order.index)


def _product(one: Interval, other: Interval) -> Interval:
  """Returns the product of two positive values; their relative errors are added in quadrature."""
  down = math.hypot(1 - one.low / one.value, 1 - other.low / other.value)
  up = math.hypot(one.high / one.value - 1, other.high / other.value - 1)
  value = one.value * other.value
  return Interval(value, value * (1 - down), value * (1 + up))
