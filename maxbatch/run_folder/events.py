"""What happened to a run, one JSON object per line, through all of its starts: events.jsonl.

Metrics are of steps, and a resume drops what came after its checkpoint. Events are of the run: when
it was started, with which command and versions, what it compiled, evaluated and saved and how long
that took, what it wrote, what went wrong, and how it ended. A start without an end was killed, or is
under way.

Together with the times of the steps they say where the time went: goodput is the share of steps whose
updates the run still has, and each of the other seconds has a cause.
"""

import bisect
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from maxbatch.run_folder.atomic import AppendedFile
from maxbatch.run_folder.paths import RunFolder

Record = dict[str, int | float]
"""What metrics.jsonl has of one step."""
Event = Mapping[str, Any]

START, COMPILED, EVALUATED, SAVED, VERIFIED = "start", "compiled", "evaluated", "saved", "verified"
DROPPED, COPIED, TEXT, NOTICE, END = "dropped", "copied", "text", "notice", "end"
FAULT, RESTART, JOINED = "fault", "restart", "joined"
"""Kinds of events: DROPPED are steps that are trained again, COPIED a copy of the state in memory, TEXT
is what the model wrote, NOTICE what deserves a person's attention. FAULT, RESTART and JOINED are what
supervisors decide (hardware/leader.py)."""

CAUSES: Sequence[str] = (
  "start",
  "compile",
  "data_wait",
  "save",
  "copy",
  "evaluation",
  "repeated",
  "restart",
  "other",
)
"""Why time passes without a step that counts; restart is from the last sign of a start to the next."""
_CAUSE_OF = {
  COMPILED: "compile",
  EVALUATED: "evaluation",
  TEXT: "evaluation",
  SAVED: "save",
  COPIED: "copy",
  DROPPED: "repeated",
}
_SIGNS_OF_LIFE = {START, VERIFIED, END, *_CAUSE_OF}
"""Not notices: a start writes some of what it finds before it takes note of itself."""
_LATEST = 1e11
"""Seconds since 1970 after which a time is none: the year 5138."""


class StepTimes(NamedTuple):
  """Sums over steps."""

  num_steps: int = 0
  seconds: float = 0.0
  data_wait_seconds: float = 0.0
  """The part of `seconds` in which the loop waited for rows."""

  def plus(self, record: Record) -> "StepTimes":
    """Returns the sums with one more step; that of step 0 has no time."""
    if "step_seconds" not in record:
      return self
    seconds, waited = record["step_seconds"], record.get("data_wait_seconds", 0.0)
    return StepTimes(self.num_steps + 1, self.seconds + seconds, self.data_wait_seconds + waited)


@dataclasses.dataclass(frozen=True)
class TimeAccount:
  """Where the time of a run went, over all its starts."""

  wall_seconds: float
  """From its beginning; without the time after it had trained its whole budget."""
  step_seconds: float
  """Of the steps that count, without waiting for rows."""
  lost: Mapping[str, float]
  """Seconds by CAUSES; with `step_seconds` they add up to `wall_seconds`."""

  @property
  def goodput(self) -> float:
    """The share of steps that count; 0 where no time has passed."""
    return self.step_seconds / self.wall_seconds if self.wall_seconds else 0.0

  def record(self) -> Record:
    """Returns what metrics.jsonl has of it."""
    seconds = {f"goodput/{cause}_seconds": value for cause, value in self.lost.items()}
    return {"goodput/share": self.goodput, "goodput/wall_seconds": self.wall_seconds} | seconds

  def __str__(self) -> str:
    causes = [(seconds, cause.replace("_", " ")) for cause, seconds in self.lost.items() if seconds]
    lost = ", ".join(f"{cause} {seconds:,.3g}" for seconds, cause in sorted(causes, reverse=True))
    return (
      f"Goodput: {self.goodput:.1%} of {self.wall_seconds:,.4g} s; lost (s): {lost or 'nothing'}"
    )


class Sessions:
  """Divides the time between events among causes, start after start."""

  def __init__(self) -> None:
    self._lost = dict.fromkeys(CAUSES, 0.0)
    self._first: float | None = None
    self._began = self._last = self._not_counted = 0.0
    self._is_starting, self._how = False, ""
    self._last_step = 0

  def add(self, event: Event) -> None:
    """Adds the next event; one whose time cannot be is left out."""
    kind, moment, seconds = event["event"], _seconds(event["time"]), _seconds(event.get("seconds"))
    if not moment:
      return
    if kind == START:
      self._begin(event, moment)
    if kind in _CAUSE_OF:
      self._lost[_CAUSE_OF[kind]] += seconds
    if kind == COMPILED and self._is_starting:
      self._lost["start"] += max(moment - self._began - seconds, 0.0)
      self._is_starting = False
    if kind == END:
      self._how = str(event.get("how"))
    if type(step := event.get("step")) is int:
      self._last_step = step
    if kind in _SIGNS_OF_LIFE:
      self._last = max(self._last, moment)

  def _begin(self, event: Event, moment: float) -> None:
    """Ends the start before with its last sign of life, and begins another one."""
    began = min(_seconds(event.get("began")) or moment, moment)
    if self._first is None:
      self._first = self._last = began
    end = max(self._last, min(_seconds(event.get("last_seen")), began))
    began = max(began, end)
    if self._is_starting:
      self._lost["start"] += end - self._began
    if self._how == "finished":
      self._not_counted += began - end
    else:
      self._lost["restart"] += began - end
    self._began, self._is_starting, self._how = began, True, ""

  def last_seen(self, steps: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns when a run was last seen that wrote no end: of its steps the records alone tell.

    Args:
      steps: of the records, ascending.
      seconds: since the first record, at the end of each of these steps.
    """
    place = bisect.bisect_right(steps, self._last_step)
    if self._how or place == len(steps):
      return self._last
    return self._last + seconds[-1] - (seconds[place - 1] if place else 0.0)

  def account(self, steps: StepTimes, end: float | None = None) -> TimeAccount:
    """Returns where the time went.

    Args:
      steps: sums over the steps that count.
      end: seconds since 1970; None, or before the last event: that event's time.
    """
    end = max(end or 0.0, self._last)
    lost = dict(self._lost)
    if self._is_starting:
      lost["start"] += max(end - self._began, 0.0)
    lost["data_wait"] = min(steps.data_wait_seconds, steps.seconds)
    useful = steps.seconds - lost["data_wait"]
    begun = end if self._first is None else self._first
    known = useful + math.fsum(lost.values())
    wall = max(end - begun - self._not_counted, known)
    lost["other"] = wall - known
    return TimeAccount(wall, useful, lost)


def _seconds(value: object) -> float:
  """Returns a time that can be one; else 0."""
  return float(value) if type(value) in (int, float) and 0 < value < _LATEST else 0.0  # pyright: ignore


class EventLog:
  """Appends events to a run's file; a context manager."""

  def __init__(self, folder: Path, report: Callable[[str], None] = print):
    """Takes as `report` what receives a line when events cannot be written. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    self._sessions = Sessions()
    for event in filter(None, readable_events(folder)):
      self._sessions.add(event)
    self._file = AppendedFile(RunFolder(folder).events, report)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._file.close()

  def note(self, kind: str, **facts: Any) -> None:
    """Appends an event of this kind, with when it was, in seconds since 1970."""
    event = {"event": kind, "time": round(time.time(), 3), **facts}
    self._sessions.add(event)
    self._file.write(json.dumps(event).encode() + b"\n")
    self._file.flush()

  def account(self, steps: StepTimes) -> TimeAccount | None:
    """Returns where the time went until now; `steps` are sums over those that count."""
    return self._sessions.account(steps, time.time())


class NoEventLog(EventLog):
  """That of a process which leaves the files to another one, or cannot write them."""

  def __init__(self) -> None: ...

  def __exit__(self, *_: object) -> None: ...

  def note(self, kind: str, **facts: Any) -> None:
    """Does nothing."""

  def account(self, steps: StepTimes) -> TimeAccount | None:
    """Knows nothing."""
    del steps


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
