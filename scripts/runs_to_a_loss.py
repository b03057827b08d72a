"""What a study of runs to one loss needs beside the curve: when a run reached it, and its mean noise scale.

Legend: N evaluations or steps.
"""

import math
from collections.abc import Callable

import numpy as np

from maxbatch.core.confidence import Interval, ratios_of_means
from maxbatch.experiments.tradeoff import Numbers, Tradeoff


def steps_with(curve: Tradeoff, samples_per_step: float) -> float:
  """Returns S for a batch."""
  return curve.min_steps.value * (1 + curve.critical_batch.value / samples_per_step)


def samples_with(curve: Tradeoff, samples_per_step: float) -> float:
  """Returns E for a batch."""
  return curve.min_samples.value * (1 + overhead_with(curve, samples_per_step).value)


def overhead_with(curve: Tradeoff, samples_per_step: float) -> Interval:
  """Returns E / Emin − 1 for a batch: the share of data that it takes beyond the least."""
  result = curve.critical_batch
  return Interval(
    samples_per_step / result.value,
    samples_per_step / result.high,
    samples_per_step / result.low if result.low else math.inf,
  )


def crossing(samples: Numbers, losses: Numbers, target: float, window: int = 5) -> float | None:
  """Samples after which the smoothed loss first is at most `target`; None if it never is.

  Args:
    samples: at each evaluation, rising, evenly spaced in their logarithm.
    losses: there.
    target: the loss to reach.
    window: evaluations around each whose mean is its smoothed loss.
  """
  if len(losses) < window:
    return None
  weights = np.full(window, 1 / window)
  smooth_N = np.convolve(np.array(losses, float), weights, "valid")
  places_N = np.convolve(np.log(np.array(samples, float)), weights, "valid")
  reached_N = smooth_N <= target
  if not reached_N.any():
    return None
  at = int(reached_N.argmax())
  if at == 0:
    return math.exp(places_N[0])
  share = (smooth_N[at - 1] - target) / (smooth_N[at - 1] - smooth_N[at])
  return math.exp(places_N[at - 1] + share * (places_N[at] - places_N[at - 1]))


def mean_noise_scale(
  signal: Numbers, noise: Numbers, samples_per_step: float, window: int = 32
) -> Interval | None:
  """The noise scale that a run had on the whole, in samples; None if it is not known.

  Args:
    signal: |G|² of every step, unbiased; may be negative.
    noise: tr(Sigma) of every step.
    samples_per_step: of the run, so that |G|² + tr(Sigma) / samples_per_step is a step's |g|².
    window: steps over which that square is averaged.

  A step gains in proportion to |G|² / (|G|² + tr(Sigma) / B) and is weighted by it; times its noise
  scale tr(Sigma) / |G|² that leaves a ratio of means of what each step measured.
  """
  signal_N, noise_N = np.array(signal, float), np.array(noise, float)
  squared_N = _smoothed(signal_N + noise_N / samples_per_step, window)
  result = ratios_of_means((noise_N / squared_N)[None], (signal_N / squared_N)[None])
  return result.interval(0)


def _smoothed(values_N: np.ndarray, window: int) -> np.ndarray:
  """Means of as many values around each as there are, up to `window`."""
  ones = np.ones(min(window, len(values_N)))
  return np.convolve(values_N, ones, "same") / np.convolve(np.ones(len(values_N)), ones, "same")


def lowest_on_grid(score: Callable[[int], tuple[float, ...]], start: int) -> int:
  """The place, among whole numbers, whose score is lower than its neighbours', by walking downhill.

  Args:
    score: of a place; asked once for each.
    start: where to begin.
  """
  known: dict[int, tuple[float, ...]] = {}

  def of(place: int) -> tuple[float, ...]:
    if place not in known:
      known[place] = score(place)
    return known[place]

  best = start
  while True:
    of(best)
    lower = min((best, best + 1, best - 1), key=of)
    if lower == best:
      return best
    best = lower


_FEWEST = 3
"""Branches, which two numbers are fitted to."""
