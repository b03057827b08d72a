"""Line charts for the scripts that measure: a few panels under each other, as one SVG file."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from maxbatch.plots.svg_parts import PALETTE, Point, curve, dot, drawing, label, line, short, ticks

_WIDTH, _LEFT, _RIGHT, _TOP, _PANEL, _GAP = 760, 70, 20, 50, 230, 75
_GRID, _AXIS = "#ddd", "#333"


@dataclasses.dataclass(frozen=True)
class Series:
  """A line, or with `dots` a cloud of points."""

  name: str
  points: Sequence[Point]
  dots: bool = False
  width: float = 1.6


@dataclasses.dataclass(frozen=True)
class Panel:
  """A pair of axes; `high` cuts off what lies above."""

  title: str
  x_name: str
  series: Sequence[Series]
  low: float | None = None
  high: float | None = None
  names_at: Literal["left", "right"] = "left"


def chart(title: str, panels: Sequence[Panel]) -> str:
  """The drawing as SVG text."""
  parts = [label((_WIDTH / 2, 20), title)]
  for number, panel in enumerate(panels):
    parts += _panel(panel, _TOP + number * (_PANEL + _GAP))
  return drawing(_WIDTH, _TOP + len(panels) * (_PANEL + _GAP), parts)


def _panel(panel: Panel, top: float) -> Iterator[str]:
  points = [point for series in panel.series for point in series.points]
  xs, ys = _span([x for x, _ in points]), _span([y for _, y in points])
  ys = (ys[0] if panel.low is None else panel.low, ys[1] if panel.high is None else panel.high)
  width = _WIDTH - _LEFT - _RIGHT

  def place(x: float, y: float) -> Point:
    y = min(max(y, ys[0]), ys[1])
    across = (x - xs[0]) / (xs[1] - xs[0])
    return _LEFT + width * across, top + _PANEL * (1 - (y - ys[0]) / (ys[1] - ys[0]))

  yield label((_LEFT, top - 8), panel.title, "start")
  for y in ticks(*ys):
    yield line(place(xs[0], y), place(xs[1], y), _GRID)
    yield label((_LEFT - 6, place(xs[0], y)[1] + 4), short(y), "end")
  for x in ticks(*xs):
    yield label((place(x, ys[0])[0], top + _PANEL + 16), short(x))
  yield line(place(xs[0], ys[0]), place(xs[1], ys[0]), _AXIS)
  yield label((_WIDTH / 2, top + _PANEL + 34), panel.x_name)
  for number, (series, color) in enumerate(zip(panel.series, itertools.cycle(PALETTE))):
    placed = [place(*point) for point in series.points]
    yield from (
      (dot(at, color) for at in placed)
      if series.dots
      else [curve(placed, color, width=series.width)]
    )
    at, anchor = (_LEFT + 12, "start") if panel.names_at == "left" else (_WIDTH - _RIGHT, "end")
    yield label((at, top + 14 + 15 * number), series.name, anchor, color)


def _span(values: Sequence[float]) -> Point:
  finite = [value for value in values if math.isfinite(value)]
  low, high = min(finite), max(finite)
  return (low, high) if high > low else (low - 0.5, low + 0.5)
