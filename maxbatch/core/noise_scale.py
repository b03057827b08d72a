"""The gradient noise scale over a window of steps, with its confidence interval.

For a group of parameters it is mean tr(Sigma) over mean |G|² (noise_moments.py). A model need not
know of it: the squared gradients of a step's microbatches and replicas, which `accumulate` gives, are
enough, if there are at least two of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np

from maxbatch.core.confidence import Interval, Ratios, ratios_of_means
from maxbatch.core.noise_moments import Moments, Window, moments

TOTAL = "total"

Status = Literal["ok", "insufficient", "unavailable"]
"""insufficient: |G|² is not significantly above 0, so there is no estimate. unavailable: no data."""


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The ratio of the whole model's noise scale to that of the part that is always measured."""

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

  def __str__(self) -> str:
    if self.status == "unavailable":
      return "noise scale: not measured, as no step had two parts to compare"
    steps = f"{self.steps} step{'s' * (self.steps != 1)}"
    if self.scale is None:
      return f"noise scale: not known after {steps}, the mean gradient may still be 0"
    value, low, high = (f"{x:.3g}" for x in dataclasses.astuple(self.scale))
    return f"noise scale: {value} samples ({low} to {high} with 95% confidence, {steps})"


class NoiseGroups:
  """The moments of the last `window_steps` steps, by group of parameters."""

  def __init__(self, window_steps: int):
    """Makes an empty window.

    Raises:
      ValueError: window_steps is less than 1.
    """
    self.window_steps = window_steps
    self._window = Window(window_steps)

  @property
  def groups(self) -> tuple[str, ...]:
    """Every group that was measured in any step."""
    return self._window.groups

  def add(self, step_moments: Mapping[str, Moments | None]) -> None:
    """Adds a step's moments by group; a group that is absent or None was not measured."""
    self._window.add(step_moments)

  def estimate(self, group: str) -> Estimate:
    """Returns the noise scale of `group`."""
    return self.estimates(group)[group]

  def estimates(self, *groups: str) -> dict[str, Estimate]:
    """Returns the noise scales of these groups; of every group if none is named."""
    names = groups or self.groups
    signal_GN, noise_GN = self._window.values(*names)
    ratios = ratios_of_means(noise_GN, signal_GN)
    negative = (signal_GN < 0).sum(-1)
    return {
      name: self._estimate(name, ratios, row, int(negative[row])) for row, name in enumerate(names)
    }

  def share(self, part: str, whole: str) -> Interval | None:
    """Returns the noise of one group over that of another, with its interval; None: unknown."""
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

  def as_dict(self) -> dict[str, Any]:
    """Returns the state as plain JSON; `from_dict` restores it exactly."""
    return {"window": self._window.as_dict()}

  @classmethod
  def from_dict(cls, content: Mapping[str, Any]) -> Self:
    """Returns the window whose state `as_dict` gave."""
    groups = cls(content["window"]["length"])
    groups._window = Window.from_dict(content["window"])
    return groups


class NoiseScale:
  """The noise scale of a loop of one's own: add every step, ask for the estimate at any time.

  Its steps accumulate with `squared_norm`, which makes the squares of their parts. A measurement is
  better the smaller the parts: take many microbatches.
  """

  def __init__(self, window_steps: int = 100):
    """Makes an empty window of steps.

    Raises:
      ValueError: window_steps is less than 1.
    """
    self._groups = NoiseGroups(window_steps)

  def add(
    self,
    result: Any,
    *,
    rows: int,
    grad_norm: Any = None,
    row_squares: tuple[Any, Any] | None = None,
  ) -> None:
    """Adds a step, which it waits for.

    Args:
      result: of `train_step` or `accumulate`.
      rows: of the step that have at least one token in the loss.
      grad_norm: of the step's mean gradient before clipping; None: the result's, as `train_step`'s.
      row_squares: instead of the microbatches' squares, which the result need not have then:
        Σ ‖gradient of a row's numerator‖² and Σ (its denominator)², where a loss hands them out.

    Raises:
      ValueError: the result has no squares, or there is no norm of the gradient.
    """
    sums = getattr(result, "sums", result)
    norm = getattr(result, "grad_norm", None) if grad_norm is None else grad_norm
    if norm is None:
      raise ValueError("give grad_norm: the result has no norm of the mean gradient")
    if row_squares is None:
      if sums.squares is None:
        raise ValueError("the result has no squares: give accumulate a squared_norm")
      row_squares = sums.squares.of_microbatches, sums.squares.divisors
    first = next(iter(sums.terms.values()))
    divisor_squared = float(np.sum(first.denominator)) ** 2
    small, share = (float(np.sum(x)) / (divisor_squared or 1.0) for x in row_squares)
    self._groups.add({TOTAL: moments(rows, share, small, float(norm) ** 2)})

  def estimate(self) -> Estimate:
    """Returns the noise scale over the window; its `status` says whether it is known."""
    return self._groups.estimate(TOTAL)

  def __str__(self) -> str:
    return str(self.estimate())

  def as_dict(self) -> dict[str, Any]:
    """Returns the state as plain JSON; `from_dict` restores it exactly."""
    return self._groups.as_dict()

  @classmethod
  def from_dict(cls, content: Mapping[str, Any]) -> Self:
    """Returns the noise scale whose state `as_dict` gave."""
    noise = cls()
    noise._groups = NoiseGroups.from_dict(content)
    return noise
