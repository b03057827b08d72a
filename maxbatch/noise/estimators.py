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
  """The estimates from the parts of a step: its rows, or its microbatches on each replica.

  Args:
    rows: of the step that have at least one token in the loss.
    share: Σ (n_p / W)² over the parts, of n_p tokens each and W together; 1/P for P equal parts.
    small: Σ |s_p / W|² over the parts, s_p the gradient of part p's summed loss.
    big: |Σ s_p / W|², of the step's mean gradient before clipping.

  Returns:
    The noise is that of one row, whatever the parts. None with fewer than two parts that have
    tokens, or a gradient that is not finite.
  """
  if rows < 2 or share > _ONE_PART or not (math.isfinite(small) and math.isfinite(big)):
    return None
  signal = (big - small) / (1 - share)
  return Moments(signal, rows * (small - share * signal))


@dataclasses.dataclass(frozen=True)
class RelativeCost:
  """Data and steps that reaching the same loss takes, relative to a reference."""

  data: float
  steps: float


def cost(batch: float, noise_scale: float) -> RelativeCost:
  """Data and steps at `batch`, each relative to its minimum over all batch sizes.

  (steps − 1)·(data − 1) = 1: McCandlish et al. 2018, equation 2.11. A heuristic.

  Args:
    batch: samples per step, above 0.
    noise_scale: in samples, above 0.
  """
  size = batch / noise_scale
  return RelativeCost(data=1 + size, steps=1 + 1 / size)


def cost_of_change(batch: float, factor: float, noise_scale: float) -> RelativeCost:
  """Data and steps at a batch `factor` times as large, relative to those at `batch`."""
  # A batch `factor` times as large has the cost of this one at a noise scale that much smaller.
  before, after = cost(batch, noise_scale), cost(batch, noise_scale / factor)
  return RelativeCost(after.data / before.data, after.steps / before.steps)
