"""Line charts for the scripts that measure: a few panels under each other, as one picture."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maxbatch.plots.figure import COLORS, DASHES, count_axis, legend, new_figure


@dataclasses.dataclass(frozen=True)
class Series:
  """A line, or with `dots` a cloud of points."""

  name: str
  points: Sequence[tuple[float, float]]
  dots: bool = False
  width: float = 1.6


@dataclasses.dataclass(frozen=True)
class Panel:
  """A pair of axes; what lies below `low` or above `high` is not shown."""

  title: str
  x_name: str
  y_name: str
  series: Sequence[Series]
  low: float | None = None
  high: float | None = None


def chart(title: str, panels: Sequence[Panel]) -> Figure:
  """The panels, drawn."""
  figure, axes = new_figure(title, len(panels), panel=3.2)
  for one, panel in zip(axes, panels, strict=True):
    _draw(one, panel)
  return figure


def _draw(axes: Axes, panel: Panel) -> None:
  for series, color, dashes in zip(panel.series, itertools.cycle(COLORS), itertools.cycle(DASHES)):
    axes.plot(
      *zip(*series.points, strict=True),
      color=color,
      label=series.name,
      linewidth=series.width,
      linestyle="none" if series.dots else dashes,
      marker="o" if series.dots else "",
    )
  axes.set_title(panel.title, loc="left", fontsize="medium")
  axes.set_xlabel(panel.x_name)
  axes.set_ylabel(panel.y_name)
  axes.set_ylim(panel.low, panel.high)
  count_axis(axes.xaxis)
  legend(axes)
