"""The branches drawn: loss over tokens, and the judged loss over the batch with its tolerance."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxbatch.experiments.branching import Branching
from maxbatch.experiments.losses import Judged
from maxbatch.experiments.report import CriticalBatchReport
from maxbatch.plots.figure import COLORS, DASHES, FAINT, MARKERS, count_axis, legend, new_figure

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_FOUND = "#009E73"
Styled = tuple[Judged, str, str]
"""A branch, its color and its marker, the same in both panels."""


def plot(report: CriticalBatchReport) -> Figure:
  """Every branch's loss over its tokens, and below it the judged losses over the batch."""
  figure, (above, below) = new_figure(_title(report), 2, panel=3.4)
  _curves(above, report)
  _losses(below, report)
  return figure


def _title(report: CriticalBatchReport) -> str:
  """`Critical batch of mine after step 200: between 64 and 128 samples`."""
  run_name, step = Path(report.origin.folder).parent.parent.name, report.origin.step
  low, high = report.at_least, report.below
  if high is None:
    found = f"at least {low:,} samples"
  else:
    found = f"below {high:,} samples" if low is None else f"between {low:,} and {high:,} samples"
  return f"Critical batch of {run_name} after step {step:,}: {found}"


def _styled(report: CriticalBatchReport) -> Iterator[Styled]:
  return zip(report.judged, itertools.cycle(COLORS), itertools.cycle(MARKERS))


def _curves(axes: Axes, report: CriticalBatchReport) -> None:
  """Every branch's loss by blocks, pale, and its mean over the window before each point."""
  branching = report.branching
  for (one, color, marker), dashes in zip(_styled(report), itertools.cycle(DASHES)):
    if one.measured.diverged:
      continue
    branch, blocks = one.measured.branch, one.measured.blocks
    rough, smooth = _points(blocks, 1, branching), _smoothed(one, branching)
    name = f"{branch.name} ({branch.batch:,})"
    axes.plot(*rough, color=color, linewidth=0.8, alpha=0.35, gid=f"blocks-{branch.name}")
    axes.plot(*smooth, color=color, linestyle=dashes, label=name, gid=f"smoothed-{branch.name}")
    axes.plot(smooth[0][-1:], smooth[1][-1:], color=color, marker=marker)
  start = branching.tokens - branching.window_tokens
  axes.axvline(start, color=FAINT, linestyle=":", label="judged from here", gid="judged_from")
  axes.set_xlabel("tokens after the checkpoint")
  axes.set_ylabel("training loss (nats per token)")
  axes.set_xlim(left=0)
  count_axis(axes.xaxis)
  legend(axes)


def _losses(axes: Axes, report: CriticalBatchReport) -> None:
  """The judged loss of every branch, over the logarithm of its batch."""
  places = [_place(one) for one in report.judged]
  edges = places[0] - 0.3, places[-1] + 0.3
  axes.set_xlim(*edges)
  axes.set_xticks(places, [f"{one.measured.branch.batch:,}" for one in report.judged])
  axes.axvspan(
    edges[0] if report.at_least is None else math.log2(report.at_least),
    edges[1] if report.below is None else math.log2(report.below),
    color=_FOUND,
    alpha=0.15,
    linewidth=0,
    label="the critical batch",
    gid="critical",
  )
  trained = [one for one in report.judged if not one.measured.diverged]
  losses = [one.loss for one in trained]
  axes.plot([_place(one) for one in trained], losses, color="#333333", linewidth=0.8, gid="judged")
  _limits(axes, trained, report.tolerance)
  for one, color, marker in _styled(report):
    _spot(axes, one, color, marker)
  axes.set_xlabel("batch (samples per step)")
  axes.set_ylabel("judged loss (nats per token)")
  legend(axes)


def _limits(axes: Axes, trained: Sequence[Judged], tolerance: float) -> None:
  """What each branch may have at most: the best smaller one and the tolerance."""
  compared = [one for one in trained if one.best_smaller is not None]
  axes.hlines(
    [one.loss - one.difference + tolerance for one in compared],
    [_place(one) - 0.25 for one in compared],
    [_place(one) + 0.25 for one in compared],
    color=FAINT,
    linestyle="--",
    label="best smaller branch\n+ tolerance",
    gid="limits",
  )


def _spot(axes: Axes, one: Judged, color: str, marker: str) -> None:
  """A branch's judged loss with the interval of its difference."""
  if one.measured.diverged:
    axes.text(_place(one), 0.5, "diverged", ha="center", transform=axes.get_xaxis_transform())
    return
  interval = one.half_width if math.isfinite(one.half_width) else 0
  name = f"spot-{one.measured.branch.name}"
  axes.errorbar(_place(one), one.loss, interval or None, color=color, marker=marker, gid=name)


def _place(one: Judged) -> float:
  """Along the axis of batches."""
  return math.log2(one.measured.branch.batch)


def _smoothed(one: Judged, branching: Branching) -> tuple[list[float], list[float]]:
  """The mean of the window that ends at each block."""
  blocks, window = one.measured.blocks, branching.window_blocks
  means = [statistics.fmean(blocks[end - window : end]) for end in range(window, len(blocks) + 1)]
  return _points(means, window, branching)


def _points(
  values: Sequence[float], first: int, branching: Branching
) -> tuple[list[float], list[float]]:
  """Tokens at the ends of the blocks, and the values there; the first is block `first` (from 1)."""
  ends = [(first + place) * branching.block_tokens for place in range(len(values))]
  return [float(end) for end in ends], list(values)
