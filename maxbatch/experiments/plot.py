"""The branches drawn: loss over tokens, and the judged loss over the batch with its tolerance."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxbatch.experiments.branching import Branching
from maxbatch.experiments.losses import Judged
from maxbatch.experiments.report import CriticalBatchReport
from maxbatch.plots.chart import Band, Chart, Line, Panel

_FOUND, _LIMIT = 2, 6
_EDGE, _HALF = 2**0.3, 2**0.25
"""Beside the smallest and largest batch, and of a limit's line, as factors."""
_LEAST_MARGIN = 1e-3
"""Above and below all losses, in nats."""


def title(report: CriticalBatchReport) -> str:
  """Returns `Critical batch of mine after step 200: between 64 and 128 samples`."""
  run_name, step = Path(report.origin.folder).parent.parent.name, report.origin.step
  low, high = report.at_least, report.below
  if high is None:
    result = f"at least {low:,} samples"
  else:
    result = f"below {high:,} samples" if low is None else f"between {low:,} and {high:,} samples"
  return f"Critical batch of {run_name} after step {step:,}: {result}"


def critical_batch_charts(report: CriticalBatchReport) -> list[Chart]:
  """Returns every branch's loss over its tokens, and below it the judged losses over the batch."""
  curves = Panel("training loss (nats per token)", list(_curves(report)))
  batches = [_place(one) for one in report.judged]
  losses = Panel("judged loss (nats per token)", list(_losses(report)))
  return [
    Chart("losses of the branches", ["tokens after the checkpoint"], [curves]),
    Chart("critical batch", ["batch (samples per step)"], [losses], log_x=True, ticks=batches),
  ]


def _curves(report: CriticalBatchReport) -> Iterator[Line]:
  """Yields every branch's mean over the window before each point, and its loss by blocks, pale."""
  branching, shown = report.branching, list[float]()
  for place, one in enumerate(report.judged):
    if one.measured.diverged:
      continue
    branch, blocks = one.measured.branch, one.measured.blocks
    (ends, means), (places, losses) = _smoothed(one, branching), _points(blocks, 1, branching)
    look = {"color": place, "dash": place, "group": branch.name}
    yield Line(f"{branch.name} ({branch.batch:,})", [ends], means, **look)
    yield Line("", [places], losses, faint=True, **look)
    yield Line("", [ends[-1:]], means[-1:], style="dots", **look)
    shown += losses
  start = branching.tokens - branching.window_tokens
  heights = [min(shown), max(shown)] if shown else []
  yield Line("judged from here", [[start] * len(heights)], heights, color=_LIMIT, dash=3)


def _losses(report: CriticalBatchReport) -> Iterator[Band | Line]:
  """Yields the judged loss of every branch, over the logarithm of its batch."""
  trained = [one for one in report.judged if not one.measured.diverged]
  low, high = _heights(trained, report.tolerance)
  first, last = _place(report.judged[0]), _place(report.judged[-1])
  results = [report.at_least or first / _EDGE, report.below or last * _EDGE]
  yield Band("the critical batch", [results], [low] * 2, [high] * 2, color=_FOUND)
  yield _limits(trained, report.tolerance)
  means = [one.loss for one in trained]
  yield Line("", [[_place(one) for one in trained]], means, color=_LIMIT, faint=True)
  for place, one in enumerate(report.judged):
    yield from _spot(one, place)


def _heights(trained: Sequence[Judged], tolerance: float) -> tuple[float, float]:
  """Returns the range of heights in which all is drawn."""
  results = [one.loss + sign * _half_width(one) for one in trained for sign in (-1, 1)]
  results += [_limit(one, tolerance) for one in trained if one.best_smaller is not None]
  margin = 0.05 * (max(results) - min(results)) + _LEAST_MARGIN
  return min(results) - margin, max(results) + margin


def _limits(trained: Sequence[Judged], tolerance: float) -> Line:
  """Returns what each branch may have at most: the best smaller one and the tolerance."""
  places, heights = list[float](), list[float]()
  for one in trained:
    if one.best_smaller is not None:
      places += [_place(one) / _HALF, _place(one) * _HALF, math.nan]
      heights += [_limit(one, tolerance)] * 2 + [math.nan]
  return Line("best smaller branch + tolerance", [places], heights, color=_LIMIT, dash=1)


def _limit(one: Judged, tolerance: float) -> float:
  return one.loss - one.difference + tolerance


def _spot(one: Judged, place: int) -> Iterator[Line]:
  """Yields a branch's judged loss with the interval of its difference."""
  branch = one.measured.branch
  if one.measured.diverged:
    yield Line(f"{branch.name}: diverged", [[]], [], color=place, style="dots")
    return
  heights = [one.loss - _half_width(one), one.loss + _half_width(one)]
  yield Line(branch.name, [[_place(one)]], [one.loss], color=place, style="dots", group=branch.name)
  yield Line("", [[_place(one)] * 2], heights, color=place, group=branch.name)


def _place(one: Judged) -> float:
  """Returns where a branch stands along the axis of batches."""
  return float(one.measured.branch.batch)


def _half_width(one: Judged) -> float:
  return one.half_width if math.isfinite(one.half_width) else 0.0


def _smoothed(one: Judged, branching: Branching) -> tuple[list[float], list[float]]:
  """Returns the mean of the window that ends at each block."""
  blocks, window = one.measured.blocks, branching.window_blocks
  means = [statistics.fmean(blocks[end - window : end]) for end in range(window, len(blocks) + 1)]
  return _points(means, window, branching)


def _points(
  values: Sequence[float], first: int, branching: Branching
) -> tuple[list[float], list[float]]:
  """Returns the tokens at the ends of the blocks from `first` (from 1) on, and the values there."""
  ends = [(first + place) * branching.block_tokens for place in range(len(values))]
  return [float(end) for end in ends], list(values)
