"""Unbiased estimates of |G|² and tr(Sigma) from the squared gradient norms of one step.

The gradient noise scale B_simple = tr(Sigma) / |G|² (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", appendix A). G is the expected gradient and Sigma the covariance of one
sample's gradient. The squared norm of a batch's gradient is |G|² + tr(Sigma) / B on average.

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
from typing import Any

import numpy as np

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
