"""What happened to a run, one JSON object per line, through all of its starts: events.jsonl.

Metrics are of steps, and a resume drops what came after its checkpoint. Events are of the run: when
it was started, with which command and versions, what it compiled, evaluated and saved and how long
that took, what it wrote, what went wrong, and how it ended. A start without an end was killed, or is
under way.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from maxbatch.run_folder.atomic import AppendedFile
from maxbatch.run_folder.paths import RunFolder

Record = dict[str, int | float]
"""What metrics.jsonl has of one step."""
Event = Mapping[str, Any]

START, COMPILED, EVALUATED, SAVED, VERIFIED = "start", "compiled", "evaluated", "saved", "verified"
TEXT, NOTICE, END = "text", "notice", "end"
"""Kinds of events: TEXT is what the model wrote, NOTICE what deserves a person's attention."""


class EventLog:
  """Appends events to a run's file; a context manager."""

  def __init__(self, folder: Path, report: Callable[[str], None] = print):
    """Takes as `report` what receives a line when events cannot be written. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    self._file = AppendedFile(RunFolder(folder).events, report)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._file.close()

  def note(self, kind: str, **facts: Any) -> None:
    """Appends an event of this kind, with when it was, in seconds since 1970."""
    event = {"event": kind, "time": round(time.time(), 3), **facts}
    self._file.write(json.dumps(event).encode() + b"\n")
    self._file.flush()


class NoEventLog(EventLog):
  """That of a process which leaves the files to another one, or cannot write them."""

  def __init__(self) -> None: ...

  def __exit__(self, *_: object) -> None: ...

  def note(self, kind: str, **facts: Any) -> None:
    """Does nothing."""


def readable_events(folder: Path) -> Iterator[Event | None]:
  """Yields a run's events in order; None for a line that is none. Raises OSError if it cannot."""
  path = RunFolder(folder).events
  if not path.is_file():
    return
  with path.open("rb") as file:
    for line in file:
      try:
        event = json.loads(line)
      except (ValueError, RecursionError):
        event = None
      kinds = (type(event.get(key)) for key in ("event", "time")) if isinstance(event, dict) else ()
      yield event if tuple(kinds) in ((str, int), (str, float)) else None
