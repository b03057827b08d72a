"""Charts for a page, by bokeh: to be zoomed into, hovered over, and switched between axes.

Bokeh's own script is copied into the page, so that it needs no network. What a run is called stands
only where bokeh takes text as text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxbatch.plots.chart import Band, Bars, Cells, Chart, Line, Mark, Panel

if TYPE_CHECKING:
  from bokeh.models import GlyphRenderer, Model

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Colors of Okabe and Ito (2008), which people with any color vision can tell apart."""
DASHES = ("solid", "dashed", "dashdot", "dotted")
"""As many as have no factor in common with the number of colors: pairs repeat after 28 lines."""
SYMBOLS = ("circle", "square", "diamond", "inverted_triangle", "triangle", "plus", "x")
_PALETTE = "Viridis256"
_PANEL_PIXELS, _ROW_PIXELS, _AXES_PIXELS = 220, 30, 86
_LEFT_PIXELS = 64
"""For the numbers along y: the axes of all panels begin at the same place."""
_GRID = "#dddddd"
_FAINT, _BAND = 0.45, 0.2
_LEGEND_COLUMNS = 4
"""As many as a phone has room for, of short names."""
_WIDTH_PIXELS = 660
"""Width of a panel in a window that is not wide."""
_SYMBOL_PIXELS, _LETTER_PIXELS, _LETTER = 36, 7.5, 0.6
"""In a legend; and how wide a letter is, of its height."""
_LEGEND_ROW_PIXELS = 23
_NARROWEST_PIXELS = 3
"""Width of the narrowest bar with a line around it."""
_SMALLEST_PIXELS, _LARGEST_PIXELS = 6, 10

# The little that bokeh asks its users to write themselves: another column along x, for all lines.
_SWITCH = """
for (const glyph of glyphs) glyph.x = {field: columns[this.active]}
for (const axis of axes) axis.axis_label = this.labels[this.active]
for (const figure of figures) figure.reset.emit()
"""


@functools.cache
def _bokeh() -> Any:
  """Imports the library, which takes 0.7 s and brings numpy: only who draws pays for that."""
  import bokeh.core.properties
  import bokeh.embed
  import bokeh.models
  import bokeh.plotting
  import bokeh.resources

  return bokeh


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


def library(charts: Sequence[Chart]) -> str:
  """Returns what these charts need of bokeh's script, for the head of a page."""
  if not charts:
    return ""
  has_switch = any(len(chart.axes) > 1 for chart in charts)
  parts = ["bokeh", *(["bokeh-widgets"] if has_switch else [])]
  return _bokeh().resources.Resources(mode="inline", components=parts).render_js()


def embed(charts: Mapping[str, Chart]) -> tuple[str, dict[str, Embedded]]:
  """Returns the script that draws all charts of a page, and their places, by their names."""
  drawn = {name: _Drawn(chart) for name, chart in charts.items()}
  models: dict[str, Model] = {
    f"{name}/{place}": model
    for name, one in drawn.items()
    for place, model in enumerate(one.models())
  }
  if not models:
    return "", {}
  script, divs = _bokeh().embed.components(models)
  results = {}
  for name, one in drawn.items():
    panels = enumerate(one.chart.panels)
    of_panels = [EmbeddedPanel(each.title, divs[f"{name}/{place}"]) for place, each in panels]
    switch = divs.get(f"{name}/{len(of_panels)}", "")
    results[name] = Embedded(one.chart.name, switch, of_panels)
  return script, results


class _Drawn:
  """A chart as bokeh's figures, which share their range along x."""

  def __init__(self, chart: Chart):
    self.chart = chart
    self._range = _bokeh().models.DataRange1d(range_padding=0.01)
    self._groups: dict[str, list[GlyphRenderer]] = {}
    self._lines: list[GlyphRenderer] = []
    self._narrowest = _narrowest_pixels(chart)
    last = chart.panels[-1]
    self._figures = [self._figure(panel, is_last=panel is last) for panel in chart.panels]

  def models(self) -> list[Model]:
    """Returns the figures, and what switches their axis."""
    if len(self.chart.axes) == 1:
      return list(self._figures)
    models = _bokeh().models
    buttons = models.RadioButtonGroup(labels=list(self.chart.axes), active=0)
    arguments = {
      "glyphs": [one.glyph for one in self._lines],
      "columns": [_column(place) for place in range(len(self.chart.axes))],
      "axes": [self._figures[-1].xaxis[0]],
      "figures": self._figures,
    }
    buttons.js_on_change("active", models.CustomJS(args=arguments, code=_SWITCH))
    return [*self._figures, buttons]

  def _figure(self, panel: Panel, *, is_last: bool) -> Any:
    models, rows = _bokeh().models, self.chart.row_names
    own: dict[str, Any] = {"y_range": list(reversed(rows))} if rows else {}
    zoom = models.BoxZoomTool()
    tools = [zoom, models.PanTool(), models.WheelZoomTool(), models.ResetTool(), models.SaveTool()]
    figure: Any = _bokeh().plotting.figure(
      height=_AXES_PIXELS + _ROW_PIXELS * len(rows) if rows else _PANEL_PIXELS,
      sizing_mode="stretch_width",
      x_range=self._range,
      **own,
      x_axis_type="log" if self.chart.log_x else "auto",
      y_axis_type="log" if panel.log else "auto",
      background_fill_color=None,
      border_fill_color=None,
      outline_line_color=None,
      min_border_left=_LEFT_PIXELS,
      toolbar_location="above",
      toolbar_inner=not rows,  # There it would lie over the first row.
      tools=tools,
      active_drag=zoom,
      output_backend="canvas",
    )
    figure.toolbar.logo = None
    figure.toolbar.autohide = True
    self._scale(figure, panel, is_last=is_last)
    named = [pair for mark in panel.marks for pair in self._draw(figure, mark)]
    self._name(figure, named)
    return figure

  def _scale(self, figure: Any, panel: Panel, *, is_last: bool) -> None:
    """Says how the axes look, and where they begin and end."""
    number = _bokeh().models.NumeralTickFormatter
    for axis in figure.axis:
      axis.update(axis_line_color=None, minor_tick_line_color=None, major_tick_line_color=_GRID)
    figure.grid.grid_line_color = _GRID
    figure.xaxis.axis_label = self.chart.axes[0] if is_last else None
    figure.xaxis.formatter = number(format="0.[00]a")
    if self.chart.ticks:
      figure.xaxis.ticker = list(self.chart.ticks)
      figure.xgrid.ticker = figure.xaxis[0].ticker
    if not (panel.log or self.chart.row_names):
      figure.yaxis.formatter = number(format="0.[0000]a")
    if panel.low is not None:
      figure.y_range.start = panel.low
    if panel.high is not None:
      figure.y_range.end = panel.high

  def _draw(self, figure: Any, mark: Mark) -> Iterator[tuple[str, str, list[GlyphRenderer]]]:
    """Draws a mark; yields label, group and parts."""
    if isinstance(mark, Line):
      parts = list(self._line(figure, mark))
      if mark.label:
        axes = [(name, f"@{_column(at)}{{0,0}}") for at, name in enumerate(self.chart.axes)]
        self._add_hover(figure, parts[0], [(mark.label, "@y{0.[00000]}"), *axes], "vline")
      self._lines += parts
    elif isinstance(mark, Band):
      parts = [self._band(figure, mark)]
      self._lines += parts
    elif isinstance(mark, Cells):
      parts = [self._cells(figure, mark)]
    else:
      parts = [self._bars(figure, mark)]
    yield mark.label, "" if isinstance(mark, Bars | Cells) else mark.group, parts

  def _line(self, figure: Any, line: Line) -> Iterator[GlyphRenderer]:
    source = _source(_along(line.x) | {"y": _numbers(line.y)})
    color, alpha = COLORS[line.color % len(COLORS)], _FAINT if line.faint else 1.0
    along = {"x": _column(0), "y": "y", "source": source, "color": color, "alpha": alpha}
    if line.style == "steps":
      yield figure.step(**along, mode="after", line_width=1.8)
    elif line.style != "dots":
      dash = DASHES[line.dash % len(DASHES)]
      yield figure.line(**along, line_width=1.2 if line.faint else 1.8, line_dash=dash)
    if line.style in ("dots", "both"):
      yield figure.scatter(**along, marker=SYMBOLS[line.color % len(SYMBOLS)], size=5)

  def _band(self, figure: Any, band: Band) -> GlyphRenderer:
    source = _source(_along(band.x) | {"low": _numbers(band.low), "high": _numbers(band.high)})
    color = COLORS[band.color % len(COLORS)]
    return figure.varea(_column(0), "low", "high", source=source, color=color, alpha=_BAND)

  def _bars(self, figure: Any, bars: Bars) -> GlyphRenderer:
    lengths = _numbers(bars.lengths)
    begins = _numbers(bars.begins or [0.0] * len(bars.lengths))
    ends = begins + lengths
    columns = {"y": list(bars.names), "left": begins, "right": ends, "length": lengths}
    words = {"words": list(bars.words), "middle": (begins + ends) / 2} if bars.words else {}
    source, color = _source(columns | words), COLORS[bars.color % len(COLORS)]
    # A line around bars as narrow as itself would hide them.
    edge = "white" if self._narrowest >= _NARROWEST_PIXELS else None
    look = {"color": color, "alpha": bars.opacity, "line_color": edge}
    drawn = figure.hbar("y", left="left", right="right", height=0.85, source=source, **look)
    if size := _font_pixels(bars.words, self._narrowest):
      centered = {"text_align": "center", "text_baseline": "middle", "text_font_size": f"{size}px"}
      figure.text("middle", "y", "words", source=source, **centered)
    tips = [("", "@y"), *([(bars.label, "@words")] if words else []), ("", "@length{0,0.[000]}")]
    self._add_hover(figure, drawn, tips, "mouse")
    return drawn

  def _cells(self, figure: Any, cells: Cells) -> GlyphRenderer:
    pairs = [
      (name, place, value)
      for name, row in zip(cells.names, cells.values, strict=True)
      for place, value in enumerate(row)
    ]
    names, places, values = zip(*pairs, strict=True)
    source = _source({"y": list(names), "x": _numbers(places), "value": _numbers(values)})
    models = _bokeh().models
    color = models.LinearColorMapper(_PALETTE, low=0.0, high=cells.high)
    look = {"fill_color": {"field": "value", "transform": color}, "line_color": None}
    drawn = figure.rect("x", "y", width=1.0, height=1.0, source=source, **look)
    bar = models.ColorBar(color_mapper=color, width=12, title=cells.label)
    bar.update(background_fill_alpha=0)
    figure.add_layout(bar, "right")
    tips = [("", "@y, @x"), (cells.label, "@value{0.[000]}")]
    self._add_hover(figure, drawn, tips, "mouse")
    return drawn

  def _add_hover(
    self, figure: Any, part: GlyphRenderer, tips: Sequence[tuple[str, str]], mode: str
  ) -> None:
    hover = _bokeh().models.HoverTool
    figure.add_tools(hover(renderers=[part], tooltips=list(tips), mode=mode, visible=False))

  def _name(self, figure: Any, named: Sequence[tuple[str, str, list[GlyphRenderer]]]) -> None:
    """Names a mark in a legend above the figure; a group is named in the first one that has it.

    One name alone, which the title says too, needs none: each takes a browser a hundredth of a second.
    """
    models, value = _bokeh().models, _bokeh().core.properties.value
    items = []
    for label, group, parts in named:
      shown = self._groups.setdefault(group, parts) if group else parts
      if shown is parts and label:
        items.append(models.LegendItem(label=value(label), renderers=parts))
      for part in parts if shown is not parts else ():
        shown[0].js_link("visible", part, "visible")
    if len(items) > 1:
      columns = _legend_columns([label for label, *_ in named])
      figure.height += _LEGEND_ROW_PIXELS * ((len(items) - 1) // columns)
      legend = models.Legend(
        items=items,
        orientation="horizontal",
        click_policy="hide",
        ncols=columns,
      )
      legend.update(border_line_color=None, background_fill_alpha=0, padding=0, margin=0)
      figure.add_layout(legend, "above")


def _legend_columns(labels: Sequence[str]) -> int:
  """Returns as many columns as have room."""
  widest = _SYMBOL_PIXELS + _LETTER_PIXELS * max(map(len, labels))
  return max(1, min(int(_WIDTH_PIXELS / widest), _LEGEND_COLUMNS))


def _narrowest_pixels(chart: Chart) -> float:
  """Returns how wide the shortest bar is."""
  bars = [mark for panel in chart.panels for mark in panel.marks if isinstance(mark, Bars)]
  lengths = [length for each in bars for length in each.lengths]
  begins = [begin for each in bars for begin in each.begins or [0.0] * len(each.lengths)]
  ends = (begin + length for begin, length in zip(begins, lengths, strict=True))
  return _WIDTH_PIXELS * min(lengths) / max(ends) if lengths else 0.0


def _font_pixels(words: Sequence[str], pixels: float) -> int:
  """Returns the size in which the words fit so many pixels; 0 where they would not be legible."""
  if not words:
    return 0
  size = int(pixels / (_LETTER * max(map(len, words))))
  return min(size, _LARGEST_PIXELS) if size >= _SMALLEST_PIXELS else 0


def _column(place: int) -> str:
  return f"x{place}"


def _along(x: Sequence[Sequence[float]]) -> dict[str, Any]:
  """Returns the columns of the axes of x."""
  return {_column(place): _numbers(each) for place, each in enumerate(x)}


def _numbers(values: Sequence[float]) -> Any:
  """Returns numbers as an array, which bokeh embeds as bytes."""
  import numpy as np

  return np.asarray(values, np.float64)


def _source(columns: Mapping[str, Any]) -> Any:
  return _bokeh().models.ColumnDataSource(dict(columns))
