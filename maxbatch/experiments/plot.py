"""The branches drawn: loss over tokens, and the judged loss over the batch with its tolerance."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from maxbatch.experiments.branching import Branching
from maxbatch.experiments.losses import Judged
from maxbatch.experiments.report import CriticalBatchReport
from maxbatch.plots.svg_parts import (
  PALETTE,
  Point,
  band,
  curve,
  dot,
  drawing,
  label,
  line,
  short,
  ticks,
)

_WIDTH, _LEFT, _RIGHT, _TOP, _PANEL, _GAP = 760, 70, 90, 56, 240, 80
_GRID, _AXIS, _FAINT, _FOUND = "#ddd", "#333", "#777", "#2e8b57"
_LEGEND = "judged loss (green: the critical batch; dashed: best smaller branch + tolerance)"
Place = Callable[[float, float], Point]


def plot(report: CriticalBatchReport) -> str:
  """The drawing as SVG text."""
  second = _TOP + _PANEL + _GAP
  return drawing(
    _WIDTH,
    second + _PANEL + 50,
    [
      label((_WIDTH / 2, 22), _title(report)),
      *_curves(report, _TOP),
      *_losses(report, second),
    ],
  )


def _title(report: CriticalBatchReport) -> str:
  """`Critical batch of mine after step 200: between 64 and 128 samples`."""
  run_name, step = Path(report.origin.folder).parent.parent.name, report.origin.step
  low, high = report.at_least, report.below
  if high is None:
    found = f"at least {low:,} samples"
  else:
    found = f"below {high:,} samples" if low is None else f"between {low:,} and {high:,} samples"
  return f"Critical batch of {run_name} after step {step:,}: {found}"


def _curves(report: CriticalBatchReport, top: float) -> Iterator[str]:
  """Every branch's loss by blocks, pale, and its mean over the window before each point."""
  branching = report.branching
  lines = [(one, _smoothed(one, branching)) for one in report.judged if one.measured.blocks]
  raw = [value for one, _ in lines for value in one.measured.blocks]
  x_span, y_span = (0.0, float(branching.tokens)), _span(raw)
  place = _places(top, x_span, y_span)
  yield label((_LEFT, top - 10), "training loss, nats per token", "start")
  yield from _axes(place, x_span, y_span, [(x, short(x)) for x in ticks(*x_span)])
  yield label((_WIDTH / 2, top + _PANEL + 38), "tokens after the checkpoint")
  start = branching.tokens - branching.window_tokens
  yield line(place(start, y_span[0]), place(start, y_span[1]), _FAINT, dashed=True)
  x, y = place(start, y_span[1])
  yield label((x + 5, y + 12), "judged from here", "start", _FAINT)
  for (one, smooth), color in zip(lines, itertools.cycle(PALETTE)):
    rough = _points(one.measured.blocks, 1, branching)
    yield curve([place(*point) for point in rough], color, width=1, opacity=0.35)
    yield curve([place(*point) for point in smooth], color)
  yield from _names(lines, place)


def _names(lines: Sequence[tuple[Judged, list[Point]]], place: Place) -> Iterator[str]:
  """The branches' names at the right, in the order of their ends, none on another."""
  ends = [
    (place(*smooth[-1]), one, color)
    for (one, smooth), color in zip(lines, itertools.cycle(PALETTE))
  ]
  y = -math.inf
  for (x, wanted), one, color in sorted(ends, key=lambda end: end[0][1]):
    y = max(wanted + 4, y + 14)
    branch = one.measured.branch
    yield label((x + 8, y), f"{branch.name} ({branch.batch:,})", "start", color)


def _losses(report: CriticalBatchReport, top: float) -> Iterator[str]:
  """The judged loss of every branch, over the logarithm of its batch."""
  trained = [one for one in report.judged if one.measured.blocks]
  sizes = [math.log2(one.measured.branch.batch) for one in report.judged]
  limits = [one.loss - one.difference + report.tolerance for one in trained]
  edges = [one.loss + sign * one.half_width for one in trained for sign in (-1, 1)]
  x_span, y_span = (sizes[0] - 0.3, sizes[-1] + 0.3), _span([*edges, *limits])
  place = _places(top, x_span, y_span)
  named = [
    (x, short(one.measured.branch.batch)) for x, one in zip(sizes, report.judged, strict=True)
  ]
  yield label((_LEFT, top - 10), _LEGEND, "start")
  yield _bracket(report, place, x_span, y_span)
  yield from _axes(place, x_span, y_span, named)
  yield label((_WIDTH / 2, top + _PANEL + 38), "batch (samples per step)")
  spots = [
    (math.log2(one.measured.branch.batch), one, color)
    for one, color in zip(report.judged, itertools.cycle(PALETTE))
  ]
  yield from _limits(spots, report.tolerance, place)
  points = [place(x, one.loss) for x, one, _ in spots if one.measured.blocks]
  yield curve(points, _AXIS, width=1)
  for x, one, color in spots:
    yield from _spot(x, one, color, place, y_span)


def _bracket(report: CriticalBatchReport, place: Place, x_span: Point, y_span: Point) -> str:
  """Where the critical batch is, as far as the branches tell."""
  low = x_span[0] if report.at_least is None else math.log2(report.at_least)
  high = x_span[1] if report.below is None else math.log2(report.below)
  return band(place(low, y_span[0]), place(high, y_span[1]), _FOUND)


def _limits(
  spots: Sequence[tuple[float, Judged, str]], tolerance: float, place: Place
) -> Iterator[str]:
  """What each branch may have at most: the best smaller one and the tolerance."""
  for x, one, _ in spots:
    if one.best_smaller is not None and one.measured.blocks:
      y = one.loss - one.difference + tolerance
      yield line(place(x - 0.25, y), place(x + 0.25, y), _FAINT, dashed=True)


def _spot(x: float, one: Judged, color: str, place: Place, y_span: Point) -> Iterator[str]:
  if one.measured.diverged:
    yield label(place(x, statistics.fmean(y_span)), "diverged", color=color)
    return
  if one.half_width:
    low, high = one.loss - one.half_width, one.loss + one.half_width
    yield line(place(x, low), place(x, high), color)
  yield dot(place(x, one.loss), color)


def _smoothed(one: Judged, branching: Branching) -> list[Point]:
  """The mean of the window that ends at each block."""
  blocks, window = one.measured.blocks, branching.window_blocks
  means = [statistics.fmean(blocks[end - window : end]) for end in range(window, len(blocks) + 1)]
  return _points(means, window, branching)


def _points(values: Sequence[float], first: int, branching: Branching) -> list[Point]:
  """Values over the tokens at the ends of their blocks, the first that of block `first` (from 1)."""
  return [
    (float((first + place) * branching.block_tokens), value) for place, value in enumerate(values)
  ]


def _span(values: Sequence[float]) -> Point:
  """From the lowest to the highest, with some air."""
  low, high = min(values), max(values)
  air = 0.06 * (high - low) or 0.01
  return low - air, high + air


def _places(top: float, x_span: Point, y_span: Point) -> Place:
  """From values to places in a panel."""
  width = _WIDTH - _LEFT - _RIGHT

  def place(x: float, y: float) -> Point:
    across = (x - x_span[0]) / (x_span[1] - x_span[0])
    up = (y - y_span[0]) / (y_span[1] - y_span[0])
    return _LEFT + width * across, top + _PANEL * (1 - up)

  return place


def _axes(
  place: Place, x_span: Point, y_span: Point, named: Sequence[tuple[float, str]]
) -> Iterator[str]:
  """Lines and numbers; along x those that are named."""
  for tick in ticks(*y_span):
    x, y = place(x_span[0], tick)
    yield line((x, y), place(x_span[1], tick), _GRID)
    yield label((x - 6, y + 4), short(round(tick, 10)), "end")
  for tick, name in named:
    x, y = place(tick, y_span[0])
    yield line((x, y), (x, y + 5), _AXIS)
    yield label((x, y + 18), name)
  corner = place(x_span[0], y_span[0])
  yield line(corner, place(x_span[0], y_span[1]), _AXIS)
  yield line(corner, place(x_span[1], y_span[0]), _AXIS)
