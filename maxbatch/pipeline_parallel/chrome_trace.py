"""A timetable in the trace-event format that chrome://tracing and ui.perfetto.dev open.

The format is Google's "Trace Event Format": complete events (ph X) with times in microseconds.
Nothing is measured: a forward is drawn with 1000 microseconds and a backward with 2000.
"""

import json
from typing import Any

from maxbatch.pipeline_parallel.cost import PassCosts, tick_times
from maxbatch.pipeline_parallel.timetable import Backward, Forward, ModelChunk, Timetable

_COSTS = PassCosts(1000, 2000)


def chrome_trace(table: Timetable, title: str) -> str:
  """The trace as JSON, with one process and a thread per stage."""
  times = tick_times(table, _COSTS)
  events: list[dict[str, Any]] = [_metadata("process_name", 0, title)]
  events += [
    _metadata("thread_name", stage, f"stage {stage}") for stage in range(table.shape.stages)
  ]
  for tick, chunk, forward in table.forwards():
    events.append(_event("F", tick, chunk, forward, times[tick].forward_start, _COSTS.forward))
  for tick, chunk, backward in table.backwards():
    events.append(_event("B", tick, chunk, backward, times[tick].backward_start, _COSTS.backward))
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
