"""Charts for a page, by bokeh: to be zoomed into, hovered over, and switched between axes.

Bokeh's own script is copied into the page, so that it needs no network. What a run is called stands
only where bokeh takes text as text.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.embed import components
from bokeh.models import (
  BoxZoomTool,
  ColumnDataSource,
  CustomJS,
  DataRange1d,
  GlyphRenderer,
  HoverTool,
  Legend,
  LegendItem,
  Model,
  NumeralTickFormatter,
  PanTool,
  RadioButtonGroup,
  ResetTool,
  SaveTool,
  WheelZoomTool,
)
from bokeh.plotting import figure as new_figure
from bokeh.resources import Resources

from maxbatch.plots.chart import Band, Bars, Chart, Line, Mark, Panel

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("solid", "dashed", "dashdot", "dotted")
_SYMBOLS = ("circle", "square", "diamond", "inverted_triangle", "triangle", "plus", "x")
_PANEL_PIXELS, _ROW_PIXELS, _AXES_PIXELS = 220, 30, 56
_LEFT_PIXELS = 64
"""For the numbers along y: the axes of all panels begin at the same place."""
_GRID = "#dddddd"
_FAINT, _BAND = 0.45, 0.2
_LEGEND_COLUMNS = 4
"""As many as a phone has room for."""

# The little that bokeh asks its users to write themselves: another column along x, for all lines.
_SWITCH = """
for (const glyph of glyphs) glyph.x = {field: columns[this.active]}
for (const axis of axes) axis.axis_label = this.labels[this.active]
for (const figure of figures) figure.reset.emit()
"""


@dataclasses.dataclass(frozen=True)
class EmbeddedPanel:
  """A place in the page."""

  title: str
  div: str


@dataclasses.dataclass(frozen=True)
class Embedded:
  """A chart's places in the page, in order."""

  name: str
  switch: str
  """The buttons that change the axis of x; empty: there is one axis."""
  panels: Sequence[EmbeddedPanel]


def library() -> str:
  """Bokeh's script, for the head of a page."""
  return Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).render_js()


def embed(charts: Mapping[str, Chart]) -> tuple[str, dict[str, Embedded]]:
  """The script that draws all charts of a page, and their places, by their names."""
  drawn = {name: _Drawn(chart) for name, chart in charts.items()}
  models: dict[str, Model] = {
    f"{name}/{place}": model
    for name, one in drawn.items()
    for place, model in enumerate(one.models())
  }
  if not models:
    return "", {}
  script, divs = components(models)
  found = {}
  for name, one in drawn.items():
    of_panels = [
      EmbeddedPanel(panel.title, divs[f"{name}/{place}"])
      for place, panel in enumerate(one.chart.panels)
    ]
    switch = divs.get(f"{name}/{len(of_panels)}", "")
    found[name] = Embedded(one.chart.name, switch, of_panels)
  return script, found


class _Drawn:
  """A chart as bokeh's figures, which share their range along x."""

  def __init__(self, chart: Chart):
    self.chart = chart
    self._range = DataRange1d(range_padding=0.01)
    self._groups: dict[str, list[GlyphRenderer]] = {}
    self._lines: list[GlyphRenderer] = []
    self._figures = [
      self._figure(panel, is_last=panel is chart.panels[-1]) for panel in chart.panels
    ]

  def models(self) -> list[Model]:
    """The figures, and what switches their axis."""
    if len(self.chart.axes) == 1:
      return list(self._figures)
    buttons = RadioButtonGroup(labels=list(self.chart.axes), active=0)
    arguments = {
      "glyphs": [one.glyph for one in self._lines],
      "columns": [_column(place) for place in range(len(self.chart.axes))],
      "axes": [self._figures[-1].xaxis[0]],
      "figures": self._figures,
    }
    buttons.js_on_change("active", CustomJS(args=arguments, code=_SWITCH))
    return [*self._figures, buttons]

  def _figure(self, panel: Panel, *, is_last: bool) -> Any:
    rows, zoom = self.chart.row_names, BoxZoomTool()
    own: dict[str, Any] = {"y_range": list(reversed(rows))} if rows else {}
    figure: Any = new_figure(
      height=_AXES_PIXELS + _ROW_PIXELS * len(rows) if rows else _PANEL_PIXELS,
      sizing_mode="stretch_width",
      x_range=self._range,
      **own,
      y_axis_type="log" if panel.log else "auto",
      background_fill_color=None,
      border_fill_color=None,
      outline_line_color=None,
      min_border_left=_LEFT_PIXELS,
      toolbar_location="above",
      toolbar_inner=True,
      tools=[zoom, PanTool(), WheelZoomTool(), ResetTool(), SaveTool()],
      active_drag=zoom,
      output_backend="canvas",
    )
    figure.toolbar.logo = None
    figure.toolbar.autohide = True
    for axis in figure.axis:
      axis.update(axis_line_color=None, minor_tick_line_color=None, major_tick_line_color=_GRID)
    figure.grid.grid_line_color = _GRID
    figure.xaxis.axis_label = self.chart.axes[0] if is_last else None
    figure.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
    if not (panel.log or rows):
      figure.yaxis.formatter = NumeralTickFormatter(format="0.[0000]a")
    if panel.from_zero:
      figure.y_range.start = 0
    named = [pair for mark in panel.marks for pair in self._draw(figure, mark)]
    self._name(figure, named)
    return figure

  def _draw(self, figure: Any, mark: Mark) -> Iterator[tuple[str, str, list[GlyphRenderer]]]:
    """Label, group and parts of a mark."""
    if isinstance(mark, Line):
      parts = list(self._line(figure, mark))
      self._hover(figure, parts[0], mark.label)
      self._lines += parts
    elif isinstance(mark, Band):
      parts = [self._band(figure, mark)]
      self._lines += parts
    else:
      parts = [_bars(figure, mark)]
    yield mark.label, "" if isinstance(mark, Bars) else mark.group, parts

  def _line(self, figure: Any, line: Line) -> Iterator[GlyphRenderer]:
    source = ColumnDataSource(_columns(line.x, y=line.y))
    color, alpha = COLORS[line.color % len(COLORS)], _FAINT if line.faint else 1.0
    along = {"x": _column(0), "y": "y", "source": source, "color": color, "alpha": alpha}
    if line.style == "steps":
      yield figure.step(**along, mode="after", line_width=1.8)
    elif line.style != "dots":
      dash = _DASHES[line.dash % len(_DASHES)]
      yield figure.line(**along, line_width=1.2 if line.faint else 1.8, line_dash=dash)
    if line.style in ("dots", "both"):
      yield figure.scatter(**along, marker=_SYMBOLS[line.color % len(_SYMBOLS)], size=5)

  def _band(self, figure: Any, band: Band) -> GlyphRenderer:
    source = ColumnDataSource(_columns(band.x, low=band.low, high=band.high))
    color = COLORS[band.color % len(COLORS)]
    return figure.varea(_column(0), "low", "high", source=source, color=color, alpha=_BAND)

  def _hover(self, figure: Any, part: GlyphRenderer, label: str) -> None:
    axes = [(name, f"@{_column(place)}{{0,0}}") for place, name in enumerate(self.chart.axes)]
    tips = [(label, "@y{0.[00000]}"), *axes]
    figure.add_tools(HoverTool(renderers=[part], tooltips=tips, mode="vline", visible=False))

  def _name(self, figure: Any, named: Sequence[tuple[str, str, list[GlyphRenderer]]]) -> None:
    """A legend above the figure; a group is named in the first one that has it."""
    items = []
    for label, group, parts in named:
      shown = self._groups.setdefault(group, parts) if group else parts
      if shown is parts and label:
        items.append(LegendItem(label=value(label), renderers=parts))
      for part in parts if shown is not parts else ():
        shown[0].js_link("visible", part, "visible")
    if items:
      legend = Legend(
        items=items,
        orientation="horizontal",
        click_policy="hide",
        ncols=min(len(items), _LEGEND_COLUMNS),
      )
      legend.update(border_line_color=None, background_fill_alpha=0, padding=0, margin=0)
      figure.add_layout(legend, "above")


def _bars(figure: Any, bars: Bars) -> GlyphRenderer:
  begins = np.asarray(bars.begins or [0.0] * len(bars.lengths), np.float64)
  ends = begins + np.asarray(bars.lengths, np.float64)
  columns: dict[str, Any] = {"y": list(bars.names), "left": begins, "right": ends}
  words = {"words": list(bars.words), "middle": (begins + ends) / 2} if bars.words else {}
  source, color = ColumnDataSource(columns | words), COLORS[bars.color % len(COLORS)]
  drawn = figure.hbar(
    "y", left="left", right="right", height=0.85, source=source, color=color, line_color="white"
  )
  if words:
    figure.text(
      "middle",
      "y",
      "words",
      source=source,
      text_align="center",
      text_baseline="middle",
      text_font_size="10px",
    )
  return drawn


def _column(place: int) -> str:
  return f"x{place}"


def _columns(x: Sequence[Sequence[float]], **more: Sequence[float]) -> dict[str, Any]:
  columns = {_column(place): each for place, each in enumerate(x)} | more
  return {name: np.asarray(each, np.float64) for name, each in columns.items()}
