"""Squared gradient norms of normal gradients whose noise scale is known.

Legend: T trials, N steps, D parameters.
"""

import dataclasses
import functools

import numpy as np

from maxbatch.core.noise_scale import Moments, moments


@dataclasses.dataclass(frozen=True)
class Gradients:
  """One sample's gradient is normal around `mean_D`, with variances `variance_D`."""

  mean_D: np.ndarray
  variance_D: np.ndarray

  @property
  def noise_scale(self) -> float:
    return float(self.variance_D.sum() / (self.mean_D**2).sum())

  def norms(
    self, rng: np.random.Generator, shape: tuple[int, ...], batch: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """(mean over the samples of |g_b|², |G|²), each of `shape`, of steps of `batch` samples.

    Drawn as their distributions are: the samples scatter around their mean independently of it.
    """
    error = rng.normal(size=(*shape, self.mean_D.size)) * np.sqrt(self.variance_D / batch)
    scatter = rng.chisquare(batch - 1, size=(*shape, self.mean_D.size)) * self.variance_D / batch
    big = ((self.mean_D + error) ** 2).sum(-1)
    return big + scatter.sum(-1), big

  def steps(self, rng: np.random.Generator, steps: int, batch: int) -> list[Moments]:
    """The moments of so many steps."""
    small, big = self.norms(rng, (steps,), batch)
    result = map(functools.partial(equal_parts, batch), small.tolist(), big.tolist())
    return [step for step in result if step is not None]


def equal_parts(parts: int, small: float, big: float, rows_per_part: int = 1) -> Moments | None:
  """The moments of parts of one length, from the mean of |G_p|² and |G|²."""
  return moments(parts * rows_per_part, 1 / parts, small / parts, big)


def gradients(noise_scale: float, size: int = 100, trace: float = 1.0, seed: int = 1) -> Gradients:
  """`size` parameters with variances that fall off as in real models, of sum `trace`."""
  variance_D = 1 / np.arange(1, size + 1) ** 0.7
  variance_D *= trace / variance_D.sum()
  mean_D = np.random.default_rng(seed).normal(size=size)
  mean_D *= np.sqrt(trace / noise_scale / (mean_D**2).sum())
  return Gradients(mean_D, variance_D)
