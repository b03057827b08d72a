"""All that a run's folder says, and how the run is doing: what is missing is said, and nothing raised.

No lock is touched, and no process disturbed.
"""

import array
import collections
import dataclasses
import json
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from maxbatch.config.load import DERIVED
from maxbatch.run_folder.events import (
  END,
  START,
  Event,
  Record,
  Sessions,
  StepTimes,
  TimeAccount,
  readable_events,
)
from maxbatch.run_folder.paths import RunFolder

POSITIONS = ("step", "samples", "tokens")
SECONDS = "step_seconds"
_GLANCE_BYTES = 2**17
_DEEPEST, _MOST_ALIASES = 50, 20
_DEPTHS = ("*", "*/*", "*/*/*")


@dataclasses.dataclass(frozen=True)
class Curve:
  """One key of metrics.jsonl through a run."""

  rows: np.ndarray
  """(n,) which of the records have it."""
  values: np.ndarray
  """(n,) float64, finite."""


@dataclasses.dataclass(frozen=True)
class Metrics:
  """metrics.jsonl, by key."""

  positions: Mapping[str, np.ndarray]
  """(records,) float64 each: POSITIONS, and SECONDS since the first record."""
  curves: Mapping[str, Curve]
  first: Record
  last: Record
  """The latest value of every key."""

  @property
  def num_records(self) -> int:
    """Number of steps recorded, with step 0."""
    return len(self.positions["step"])


@dataclasses.dataclass(frozen=True)
class RunHistory:
  """A run as its files tell it."""

  folder: Path
  metrics: Metrics
  events: Sequence[Event]
  starts: Sequence[Mapping[str, Any]]
  """Every key of each start, oldest first."""
  config: Mapping[str, Any]
  """Every key of the latest start; empty: unknown."""
  derived: Mapping[str, Any]
  compile_reports: Sequence[Mapping[str, Any]]
  profile: Mapping[str, Any]
  """What a trace of some steps says; empty: there is none."""
  missing: Sequence[str]
  """What should be there and is not, or cannot be read, a sentence each."""

  @property
  def name(self) -> str:
    return self.folder.name

  def of_kind(self, kind: str) -> list[Event]:
    return [event for event in self.events if event["event"] == kind]

  def time_account(self) -> TimeAccount:
    """Returns where the time of all starts went, as far as the files tell."""
    curves, sessions = self.metrics.curves, Sessions()
    for event in self.events:
      sessions.add(event)
    sums = (
      max(float(curves[key].values.sum()), 0.0) if key in curves else 0.0
      for key in (SECONDS, "data_wait_seconds")
    )
    step, seconds = (self.metrics.positions[key].tolist() for key in ("step", SECONDS))
    times = StepTimes(self.metrics.num_records, *sums)
    return sessions.account(times, sessions.last_seen(step, seconds))


def read_history(folder: Path) -> RunHistory:
  """Reads all that is there. Raises nothing for what the files hold."""
  return _read(folder)


def _read(folder: Path, most_bytes: int | None = None) -> RunHistory:
  missing: list[str] = []
  paths = RunFolder(folder.absolute())
  metrics = _metrics(paths.metrics, missing, most_bytes)
  events = _events(paths, missing)
  numbered = [path for path in paths.starts.glob("*.yml") if path.stem.isdecimal()]
  starts = [_yaml(path, missing) for path in sorted(numbered, key=lambda path: int(path.stem))]
  config = _yaml(paths.config, missing)
  derived = config.pop(DERIVED, None)
  reports = _json(paths.compile_report_json, missing)
  profiles = [each for each in _json(paths.profile_json, missing) if isinstance(each, dict)]
  return RunHistory(
    folder=paths.path,
    metrics=metrics,
    events=events,
    starts=[{key: each[key] for key in each if key != DERIVED} for each in starts],
    config=config,
    derived=derived if isinstance(derived, dict) else {},
    compile_reports=[each for each in reports if isinstance(each, dict)],
    profile=profiles[0] if profiles else {},
    missing=missing,
  )


def is_run(folder: Path) -> bool:
  """Returns whether a run, or a compilation, has left something there."""
  paths = RunFolder(folder)
  return any(p.is_file() for p in (paths.metrics, paths.config, paths.compile_report_json))


def glance_at(folder: Path) -> RunHistory:
  """Reads a run as `read_history`, of metrics.jsonl only the end: quick, and enough for a line."""
  return _read(folder, most_bytes=_GLANCE_BYTES)


def runs_below(folder: Path) -> list[Path]:
  """Returns the folders of runs in a folder, with itself and branches, by their names."""
  if not os.path.isdir(folder):  # Not Path.is_dir, to which a name that is too long is an error.
    return []
  results = [folder, *(path for depth in _DEPTHS for path in folder.glob(depth))]
  return sorted(path for path in results if path.is_dir() and is_run(path))


class _Columns:
  def __init__(self) -> None:
    self.positions = {name: array.array("d") for name in (*POSITIONS, SECONDS)}
    self.rows = collections.defaultdict[str, array.array](lambda: array.array("q"))
    self.values = collections.defaultdict[str, array.array](lambda: array.array("d"))
    self.first: Record = {}
    self.last: Record = {}

  def add(self, record: Mapping[str, Any]) -> None:
    numbers = {key: value for key, value in record.items() if _is_finite(value)}
    row = len(self.positions["step"])
    for name in POSITIONS:
      self.positions[name].append(numbers.pop(name, 0))
    self.positions[SECONDS].append(numbers.get(SECONDS, 0.0))
    for key, value in numbers.items():
      self.rows[key].append(row)
      self.values[key].append(value)
      self.first.setdefault(key, value)
    self.last |= {key: value for key, value in record.items() if _is_finite(value)}

  def metrics(self) -> Metrics:
    positions = {name: np.frombuffer(each) for name, each in self.positions.items() if len(each)}
    positions = positions or {name: np.zeros(0) for name in self.positions}
    positions[SECONDS] = np.cumsum(positions[SECONDS])
    curves = {
      key: Curve(np.frombuffer(rows, np.int64), np.frombuffer(self.values[key]))
      for key, rows in self.rows.items()
    }
    return Metrics(positions, curves, self.first, self.last)


def _is_finite(value: object) -> bool:
  # Not isinstance: for it, true is a number too.
  return type(value) in (int, float) and abs(value) < float("inf")  # pyright: ignore


def _metrics(path: Path, missing: list[str], most_bytes: int | None) -> Metrics:
  columns, wrong = _Columns(), list[int]()
  try:
    for number, record in _records(path, most_bytes):
      if record is None:
        wrong.append(number)
      else:
        columns.add(record)
  except OSError as error:
    missing.append(f"{path.name} cannot be read: {error.strerror}")
  if wrong:
    lines = (
      f"line {wrong[0]:,}" if len(wrong) == 1 else f"{len(wrong):,} lines, from {wrong[0]:,} on,"
    )
    missing.append(f"{path.name}: {lines} cannot be read, and is left out here")
  if not columns.positions["step"]:
    missing.append(f"{path.name} has no step: nothing was trained yet")
  return columns.metrics()


def _records(path: Path, most_bytes: int | None) -> Iterator[tuple[int, Record | None]]:
  """Yields every line with its number, or those that begin in the last bytes; None where it is no
  record of a step."""
  if not path.is_file():
    return
  with path.open("rb") as file:
    if most_bytes is not None and file.seek(0, os.SEEK_END) > most_bytes:
      file.seek(-most_bytes, os.SEEK_END)
      file.readline()
    else:
      file.seek(0)
    for number, line in enumerate(file, start=1):
      try:
        record = json.loads(line)
      except (ValueError, RecursionError):
        record = None
      good = isinstance(record, dict) and type(record.get("step")) is int
      yield number, record if good else None


def _events(paths: RunFolder, missing: list[str]) -> list[Event]:
  try:
    results = list(readable_events(paths.path))
  except OSError as error:
    missing.append(f"{paths.events.name} cannot be read: {error.strerror}")
    return []
  events = [event for event in results if event is not None]
  if len(events) < len(results):
    missing.append(f"{paths.events.name}: {len(results) - len(events):,} lines cannot be read")
  if not events:
    missing.append(
      f"{paths.events.name} has no event: how the run was started, what took how long, and what went "
      "wrong is not known"
    )
  return events


def _yaml(path: Path, missing: list[str]) -> dict[str, Any]:
  try:
    text = path.read_text(encoding="utf-8")
    _check_shape(text)
    content = yaml.load(text, yaml.CSafeLoader)
  except OSError as error:
    missing.append(f"{path.name} cannot be read: {error.strerror}")
  except (yaml.YAMLError, ValueError, RecursionError):
    missing.append(f"{path.name} is damaged: it is no YAML")
  else:
    if isinstance(content, dict):
      return content
    missing.append(f"{path.name} is damaged: it holds no keys")
  return {}


def _check_shape(text: str) -> None:
  """Raises ValueError for YAML that no run writes: nested so deep that the parser in C would crash,
  or with so many aliases that what they stand for might have no end."""
  depth = num_aliases = 0
  for event in yaml.parse(text, yaml.CSafeLoader):
    depth += isinstance(event, yaml.CollectionStartEvent)
    depth -= isinstance(event, yaml.CollectionEndEvent)
    num_aliases += isinstance(event, yaml.AliasEvent)
    if depth > _DEEPEST or num_aliases > _MOST_ALIASES:
      raise ValueError(text[:20])


def _json(path: Path, missing: list[str]) -> list[Any]:
  if not path.is_file():
    return []
  try:
    content = json.loads(path.read_bytes())
  except OSError as error:
    missing.append(f"{path.name} cannot be read: {error.strerror}")
  except (ValueError, RecursionError):
    missing.append(f"{path.name} is damaged: it is no JSON")
  else:
    return content if isinstance(content, list) else [content]
  return []


State = Literal[
  "running", "finished", "stopped", "diverged", "failed", "killed", "silent", "compiled", "unknown"
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
  """Returns the state of a run.

  Args:
    now: seconds since 1970; None: the clock's.
  """
  starts = run.of_kind(START)
  if not starts and run.compile_reports:
    return Status("compiled", "its steps were compiled, and nothing is trained yet", "")
  if not starts:
    return Status("unknown", "it left no word of how it was started", "")
  start, words = starts[-1], starts[-1].get("command")
  place = max(n for n, event in enumerate(run.events) if event is start)
  end = next((event for event in reversed(run.events[place:]) if event["event"] == END), None)
  command = shlex.join(map(str, words)) if isinstance(words, list) else ""
  if end is None:
    return _without_end(run, start, command, time.time() if now is None else now)
  how, text = str(end.get("how", "stopped")), str(end.get("text", ""))
  if how == "finished":
    return Status("finished", "all of its budget is trained", "")
  if how == "stopped":
    return Status("stopped", f"after step {end.get('step', '?')}, and saved", command)
  word: State = "diverged" if how == "diverged" else "failed"
  return Status(word, text, command)


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


def span(seconds: float) -> str:
  """Formats a time, as 12 s, 3 min 20 s, 5 h 2 min or 3 d 4 h."""
  whole = round(seconds)
  for large, small, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
    if whole >= size:
      rest = whole % size // (size // (24 if large == "d" else 60))
      return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
  return f"{seconds:.3g} s" if seconds < 10 else f"{whole} s"
