"""A timetable as SVG: a row per stage, time to the right, a backward twice as wide as a forward."""

import html
from collections.abc import Iterator

from maxbatch.pipeline_parallel.cost import PassCosts, tick_times
from maxbatch.pipeline_parallel.timetable import Timetable

_UNIT, _ROW, _LEFT, _TOP = 22, 26, 70, 34
_FORWARD, _BACKWARD = "#1f5fa8", "#b3401f"
_COSTS = PassCosts()


def svg(table: Timetable, title: str) -> str:
  """The drawing. A slot is labelled with its microbatch; later repeats are paler."""
  times = tick_times(table, _COSTS)
  width = _LEFT + (times[-1].end if times else 0) * _UNIT + 20
  bottom = _TOP + table.shape.stages * _ROW
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 40}" '
    f'width="{width}" height="{bottom + 40}" font-family="sans-serif" font-size="11">',
    '<rect width="100%" height="100%" fill="white"/>',
    _text(_LEFT, 20, title, "start", "#000"),
    *(
      _text(_LEFT - 8, _TOP + stage * _ROW + 17, f"stage {stage}", "end", "#000")
      for stage in range(table.shape.stages)
    ),
    *(
      _box(
        _LEFT + span.forward_start * _UNIT,
        _TOP + stage * _ROW,
        span.end - span.forward_start,
        "#eee",
      )
      for span in times
      for stage in range(table.shape.stages)
      if span.end > span.forward_start
    ),
    *_entries(table),
    _text(_LEFT, bottom + 22, "forward", "start", _FORWARD),
    _text(_LEFT + 60, bottom + 22, "backward", "start", _BACKWARD),
    _text(_LEFT + 130, bottom + 22, "idle: grey", "start", "#777"),
    "</svg>",
  ]
  return "\n".join(parts) + "\n"


def _entries(table: Timetable) -> Iterator[str]:
  times = tick_times(table, _COSTS)
  for tick, place, forward in table.forwards():
    x, y = _LEFT + times[tick].forward_start * _UNIT, _TOP + place.stage * _ROW
    opacity = _opacity(place.repeat, table.shape.repeats)
    yield _slot(x, y, _COSTS.forward, _FORWARD, opacity, str(forward.microbatch))
  for tick, place, backward in table.backwards():
    x, y = _LEFT + times[tick].backward_start * _UNIT, _TOP + place.stage * _ROW
    opacity = _opacity(place.repeat, table.shape.repeats)
    yield _slot(x, y, _COSTS.backward, _BACKWARD, opacity, str(backward.microbatch))


def _opacity(repeat: int, repeats: int) -> float:
  return 1 - 0.6 * repeat / repeats


def _slot(x: int, y: int, units: int, color: str, opacity: float, label: str) -> str:
  box = _box(x, y, units, color, f' fill-opacity="{opacity:.2f}"')
  return box + _text(x + units * _UNIT / 2, y + 17, label, "middle", "#fff")


def _box(x: int, y: int, units: int, color: str, more: str = "") -> str:
  return (
    f'<rect x="{x + 1}" y="{y + 1}" width="{units * _UNIT - 2}" height="{_ROW - 2}" '
    f'fill="{color}"{more}/>'
  )


def _text(x: float, y: float, text: str, anchor: str, color: str) -> str:
  return (
    f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{html.escape(text)}</text>'
  )
