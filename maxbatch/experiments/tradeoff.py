"""Data against steps: what reaching one loss takes at several batch sizes, and the curve through it.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), equation
2.11: (S / Smin − 1)(E / Emin − 1) = 1 for the steps S and the samples E that reach a loss. With
B = E / S samples a step it says

    S = Smin·(1 + Bcrit / B),    E = Emin·(1 + B / Bcrit),    Bcrit = Emin / Smin

Where every step gains as much as that paper's equation 2.7 says, 1 / (1 + Bnoise / B) of what a step
without noise gains, Bcrit is the mean of the noise scale Bnoise over the run, in which a step weighs
what it gains (appendix D there).

Legend: N runs or steps, C candidates for Bcrit.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from maxbatch.core.confidence import Interval, inflated_t
from maxbatch.experiments.losses import Judged

Numbers = Sequence[float] | np.ndarray
_CANDIDATES = 20_001
_FEWEST = 3
"""Runs or branches, which two numbers are fitted to."""
_REACH = 1e3
"""How far outside of the batch sizes that were tried Bcrit is looked for."""


@dataclasses.dataclass(frozen=True)
class Tradeoff:
  """The curve that fits best, with 95% intervals; an end of one may be 0 or infinite."""

  min_steps: Interval
  min_samples: Interval
  critical_batch: Interval
  """Bcrit, in samples."""
  misfit: float
  """Standard deviation of the runs around the curve, as a share of steps: 0.1 is 10%."""


def fit_tradeoff(samples: Numbers, steps: Numbers) -> Tradeoff:
  """Returns the curve by least squares of the relative errors of S.

  The intervals hold every value for which the curve's sum of squares is at most 1 + t²/(N − 2)
  times the least one: they cover scatter and misfit, but not what all runs have in common.

  Args:
    samples: E of every run.
    steps: S of every run, in the same order; at least two batch sizes, and three runs.

  Raises:
    ValueError: there are fewer.
  """
  samples_N, steps_N = np.array(samples, float), np.array(steps, float)
  sizes_N = samples_N / steps_N
  if len(sizes_N) < _FEWEST or np.ptp(np.log(sizes_N)) < 1e-6:
    raise ValueError("a fit takes three runs of two batch sizes at least")
  ends = math.log(sizes_N.min() / _REACH), math.log(sizes_N.max() * _REACH)
  log_critical_C = np.linspace(*ends, _CANDIDATES)
  # For each Bcrit the best Smin is a mean, and what is left decides.
  left_CN = np.log(steps_N) - np.log1p(np.exp(log_critical_C)[:, None] / sizes_N)
  log_min_steps_C = left_CN.mean(1)
  squares_C = ((left_CN - log_min_steps_C[:, None]) ** 2).sum(1)
  best, degrees = int(squares_C.argmin()), len(sizes_N) - 2
  least = float(squares_C[best])
  spare_C = least * (1 + float(inflated_t(np.array(degrees))) ** 2 / degrees) - squares_C
  allowed_C = spare_C >= 0
  # A Smin off its best by x adds N·x² to the squares.
  off_C = np.sqrt(np.maximum(spare_C, 0) / len(sizes_N))

  def interval(log_C: np.ndarray, off_C: np.ndarray) -> Interval:
    low, high = (log_C - off_C)[allowed_C].min(), (log_C + off_C)[allowed_C].max()
    return Interval(math.exp(log_C[best]), math.exp(low), math.exp(high))

  result = interval(log_critical_C, np.zeros_like(off_C))
  least_steps, least_samples = (
    interval(log_min_steps_C, off_C),
    interval(log_min_steps_C + log_critical_C, off_C),
  )
  # At the ends of the candidates one of the two terms of the curve is nothing beside the other.
  if allowed_C[0]:
    result = dataclasses.replace(result, low=0.0)
    least_samples = dataclasses.replace(least_samples, low=0.0)
  if allowed_C[-1]:
    result = dataclasses.replace(result, high=math.inf)
    least_steps = dataclasses.replace(least_steps, low=0.0)
  return Tradeoff(least_steps, least_samples, result, math.sqrt(least / degrees))


def smooth_crossing(
  samples: Numbers, losses: Numbers, target: float, begins: float
) -> float | None:
  """Returns the samples after which the parabola through a branch's losses is at most `target`; or None.

  Args:
    samples: since the branch began, at each step.
    begins: samples consumed where the branch began; the parabola is over the log of all samples.
  """
  places_N = np.log(begins + np.array(samples, float))
  curve = np.polynomial.Polynomial.fit(places_N, np.array(losses, float), 2)
  grid = np.linspace(places_N[0], places_N[-1], _CANDIDATES)
  reached = curve(grid) <= target
  return math.exp(float(grid[reached.argmax()])) - begins if reached.any() else None


def branch_tradeoff(judged: Sequence[Judged], begins: int) -> Tradeoff | None:
  """Fits samples against steps; None if the branches do not bound Bcrit from both sides.

  Args:
    begins: samples that the run had consumed at the checkpoint.
  """
  trained = [one for one in judged if not one.measured.diverged]
  target = max(one.loss for one in trained)
  results = []
  for measured in (one.measured for one in trained):
    steps_per_block = measured.branch.steps_per_block
    block_samples = steps_per_block * measured.branch.batch
    places = block_samples * (np.arange(len(measured.blocks)) + 0.5)
    took = smooth_crossing(places, measured.blocks, target, begins)
    if took:
      results.append((took, took / block_samples * steps_per_block))
  if len(results) < _FEWEST:
    return None
  curve = fit_tradeoff(*zip(*results, strict=True))
  critical = curve.critical_batch
  return curve if critical.low > 0 and critical.high < float("inf") else None
