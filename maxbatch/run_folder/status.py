"""How a run is doing, from what it has written: no lock is touched, and no process disturbed."""

import dataclasses
import os
import shlex
import socket
import time
from typing import Literal

from maxbatch.run_folder.events import END, START, Event
from maxbatch.run_folder.history import RunHistory
from maxbatch.run_folder.paths import RunFolder

State = Literal[
  "running", "finished", "stopped", "diverged", "failed", "killed", "silent", "unknown"
]

_SILENT_SECONDS = 1800.0
"""After so long without a sign of life a run on another host counts as silent: hang_timeout_seconds."""


@dataclasses.dataclass(frozen=True)
class Status:
  """One word, and what it means here."""

  state: State
  sentence: str
  go_on: str
  """A command; empty where there is nothing to do, or none is known."""


def status_of(run: RunHistory, now: float | None = None) -> Status:
  """The state of a run.

  Args:
    run: what its files say.
    now: seconds since 1970; None: the clock's.
  """
  starts = run.of_kind(START)
  if not starts:
    return Status("unknown", "it left no word of how it was started", "")
  start, end = starts[-1], _end_after(run, starts[-1])
  command = _command(start)
  if end is None:
    return _without_end(run, start, command, time.time() if now is None else now)
  how, text = str(end.get("how", "stopped")), str(end.get("text", ""))
  if how == "finished":
    return Status("finished", "all of its budget is trained", "")
  if how == "stopped":
    return Status("stopped", f"after step {end.get('step', '?')}, and saved", command)
  word: State = "diverged" if how == "diverged" else "failed"
  return Status(word, text, command)


def _end_after(run: RunHistory, start: Event) -> Event | None:
  place = max(n for n, event in enumerate(run.events) if event is start)
  ends = [event for event in run.events[place:] if event["event"] == END]
  return ends[-1] if ends else None


def _without_end(run: RunHistory, start: Event, command: str, now: float) -> Status:
  host, process = start.get("host"), start.get("process")
  if host == socket.gethostname() and isinstance(process, int):
    if _is_alive(process):
      return Status("running", f"process {process} on this host", "")
    return Status("killed", f"process {process} is gone and left no last word", command)
  paths = RunFolder(run.folder)
  seen = [path.stat().st_mtime for path in (paths.metrics, paths.events) if path.is_file()]
  ago = max(0.0, now - max(seen, default=0.0))
  where = f"process {process} on {host}, last sign of life {span(ago)} ago"
  if ago < _SILENT_SECONDS:
    return Status("running", where, "")
  return Status("silent", where, command)


def _is_alive(process: int) -> bool:
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  except (OSError, OverflowError):
    return True
  return True


def _command(start: Event) -> str:
  words = start.get("command")
  return shlex.join(map(str, words)) if isinstance(words, list) else ""


def span(seconds: float) -> str:
  """A time, as 12 s, 3 min 20 s, 5 h 2 min or 3 d 4 h."""
  whole = round(seconds)
  for large, small, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
    if whole >= size:
      rest = whole % size // (size // (24 if large == "d" else 60))
      return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
  return f"{seconds:.3g} s" if seconds < 10 else f"{whole} s"
