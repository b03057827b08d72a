"""A timetable in the trace-event format that chrome://tracing and ui.perfetto.dev open.

The format: "Trace Event Format", complete events (ph X) with times in microseconds. A forward of a
timetable takes 1000 of them and a backward 2000, since nothing is measured.
"""

import json
from typing import Any

from maxbatch.pipeline_parallel.cost import PassCosts, spans
from maxbatch.pipeline_parallel.timetable import Backward, Forward, ModelChunk, Timetable

_COSTS = PassCosts(1000, 2000)


def chrome_trace(table: Timetable, title: str) -> str:
  """The trace as JSON: one process, a thread per stage."""
  clock = spans(table, _COSTS)
  events: list[dict[str, Any]] = [_named("process_name", 0, title)]
  events += [_named("thread_name", stage, f"stage {stage}") for stage in range(table.shape.stages)]
  for tick, place, forward in table.forwards():
    events.append(_event("F", tick, place, forward, clock[tick].forward, _COSTS.forward))
  for tick, place, backward in table.backwards():
    events.append(_event("B", tick, place, backward, clock[tick].backward, _COSTS.backward))
  return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
  return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}


def _event(
  letter: str, tick: int, place: ModelChunk, entry: Forward | Backward, start: int, length: int
) -> dict[str, Any]:
  return {
    "name": f"{letter} {entry.microbatch}",
    "cat": "forward" if letter == "F" else "backward",
    "ph": "X",
    "pid": 0,
    "tid": place.stage,
    "ts": start,
    "dur": length,
    "args": {"tick": tick, "repeat": place.repeat, "microbatch": entry.microbatch},
  }
