"""A timetable drawn: a row per stage, time to the right, a backward twice as wide as a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbatch.pipeline_parallel.cost import PassCosts, TickTimes, tick_times
from maxbatch.pipeline_parallel.timetable import Timetable
from maxbatch.plots.chart import Bars, Chart, Panel
from maxbatch.plots.figure import new_figure

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_FORWARD, _BACKWARD, _IDLE = "#56B4E9", "#F0E442", "#e4e4e4"
_COSTS = PassCosts()
_PAGE_COLORS = {"forward": 4, "backward": 5}
Point = tuple[float, float]
# A PNG has at most 2^16 dots across; where a box becomes too narrow for words it has none.
_UNIT_INCHES, _WIDEST_INCHES, _NARROWEST_LABELLED_INCHES = 0.3, 300.0, 0.2
_ROW_INCHES, _MARGIN_INCHES, _HEIGHT = 0.36, 1.0, 0.9


def plot(table: Timetable, title: str) -> Figure:
  """A box per forward and backward, labelled with its microbatch: repeat.microbatch if the stages
  compute several repeats. Later repeats are paler."""
  clock, stages = tick_times(table, _COSTS), table.shape.stages
  units = max(clock[-1].end if clock else 0, 1)
  unit = min(_UNIT_INCHES, _WIDEST_INCHES / units)
  width, height = max(units * unit, 5.0) + _MARGIN_INCHES, stages * _ROW_INCHES + 0.9
  figure, [axes] = new_figure(title, 1, width=width, panel=height)
  _idle(axes, clock, stages)
  _passes(axes, table, clock, labelled=unit >= _NARROWEST_LABELLED_INCHES)
  axes.grid(visible=False)
  axes.set_xlim(0, units)
  axes.set_ylim(stages - 0.5, -0.5)
  axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
  axes.set_xlabel("time (a forward of one microbatch on one stage takes 1)")
  figure.legend(loc="outside lower center", ncols=3, frameon=False)
  return figure


def _idle(axes: Axes, clock: list[TickTimes], stages: int) -> None:
  """The time of all ticks, which the boxes then cover as far as it is used."""
  boxes = [
    _box(span.forward_start, stage, span.end - span.forward_start)
    for span in clock
    for stage in range(stages)
    if span.end > span.forward_start
  ]
  _add(axes, "idle", boxes, _IDLE, 1)


def _passes(axes: Axes, table: Timetable, clock: list[TickTimes], *, labelled: bool) -> None:
  """Every forward and backward; the boxes of a kind and repeat together."""
  forwards = [(clock[tick].forward_start, place, one) for tick, place, one in table.forwards()]
  backwards = [(clock[tick].backward_start, place, one) for tick, place, one in table.backwards()]
  repeats = table.shape.repeats
  for name, entries, width, color in (
    ("forward", forwards, _COSTS.forward, _FORWARD),
    ("backward", backwards, _COSTS.backward, _BACKWARD),
  ):
    for repeat in range(repeats):
      boxes = [_box(x, place.stage, width) for x, place, _ in entries if place.repeat == repeat]
      _add(axes, name, boxes, color, 1 - 0.6 * repeat / repeats, repeat)
    for x, place, entry in entries if labelled else ():
      words = f"{place.repeat}.{entry.microbatch}" if repeats > 1 else str(entry.microbatch)
      place = x + width / 2, place.stage
      axes.text(*place, words, ha="center", va="center", fontsize=7, in_layout=False)


def _box(x: float, stage: int, width: float) -> list[Point]:
  """Its corners."""
  low, high = stage - _HEIGHT / 2, stage + _HEIGHT / 2
  return [(x, low), (x + width, low), (x + width, high), (x, high)]


def _add(
  axes: Axes,
  name: str,
  boxes: Sequence[Sequence[Point]],
  color: str,
  opacity: float,
  repeat: int = 0,
) -> None:
  # Only who draws pays for matplotlib.
  from matplotlib.collections import PolyCollection

  axes.add_collection(
    PolyCollection(
      boxes,
      facecolor=color,
      edgecolor="white",
      alpha=opacity,
      label="" if repeat else name,
      gid=f"{name}-{repeat}",
    )
  )


def timetable_chart(table: Timetable, title: str) -> Chart:
  """The same for a page."""
  clock, names = tick_times(table, _COSTS), [f"stage {n}" for n in range(table.shape.stages)]
  repeats = table.shape.repeats
  passes = {
    "forward": [(clock[tick].forward_start, place, one) for tick, place, one in table.forwards()],
    "backward": [
      (clock[tick].backward_start, place, one) for tick, place, one in table.backwards()
    ],
  }
  widths = {"forward": _COSTS.forward, "backward": _COSTS.backward}
  bars = [
    Bars(
      name,
      [names[place.stage] for _, place, _ in entries],
      [widths[name]] * len(entries),
      [begin for begin, _, _ in entries],
      color=_PAGE_COLORS[name],
      words=[
        f"{place.repeat}.{one.microbatch}" if repeats > 1 else str(one.microbatch)
        for _, place, one in entries
      ],
    )
    for name, entries in passes.items()
  ]
  axis = "time (a forward of one microbatch on one stage takes 1)"
  return Chart(f"timetable of {title}", [axis], [Panel("", bars)], row_names=names)
