"""The critical batch size from the losses of branches, compared at equal numbers of tokens.

Merrill, Arora, Groeneveld and Hajishirzi, "Critical Batch Size Revisited" (2025, arXiv 2505.23971),
section 3.1: the critical batch is the largest whose smoothed loss L is at most ε above that of
every smaller batch that was tried, k* = max { k : L(k) ≤ L(j) + ε for all j < k }, with ε = 0.01.
So a branch is compared with the best of the smaller ones, which need not be factor 1.

The paper smooths the loss with an exponential moving average over steps (α = 0.5). With steps of
millions of tokens this works; with smaller ones it would average over few tokens, and over a
different number for every batch. Here L is the mean over the last tokens of the branch, the same
samples for all branches. So the comparison is paired: on a block of samples, the losses of two
branches differ by far less than the losses of two blocks.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from maxbatch.experiments.branching import Branch

_CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Measured:
  """The results of one branch; `blocks` is empty if its loss became infinite or NaN."""

  branch: Branch
  learning_rate: float
  blocks: tuple[float, ...]
  """Mean training loss of each block of samples, in nats per token."""
  eval_loss: float | None
  seconds: float

  @property
  def diverged(self) -> bool:
    """Whether the loss became infinite or NaN."""
    return not self.blocks


@dataclasses.dataclass(frozen=True)
class Judged:
  """A branch compared with the best of the smaller ones; the smallest has none."""

  measured: Measured
  loss: float
  """L: the mean loss over the window; infinite if the branch diverged."""
  best_smaller: Branch | None
  difference: float
  """L − L of the best smaller branch."""
  half_width: float
  """Half the difference's 95% confidence interval, from the spread of the window's blocks. It covers
  the noise of measuring these two branches, not the variation with the order of the samples."""
  within: bool
  """difference ≤ ε."""
  clear: bool
  """Whether the whole interval is on the same side of ε."""


def block_means(losses: Sequence[float], steps_per_block: int) -> tuple[float, ...]:
  """Returns the mean of every `steps_per_block` losses."""
  starts = range(0, len(losses), steps_per_block)
  return tuple(statistics.fmean(losses[start : start + steps_per_block]) for start in starts)


def judge(measured: Sequence[Measured], window: int, tolerance: float) -> list[Judged]:
  """Compares every branch with the best of the smaller ones.

  Args:
    measured: the branches, smallest batch first; the first did not diverge.
    window: number of blocks at the end that are averaged.
    tolerance: ε, in nats per token.
  """
  judged: list[Judged] = []
  for branch in measured:
    best = min(judged, key=lambda other: other.loss, default=None)
    judged.append(_compare(branch, best, window, tolerance))
  return judged


def critical(judged: Sequence[Judged]) -> int:
  """Returns the index in `judged` of the largest branch that is within ε."""
  return max(place for place, one in enumerate(judged) if one.within)


def half_width(values: Sequence[float]) -> float:
  """Returns half the 95% confidence interval of the mean of autocorrelated values.

  Neighbouring blocks are correlated: n of them with correlation r count as n·(1 − r)/(1 + r).
  """
  count = len(values)
  mean = statistics.fmean(values)
  squares = sum((value - mean) ** 2 for value in values)
  if squares == 0:
    return 0.0
  products = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(values))
  # The sample autocorrelation of n uncorrelated values is biased by about -1/n.
  correlation = min(max(0.0, products / squares + 1 / count), 0.9)
  error = math.sqrt(squares / (count - 1) / count * (1 + correlation) / (1 - correlation))
  return _student_t(count - 1) * error


def _compare(branch: Measured, best: Judged | None, window: int, tolerance: float) -> Judged:
  loss = math.inf if branch.diverged else statistics.fmean(branch.blocks[-window:])
  if best is None:
    return Judged(branch, loss, None, 0.0, 0.0, within=True, clear=True)
  pairs = zip(branch.blocks[-window:], best.measured.blocks[-window:], strict=not branch.diverged)
  width = 0.0 if branch.diverged else half_width([mine - other for mine, other in pairs])
  difference = loss - best.loss
  return Judged(
    measured=branch,
    loss=loss,
    best_smaller=best.measured.branch,
    difference=difference,
    half_width=width,
    within=difference <= tolerance,
    clear=abs(difference - tolerance) > width,
  )


def _student_t(degrees_of_freedom: int) -> float:
  """Returns the 97.5% quantile of Student's t, accurate to 1% from 3 degrees of freedom on.

  The expansion in 1/degrees around the normal quantile (Abramowitz & Stegun 26.7.5).
  """
  z = statistics.NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
  terms = (
    z,
    (z**3 + z) / 4,
    (5 * z**5 + 16 * z**3 + 3 * z) / 96,
    (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
  )
  return sum(term / degrees_of_freedom**power for power, term in enumerate(terms))
