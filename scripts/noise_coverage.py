"""How often 95% intervals of the noise scale hold the truth: Fieller's, as used here, and a jackknife's.

    .venv/bin/python scripts/noise_coverage.py     # seconds; prints a table in Markdown

Gradients are drawn around a known mean, |G|² = 1, with tr Σ = 50: at batch 8 the signal is weak. Each trial is
a run of so many steps of which each gives |G|² and tr Σ without bias, as a training step does.
"""

import numpy as np
from scipy import stats

from maxbatch.core.confidence import ratios_of_means

NOISE_SCALE, BATCH, TRIALS = 50.0, 8, 4000
STEPS = (16, 32, 64)
SIZES = (30, 1000)
"""Dimensions over which the noise is spread: few are a gradient of which some directions are loud."""


def moments(size: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
  """Draws tr Σ and |G|² of each step as it estimates them: two arrays [trials, steps]."""
  rng, shape = np.random.default_rng(size + steps), (TRIALS, steps)
  variance = NOISE_SCALE / size
  # Of the batch's mean only the direction of G and the sum of squares across it matter.
  along = 1 + rng.normal(size=shape) * np.sqrt(variance / BATCH)
  across = rng.chisquare(size - 1, shape) * variance / BATCH
  big = along**2 + across
  small = big + rng.chisquare((BATCH - 1) * size, shape) * variance / BATCH
  return (small - big) / (1 - 1 / BATCH), (BATCH * big - small) / (BATCH - 1)


def fieller(noise: np.ndarray, signal: np.ndarray) -> tuple[float, float]:
  """Returns the share of runs with an interval, and of these the share that hold the truth."""
  result = ratios_of_means(noise, signal)
  known = np.isfinite(result.ratio)
  held = (result.low < NOISE_SCALE) & (result.high > NOISE_SCALE)
  return float(known.mean()), float(held[known].mean())


def jackknife(noise: np.ndarray, signal: np.ndarray) -> float:
  """Returns the share of runs where ratio ± t · delete-1 error holds the truth."""
  steps = noise.shape[1]
  ratio = noise.mean(1) / signal.mean(1)
  left = (noise.sum(1, keepdims=True) - noise) / (signal.sum(1, keepdims=True) - signal)
  error = np.sqrt((steps - 1) * left.var(axis=1))
  return float((abs(ratio - NOISE_SCALE) < stats.t.ppf(0.975, steps - 1) * error).mean())


def main() -> None:
  """Prints the table."""
  columns = ("steps", "dimensions", "runs with Fieller's", "of these hold the truth", "jackknife's")
  print(f"| {' | '.join(columns)} |")
  print("|---" * len(columns) + "|")
  for size in SIZES:
    for steps in STEPS:
      drawn = moments(size, steps)
      known, held = fieller(*drawn)
      print(f"| {steps} | {size:,} | {known:.0%} | {held:.1%} | {jackknife(*drawn):.1%} |")


if __name__ == "__main__":
  main()
