"""The gradient noise scale over a window of steps, with its confidence interval.

For a group of parameters it is mean tr(Sigma) over mean |G|². A model need not
know of it: the squared gradients of a step's microbatches and replicas, which `accumulate` gives, are
enough, if there are at least two of them.

It is tr(Sigma) / |G|² (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix
A). G is the expected gradient and Sigma the covariance of one sample's gradient. The squared norm of a
batch's gradient is |G|² + tr(Sigma) / B on average.

A step's gradient is a ratio of sums over its rows, G_step = Σ s_b / Σ n_b: s_b is the gradient of
row b's summed loss, n_b its number of tokens. What varies in it are the residuals s_b − n_b·G
(Cochran 1977, "Sampling Techniques", chapter 6), not the s_b themselves: a row twice as long has
twice the gradient without being noise. With rows drawn independently, and E[s_b] = n_b·G taken to
hold for any length,

    E Σ|s_b|²  =     Σn_b² · |G|² + Σ E|s_b − n_b·G|²
    E |Σ s_b|² =  (Σ n_b)² · |G|² + Σ E|s_b − n_b·G|²

which are solved for both without bias at any batch size. For rows of one length these are the
formulas of McCandlish et al. The same holds for larger parts of a step than rows.

The estimates of one step are noisy, and |G|² may come out negative. The noise scale is the mean of
tr(Sigma) over the mean of |G|²; single steps are neither divided nor clamped.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np

from maxbatch.core.confidence import Interval, Ratios, ratios_of_means

_KINDS = ("signal", "noise")
_ONE_PART = 1 - 1e-5
"""A larger `share` is that of a single part that has nearly all tokens, to float32's rounding."""


@dataclasses.dataclass(frozen=True)
class Moments:
  """Unbiased estimates of |G|² and tr(Sigma) from one step, for one group of parameters."""

  signal: float
  """|G|², the squared norm of the expected gradient; may be negative where noise dominates."""
  noise: float
  """tr(Sigma), the trace of the covariance of one sample's gradient."""


def moments(rows: int, share: float, small: float, big: float) -> Moments | None:
  """Returns the estimates from the parts of a step: its rows, or its microbatches on each replica.

  Args:
    rows: of the step that have at least one token in the loss.
    share: Σ (n_p / W)² over the parts, of n_p tokens each and W together; 1/P for P equal parts.
    small: Σ |s_p / W|² over the parts, s_p the gradient of part p's summed loss.
    big: |Σ s_p / W|², of the step's mean gradient before clipping.

  Returns:
    The noise is that of one row. None with fewer than two parts that have tokens, or if not finite.
  """
  if rows < 2 or share > _ONE_PART or not (math.isfinite(small) and math.isfinite(big)):
    return None
  signal = (big - small) / (1 - share)
  return Moments(signal, rows * (small - share * signal))


class Window:
  """The last `length` steps. Legend of shapes: K signal and noise, G groups, N steps."""

  def __init__(self, length: int):
    """Makes an empty window of `length` steps.

    Raises:
      ValueError: `length` is less than 1.
    """
    if length < 1:
      raise ValueError(f"length={length} must be at least 1 step")
    self.length = length
    self.added = 0
    """Steps added since the beginning of the run."""
    self._rows: dict[str, int] = {}
    self._values_KGN = np.full((2, 0, length), np.nan)

  @property
  def groups(self) -> tuple[str, ...]:
    """Every group that was measured in any step."""
    return tuple(self._rows)

  def add(self, step: Mapping[str, Moments | None]) -> None:
    """Adds a step's moments by group; a group that is absent or None was not measured."""
    self._make_rows(step)
    place = self.added % self.length
    self._values_KGN[:, :, place] = np.nan
    for name, result in step.items():
      if result is not None:
        self._values_KGN[:, self._rows[name], place] = result.signal, result.noise
    self.added += 1

  def values(self, *groups: str) -> np.ndarray:
    """Returns signal and noise of these groups, (K, G, N), the steps in no particular order.

    NaN where a step did not measure a group.
    """
    result = np.full((2, len(groups), self.length), np.nan)
    for at, name in enumerate(groups):
      if name in self._rows:
        result[:, at] = self._values_KGN[:, self._rows[name]]
    return result

  def newest(self, *groups: str) -> np.ndarray:
    """Returns `values` of the steps that were added, the newest first."""
    back_N = np.arange(min(self.added, self.length))
    return self.values(*groups)[:, :, (self.added - 1 - back_N) % self.length]

  def as_dict(self) -> dict[str, Any]:
    """Returns the state as plain JSON; `from_dict` restores it exactly."""
    groups = {
      name: {
        kind: [None if np.isnan(value) else float(value) for value in self._values_KGN[at, row]]
        for at, kind in enumerate(_KINDS)
      }
      for name, row in self._rows.items()
    }
    return {"length": self.length, "added": self.added, "groups": groups}

  @classmethod
  def from_dict(cls, content: Mapping[str, Any]) -> "Window":
    """Returns the window whose state `as_dict` gave."""
    window = cls(content["length"])
    window.added = content["added"]
    window._make_rows(content["groups"])
    for name, kinds in content["groups"].items():
      for at, kind in enumerate(_KINDS):
        # numpy reads None as NaN.
        window._values_KGN[at, window._rows[name]] = np.array(kinds[kind], dtype=float)
    return window

  def _make_rows(self, names: Mapping[str, object]) -> None:
    new = [name for name in names if name not in self._rows]
    if new:
      self._rows |= {name: len(self._rows) + at for at, name in enumerate(new)}
      unmeasured = np.full((2, len(new), self.length), np.nan)
      self._values_KGN = np.concatenate([self._values_KGN, unmeasured], axis=1)


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
