"""Unbiased estimates of |G|² and tr(Sigma) from the squared gradient norms of one step.

The gradient noise scale B_simple = tr(Sigma) / |G|² (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", appendix A). G is the expected gradient and Sigma the covariance of one
sample's gradient. The squared norm of a batch's gradient is |G|² + tr(Sigma) / B on average, so two
batch sizes give both:

    signal  |G|²       = (B_big·|G_big|² − B_small·|G_small|²) / (B_big − B_small)
    noise   tr(Sigma)  = (|G_small|² − |G_big|²) / (1/B_small − 1/B_big)

The estimates of one step are noisy, and |G|² may come out negative. The noise scale is the mean of
tr(Sigma) over the mean of |G|²; single steps are neither divided nor clamped.
"""

import dataclasses
import math

from maxbatch.batch.arithmetic import over_noise_scale


@dataclasses.dataclass(frozen=True)
class Moments:
  """Unbiased estimates of |G|² and tr(Sigma) from one step, for one group of parameters."""

  signal: float
  """|G|², the squared norm of the expected gradient; may be negative where noise dominates."""
  noise: float
  """tr(Sigma), the trace of the covariance of one sample's gradient."""


def moments(examples: int, small: float, big: float) -> Moments | None:
  """The estimates from per-example gradients.

  Args:
    examples: rows of the step that have at least one token in the loss.
    small: mean over these rows of |g_b|², g_b the gradient of row b's own loss.
    big: |G|² of their mean gradient, before clipping.

  Returns:
    None with fewer than two examples, or a gradient that is not finite.
  """
  return moments_of_parts(examples, 1, small, big)


def moments_of_parts(parts: int, rows_per_part: int, small: float, big: float) -> Moments | None:
  """The estimates from the gradients of equal parts of a step: microbatches or replicas.

  Args:
    parts: number of parts.
    rows_per_part: samples in each.
    small: mean over the parts of |G_p|², G_p the mean gradient of part p.
    big: |G|² of the mean gradient of all parts.

  Returns:
    As `moments`; the noise is that of one sample, not of a part.
  """
  if parts < 2 or not (math.isfinite(small) and math.isfinite(big)):
    return None
  signal = (parts * big - small) / (parts - 1)
  noise = rows_per_part * (small - big) * parts / (parts - 1)
  return Moments(signal, noise)


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
  size = over_noise_scale(batch, noise_scale)
  return RelativeCost(data=1 + size, steps=1 + 1 / size)


def cost_of_change(batch: float, factor: float, noise_scale: float) -> RelativeCost:
  """Data and steps at a batch `factor` times as large, relative to those at `batch`."""
  # A batch `factor` times as large has the cost of this one at a noise scale that much smaller.
  before, after = cost(batch, noise_scale), cost(batch, noise_scale / factor)
  return RelativeCost(after.data / before.data, after.steps / before.steps)
