"""A timetable drawn: as text, as a picture, and as a trace for chrome://tracing and ui.perfetto.dev."""

import json
from collections.abc import Iterator
from typing import Any

from maxbatch.pipeline_parallel.schedule import Backward, Forward, ModelChunk, Timetable
from maxbatch.pipeline_parallel.sizes import BACKWARD_TWICE_FORWARD, PassCosts, tick_times
from maxbatch.plots.chart import Bars, Chart, Panel

_WIDTH = 100
_BLOCKS = 4
"""The most blocks of ticks that are shown: of more, the first two and the last two."""
_IDLE = "·"

_MICROSECONDS = PassCosts(1000, 2000)
_COLORS = {"forward": 4, "backward": 5}
_PALER = 0.6
"""Later repeats are, by at most so much."""


def text_diagram(table: Timetable) -> str:
  """Returns the diagram, at most 100 columns wide, divided into blocks of consecutive ticks.

  An entry is the number of a microbatch; with several repeats, `repeat.microbatch`.
  """
  with_repeat = table.shape.repeats > 1
  cells = [
    [(_text(cell.forward, with_repeat), _text(cell.backward, with_repeat)) for cell in row]
    for row in table.ticks
  ]
  longest = max((len(text) for row in cells for pair in row for text in pair), default=1)
  width = 1 + max(longest, len(str(len(cells) - 1)))
  label_width = len(f"stage {table.shape.stages - 1}  F")
  per_block = max(1, (_WIDTH - label_width) // width)
  starts = list(range(0, len(cells), per_block))
  shown = starts
  if len(starts) > _BLOCKS:
    shown = starts[: _BLOCKS // 2] + starts[-(_BLOCKS // 2) :]
  parts, expected = [], 0
  for start in shown:
    if start != expected:
      parts.append(f"… ticks {expected} to {start - 1}: --csv, --plot and --trace write them all …")
    parts.append(_block(cells[start : start + per_block], start, label_width, width))
    expected = start + per_block
  return "\n\n".join(parts)


def _block(cells: list[list[tuple[str, str]]], start: int, label_width: int, width: int) -> str:
  """Returns the lines of one block of consecutive ticks."""
  ticks = range(start, start + len(cells))
  lines = ["tick".ljust(label_width) + "".join(str(tick).rjust(width) for tick in ticks)]
  for stage in range(len(cells[0])):
    for line, letter in enumerate("FB"):
      name = f"stage {stage}" if line == 0 else ""
      row = "".join(cell[stage][line].rjust(width) for cell in cells)
      lines.append(f"{name.ljust(label_width - 1)}{letter}{row}")
  return "\n".join(lines)


def _text(entry: Forward | Backward | None, with_repeat: bool) -> str:
  if entry is None:
    return _IDLE
  return f"{entry.repeat}.{entry.microbatch}" if with_repeat else str(entry.microbatch)


def chrome_trace(table: Timetable, title: str) -> str:
  """Returns the trace in Google's "Trace Event Format", as JSON, with a thread per stage."""
  times = tick_times(table, _MICROSECONDS)
  events: list[dict[str, Any]] = [_metadata("process_name", 0, title)]
  stages = range(table.shape.stages)
  events += [_metadata("thread_name", stage, f"stage {stage}") for stage in stages]
  for tick, chunk, forward in table.forwards():
    start = times[tick].forward_start
    events.append(_event("F", tick, chunk, forward, start, _MICROSECONDS.forward))
  for tick, chunk, backward in table.backwards():
    start = times[tick].backward_start
    events.append(_event("B", tick, chunk, backward, start, _MICROSECONDS.backward))
  return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _metadata(what: str, thread: int, name: str) -> dict[str, Any]:
  return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}


def _event(
  letter: str, tick: int, chunk: ModelChunk, entry: Forward | Backward, start: int, length: int
) -> dict[str, Any]:
  return {
    "name": f"{letter} {entry.microbatch}",
    "cat": "forward" if letter == "F" else "backward",
    "ph": "X",
    "pid": 0,
    "tid": chunk.stage,
    "ts": start,
    "dur": length,
    "args": {"tick": tick, "repeat": chunk.repeat, "microbatch": entry.microbatch},
  }


def timetable_chart(table: Timetable, title: str) -> Chart:
  """Draws a row per stage, time to the right, and a bar per forward and backward, labelled with its
  microbatch: repeat.microbatch if the stages compute several repeats."""
  bars = [bar for repeat in range(table.shape.repeats) for bar in _bars(table, repeat)]
  axis = "time (a forward of one microbatch on one stage takes 1)"
  names = [_name(stage) for stage in range(table.shape.stages)]
  return Chart(f"timetable of {title}", [axis], [Panel("", bars)], row_names=names)


def _bars(table: Timetable, repeat: int) -> Iterator[Bars]:
  """Yields the forwards and the backwards of a repeat."""
  clock, repeats = tick_times(table), table.shape.repeats
  passes = {
    "forward": (
      BACKWARD_TWICE_FORWARD.forward,
      [(clock[tick].forward_start, place, one) for tick, place, one in table.forwards()],
    ),
    "backward": (
      BACKWARD_TWICE_FORWARD.backward,
      [(clock[tick].backward_start, place, one) for tick, place, one in table.backwards()],
    ),
  }
  for name, (width, entries) in passes.items():
    own = [entry for entry in entries if entry[1].repeat == repeat]
    yield Bars(
      name if repeats == 1 else f"{name}, repeat {repeat}",
      [_name(place.stage) for _, place, _ in own],
      [width] * len(own),
      [begin for begin, _, _ in own],
      color=_COLORS[name],
      opacity=1 - _PALER * repeat / repeats,
      words=[
        f"{repeat}.{one.microbatch}" if repeats > 1 else f"{one.microbatch}" for *_, one in own
      ],
    )


def _name(stage: int) -> str:
  return f"stage {stage}"
