"""What squared gradient norms of one step say about signal and noise, and what the ratio means.

A small batch's gradient has more noise in its squared norm than a large one's. The difference tells
the two parts apart without bias (McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training", appendix A):

    signal  A = |expected gradient|²     = (B_big·|G_big|² − B_small·|G_small|²) / (B_big − B_small)
    noise   S = trace of the covariance  = (|G_small|² − |G_big|²) / (1/B_small − 1/B_big)

One step's A and S are noisy, and A may be negative. The noise scale is the mean of S over the mean
of A; single values are neither divided nor clamped.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Moments:
  """Unbiased estimates from one step, of one group of parameters."""

  signal: float
  """|expected gradient|²; below 0 where noise hides it."""
  noise: float
  """Trace of the covariance of one sample's gradient."""


def moments(examples: int, small: float, big: float) -> Moments | None:
  """The moments from per-example gradients.

  Args:
    examples: rows of the step that had any token.
    small: mean over these rows of |g_b|², g_b the gradient of row b's own loss.
    big: |G|² of their mean gradient, before clipping.

  Returns:
    None where nothing can be said: fewer than two examples, or a gradient that is not finite.
  """
  return moments_of_parts(examples, 1, small, big)


def moments_of_parts(parts: int, rows_per_part: int, small: float, big: float) -> Moments | None:
  """The moments from gradients of equally large parts of a step: microbatches, or devices.

  Args:
    parts: how many.
    rows_per_part: samples in each.
    small: mean over the parts of |G_p|², G_p the mean gradient of part p.
    big: |G|² of the mean gradient of all.

  Returns:
    As `moments`; the noise is that of one sample, whatever the parts.
  """
  if parts < 2 or not (math.isfinite(small) and math.isfinite(big)):
    return None
  signal = (parts * big - small) / (parts - 1)
  noise = rows_per_part * (small - big) * parts / (parts - 1)
  return Moments(signal, noise)


@dataclasses.dataclass(frozen=True)
class RelativeCost:
  """What reaching the same loss takes, relative to something."""

  data: float
  steps: float


def cost(batch: float, noise_scale: float) -> RelativeCost:
  """Data and steps at `batch`, relative to the least that any batch would take of each.

  (steps − 1)·(data − 1) = 1: McCandlish et al. 2018, equation 2.11. A heuristic.

  Args:
    batch: samples per step, above 0.
    noise_scale: in samples, above 0.
  """
  return RelativeCost(data=1 + batch / noise_scale, steps=1 + noise_scale / batch)


def cost_of_change(batch: float, factor: float, noise_scale: float) -> RelativeCost:
  """Data and steps at a batch `factor` times as large, relative to those at `batch`."""
  before, after = cost(batch, noise_scale), cost(factor * batch, noise_scale)
  return RelativeCost(after.data / before.data, after.steps / before.steps)
