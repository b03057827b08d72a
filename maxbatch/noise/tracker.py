"""The gradient noise scale over a window of steps, with its confidence interval.

For a group of parameters it is mean tr(Sigma) over mean |G|². With gns=norm only the normalization
layers are measured at every step. The noise scale of the whole model is then predicted from theirs,
times a factor that is measured in calibration steps, which measure both. The factor has no default,
because it differs between runs (1.2 to 2.3 seen).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from maxbatch.noise.confidence import (
  FEWEST_STEPS,
  Interval,
  Ratios,
  product_of_means,
  ratios_of_means,
)
from maxbatch.noise.estimators import Moments
from maxbatch.noise.window import Window

TOTAL = "total"
NORM = "norm"
FEWEST_CALIBRATION_STEPS = FEWEST_STEPS

_CALIBRATION_STEPS = 256
"""Minimum length of their window: they are rare, and the factor changes slowly."""

Status = Literal["ok", "insufficient", "unavailable"]
"""insufficient: |G|² is not significantly above 0, so there is no estimate. unavailable: no data."""


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The ratio of the whole model's noise scale to that of its normalization layers."""

  status: Status
  steps: int
  """Calibration steps in the window."""
  slope: Interval | None = None
  """None unless the status is ok."""


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The noise scale of one group of parameters."""

  group: str
  status: Status
  window_steps: int
  steps: int
  """Steps of the window that measured the group."""
  negative_share: float | None = None
  """Fraction of these steps whose |G|² is estimated below 0."""
  signal: float | None = None
  noise: float | None = None
  """Mean |G|² and mean tr(Sigma) over the steps; None where predicted or unavailable."""
  scale: Interval | None = None
  """B_simple = noise / signal, in samples; None unless the status is ok."""
  calibration: Calibration | None = None
  """The calibration it is predicted with; None if it is measured."""


class NoiseTracker:
  """The moments of the last `window_steps` steps and of the last calibration steps."""

  def __init__(self, window_steps: int):
    """An empty tracker.

    Raises:
      ValueError: window_steps is less than 1.
    """
    self.window_steps = window_steps
    self._window = Window(window_steps)
    self._calibration = Window(max(window_steps, _CALIBRATION_STEPS))

  @property
  def groups(self) -> tuple[str, ...]:
    """Every group that was measured in any step."""
    return self._window.groups

  def add(self, step_moments: Mapping[str, Moments | None]) -> None:
    """Adds a step's moments by group; a group that is absent or None was not measured."""
    self._window.add(step_moments)
    both = {name: step_moments.get(name) for name in (NORM, TOTAL)}
    if None not in both.values():
      self._calibration.add(both)

  def estimate(self, group: str) -> Estimate:
    """The noise scale of `group`."""
    return self.estimates(group)[group]

  def estimates(self, *groups: str) -> dict[str, Estimate]:
    """The noise scales of these groups; of every group if none is named."""
    names = groups or self.groups
    signal_GN, noise_GN = self._window.values(*names)
    ratios = ratios_of_means(noise_GN, signal_GN)
    negative = (signal_GN < 0).sum(-1)
    return {
      name: self._estimate(name, ratios, row, int(negative[row])) for row, name in enumerate(names)
    }

  def share(self, part: str, whole: str) -> Interval | None:
    """The noise of one group over that of another, with its interval; None if it is not known."""
    _, (noise_N, whole_N) = self._window.values(part, whole)
    return ratios_of_means(noise_N[None], whole_N[None]).interval(0)

  def _estimate(self, name: str, ratios: Ratios, row: int, negative: int) -> Estimate:
    steps = int(ratios.steps[row])
    if steps == 0:
      return Estimate(name, "unavailable", self.window_steps, 0)
    scale = ratios.interval(row)
    return Estimate(
      group=name,
      status="insufficient" if scale is None else "ok",
      window_steps=self.window_steps,
      steps=steps,
      negative_share=negative / steps,
      signal=float(ratios.denominator[row]),
      noise=float(ratios.numerator[row]),
      scale=scale,
    )

  def calibration(self) -> Calibration:
    """The factor from the normalization layers' noise scale to the whole model's.

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
    return Calibration(
      "insufficient" if count >= FEWEST_CALIBRATION_STEPS else "unavailable", count
    )

  def predicted_total(self) -> Estimate:
    """The noise scale of the whole model, predicted from that of its normalization layers."""
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
    """The state as plain JSON; `from_dict` restores it exactly."""
    return {"window": self._window.as_dict(), "calibration": self._calibration.as_dict()}

  @classmethod
  def from_dict(cls, content: Mapping[str, Any]) -> "NoiseTracker":
    """The tracker whose state `as_dict` gave."""
    tracker = cls(content["window"]["length"])
    tracker._window = Window.from_dict(content["window"])
    tracker._calibration = Window.from_dict(content["calibration"])
    return tracker


def _worst(*statuses: Status) -> Status:
  order: tuple[Status, ...] = ("unavailable", "insufficient", "ok")
  return min(statuses, key=order.index)


def _product(one: Interval, other: Interval) -> Interval:
  """The product of two positive values; their relative errors are added in quadrature."""
  down = math.hypot(1 - one.low / one.value, 1 - other.low / other.value)
  up = math.hypot(one.high / one.value - 1, other.high / other.value - 1)
  value = one.value * other.value
  return Interval(value, value * (1 - down), value * (1 + up))
