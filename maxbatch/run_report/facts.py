"""What a page says of a run in words and tables, from what its files say."""

import datetime
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxbatch.command_line.screen import Table, file_size, in_unit
from maxbatch.run_folder.events import (
  END,
  EVALUATED,
  NOTICE,
  SAVED,
  START,
  TEXT,
  VERIFIED,
  Event,
)
from maxbatch.run_folder.history import RunHistory, span
from maxbatch.run_folder.paths import RunFolder

_RECENT = 20
_CAUSES = {
  "start": "starting",
  "compile": "compiling",
  "data_wait": "waiting for data",
  "save": "saving",
  "copy": "copying to memory",
  "evaluation": "evaluation and texts",
  "repeated": "steps that were trained again",
  "restart": "between starts",
  "other": "other",
}
Row = tuple[str, ...]


def glance(run: RunHistory) -> list[tuple[str, str]]:
  """Returns the few figures that say how it goes, each with its name."""
  last, first, derived = run.metrics.last, run.metrics.first, run.derived
  results: list[tuple[str, str]] = []
  if "step" in last:
    steps = derived.get("steps")
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    results.append(("step", f"{last['step']:,}{of}"))
  results += [(name, f"{last[name]:,}") for name in ("samples", "tokens") if name in last]
  if "loss" in last:
    results.append(("training loss", f"{last['loss']:.4g}"))
  for key, name in (
    ("eval/loss", "validation loss"),
    ("eval/pass_at_1", "pass@1"),
    ("eval/greedy_pass_at_1", "greedy pass@1"),
    ("rl/reward", "reward"),
  ):
    if key in last:
      results.append((name, f"{first[key]:.4g} → {last[key]:.4g}"))
  if "global_batch_to_train" in last:
    results.append(("batch", f"{last['global_batch_to_train']:,} samples"))
  if "learning_rate" in last:
    results.append(("learning rate", f"{last['learning_rate']:.3g}"))
  if speed := recent(run, "tokens_per_second"):
    results.append(("tokens per second", f"{speed:,.0f}"))
  return results


def recent(run: RunHistory, key: str) -> float | None:
  """Returns the median of the latest steps."""
  curve = run.metrics.curves.get(key)
  return statistics.median(curve.values[-_RECENT:].tolist()) if curve is not None else None


def seconds_by_cause(run: RunHistory) -> dict[str, float]:
  """Returns where the time of all starts went: the steps that count, then what was lost by cause."""
  account = run.time_account()
  lost = {_CAUSES[cause]: seconds for cause, seconds in account.lost.items()}
  result = {"steps that count": account.step_seconds} | lost
  return {name: seconds for name, seconds in result.items() if seconds > 0}


def starts(run: RunHistory) -> Table:
  """Returns every start: when and where it began, what changed, and how it ended."""
  events, rows = run.of_kind(START), list[Row]()
  for number in range(max(len(events), len(run.starts))):
    event: Event = events[number] if number < len(events) else {}
    before = run.starts[number - 1] if 0 < number <= len(run.starts) else None
    now = run.starts[number] if number < len(run.starts) else None
    end = _end(run, event) if event else {}
    rows.append(
      (
        str(number + 1),
        moment(event.get("time")),
        _at(event),
        f"{event.get('devices', '?')} on {event.get('host', '?')}",
        "\n".join(changes(before, now)) if before and now else "",
        _ending(end),
      )
    )
  return Table(("start", "when", "from step", "where", "changed keys", "end"), rows)


def _at(event: Event) -> str:
  step = event.get("step")
  return f"{step:,}" if isinstance(step, int) else "?"


def _end(run: RunHistory, start: Event) -> Event:
  """Returns the end of that start; empty if there is none before the next one."""
  place = next(n for n, event in enumerate(run.events) if event is start)
  for event in run.events[place + 1 :]:
    if event["event"] == START:
      break
    if event["event"] == END:
      return event
  return {}


def _ending(end: Event) -> str:
  if not end:
    return "none: under way, or killed"
  text = f": {end['text']}" if end.get("text") else ""
  return f"{end.get('how', '?')} after step {_at(end)}{text}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Lists keys with other values, a line each."""
  keys = [key for key in now if key in before and before[key] != now[key]]
  return [f"{key}: {shown(before[key])} → {shown(now[key])}" for key in keys]


def shown(value: object) -> str:
  """Returns a key's value as one writes it."""
  if isinstance(value, bool):
    return str(value).lower()
  return '""' if value == "" else str(value)


def checkpoints(run: RunHistory) -> Table:
  """Returns what lies in the folder, and what is known of it."""
  folder = RunFolder(run.folder).checkpoints
  verified = {event.get("step") for event in run.of_kind(VERIFIED)}
  saved = {event.get("step"): event for event in run.of_kind(SAVED)}
  rows: list[Row] = []
  try:
    there = sorted(
      folder.iterdir(), key=lambda path: (path.name.isdecimal(), path.name.rjust(20, "0"))
    )
  except OSError:
    there = []
  for path in there:
    if not path.is_dir():
      continue
    step = int(path.name) if path.name.isdecimal() else None
    if step is None:
      damaged = path.name.startswith("damaged-")
      state = "damaged, kept to be looked at" if damaged else "the save was interrupted"
    else:
      state = "read back and verified" if step in verified else "complete"
    rows.append((path.name, moment(saved.get(step, {}).get("time")), _size(path), state))
  return Table(("step", "when", "size", "state"), rows)


def _size(folder: Path) -> str:
  try:
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
  except OSError:
    return "?"
  return file_size(total)


def notices(run: RunHistory) -> Table:
  """Returns what went wrong or deserved attention, and what was done about it."""
  rows = [(moment(one["time"]), str(one.get("text", ""))) for one in run.of_kind(NOTICE)]
  return Table(("when", "what"), rows)


def texts(run: RunHistory) -> Iterator[tuple[str, str]]:
  """Yields what the model wrote, with when: titles and texts."""
  paths, events = RunFolder(run.folder), run.of_kind(TEXT)
  if events:
    yield from ((f"after step {_at(one)}", str(one.get("text", ""))) for one in events)
  elif paths.text_before_training.is_file():
    yield "before training", _read(paths.text_before_training)
  for title, path in (
    ("completions before training", paths.examples_before),
    ("completions at the latest evaluation", paths.examples_after),
  ):
    if path.is_file():
      yield title, _read(path)


def _read(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8", errors="replace")
  except OSError as error:
    return f"({path.name} cannot be read: {error.strerror})"


def memory(run: RunHistory) -> Table:
  """Returns the highest memory that was seen at evaluations."""
  rows: list[Row] = []
  for key, name in (
    ("device_peak_bytes", "a device"),
    ("host_peak_bytes", "this process, on its host"),
  ):
    results = [_number(one.get(key)) for one in run.of_kind(EVALUATED) if one.get(key)]
    if results:
      rows.append((name, " ".join(in_unit(max(results), max(results)))))
  return Table(("memory of", "highest"), rows)


def best_of(runs: Sequence[RunHistory]) -> int:
  """Returns the run with the lowest latest validation loss, or else training loss; -1: none."""
  for key in ("eval/loss", "loss"):
    losses = [run.metrics.last.get(key, math.inf) for run in runs]
    if min(losses) < math.inf:
      return losses.index(min(losses))
  return -1


def differing(runs: Sequence[RunHistory]) -> Table:
  """Returns the keys that differ between the runs."""
  every = dict.fromkeys(key for run in runs for key in run.config)
  keys = [key for key in every if key != "run_name"]
  rows = [
    (key, *(shown(run.config[key]) if key in run.config else "–" for run in runs))
    for key in keys
    if any(run.config.get(key) != runs[0].config.get(key) for run in runs)
  ]
  return Table(("key", *(run.name for run in runs)), rows)


def sweep(runs: Sequence[RunHistory], states: Sequence[str]) -> Table:
  """Returns a row for each run, with the keys that differ and how it went."""
  keys = [row[0] for row in differing(runs).rows if row[0] != "base_output_directory"]
  losses = ("training loss", "validation loss")
  head = ("run", *keys, "state", "step", "tokens", *losses, "time", "tokens/s")
  rows: list[Row] = []
  for run, state in zip(runs, states, strict=True):
    last, speed = run.metrics.last, recent(run, "tokens_per_second")
    seconds = run.metrics.positions["step_seconds"]
    rows.append(
      (
        run.name,
        *(shown(run.config[key]) if key in run.config else "–" for key in keys),
        state,
        *(f"{last[name]:,}" if name in last else "–" for name in ("step", "tokens")),
        *(f"{last[name]:.4g}" if name in last else "–" for name in ("loss", "eval/loss")),
        span(float(seconds[-1])) if len(seconds) else "–",
        f"{speed:,.0f}" if speed else "–",
      )
    )
  best = best_of(runs)
  if best >= 0:
    rows[best] = (f"★ {rows[best][0]}", *rows[best][1:])
  return Table(head, rows, best=best)


def moment(seconds: object) -> str:
  """Returns a time of day, in the zone of who reads it."""
  if not isinstance(seconds, int | float):
    return "?"
  try:
    then = datetime.datetime.fromtimestamp(seconds).astimezone()
  except (OverflowError, OSError, ValueError):
    return "?"
  return then.isoformat(sep=" ", timespec="seconds")


def _number(value: object) -> float:
  return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def command(words: object) -> str:
  """Returns a command line as one types it; empty where none is known."""
  return shlex.join(map(str, words)) if isinstance(words, list) else ""
