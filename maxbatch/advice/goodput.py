"""The goodput to expect where hosts fail, and how often to save, from what a run measured or from keys."""

import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxbatch.advice.words import DAY, span, wrapped
from maxbatch.command_line.screen import Table
from maxbatch.config.find import shown, user_path
from maxbatch.errors import UserError
from maxbatch.estimate.failures import Recovery, best_interval, daly, goodput, simulate, young
from maxbatch.run_folder.events import (
  COMPILED,
  COPIED,
  SAVED,
  START,
  Event,
  Sessions,
  StepTimes,
  readable_events,
)
from maxbatch.run_folder.paths import RunFolder

HOSTS = (10, 100, 1_000, 10_000)
_HOUR = 3600.0
_ANSWER = "for example save_seconds=20 restart_seconds=300"


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of what happens around a failure; None: not known."""

  step_seconds: float | None = None
  save_seconds: float | None = None
  restart_seconds: float | None = None
  """From a failure to the first step, without compiling."""
  compile_seconds: float | None = None
  copy_seconds: float | None = None
  copy_restart_seconds: float | None = None
  """Likewise, where the state comes from another host's memory, with compiling."""


def measured(folder: str) -> Times:
  """Returns what a run says of itself: means, but of saves, copies and steps the median, and of
  compilations the last one, which the others had left in the cache.

  Raises:
    UserError: there is no run, or it cannot be read.
  """
  run = RunFolder(user_path(folder))
  if not run.metrics.is_file():
    raise UserError(
      f"from_run={shown(folder)}: there is no run with a metrics.jsonl; for example "
      "from_run=runs/first_run"
    )
  try:
    events = [event for event in readable_events(run.path) if event is not None]
    steps = list(_step_seconds(run))
  except OSError as error:
    raise UserError(f"from_run={shown(folder)} cannot be read: {error.strerror}") from None
  sessions = Sessions()
  for event in events:
    sessions.add(event)
  lost, num_starts = sessions.account(StepTimes()).lost, len(list(_of_kind(events, START)))
  compiled = _seconds(events, COMPILED)
  starting = lost["start"] / num_starts if num_starts else None
  between = lost["restart"] / (num_starts - 1) if num_starts > 1 else 0.0
  return Times(
    step_seconds=_median(steps),
    save_seconds=_median(_seconds(events, SAVED)),
    restart_seconds=None if starting is None else starting + between,
    compile_seconds=compiled[-1] if compiled else None,
    copy_seconds=_median(_seconds(events, COPIED)),
  )


def _step_seconds(run: RunFolder) -> Iterator[float]:
  """Yields the times of its steps. Not by run_folder/history.py: a plan needs no numpy."""
  with run.metrics.open("rb") as file:
    for line in file:
      with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        seconds = record.get("step_seconds") if isinstance(record, dict) else None
        if isinstance(seconds, int | float) and 0 < seconds < math.inf:
          yield float(seconds)


def _of_kind(events: Sequence[Event], kind: str) -> Iterator[Event]:
  return (event for event in events if event["event"] == kind)


def _seconds(events: Sequence[Event], kind: str) -> list[float]:
  values = (event.get("seconds") for event in _of_kind(events, kind))
  return [float(x) for x in values if isinstance(x, int | float) and 0 <= x < math.inf]


def _median(values: Sequence[float]) -> float | None:
  return statistics.median(values) if values else None


def times_of(given: Mapping[str, float], from_run: str) -> Times:
  """Returns what the keys say, and else what the run has measured.

  Args:
    given: by the names of Times; negative: not given.

  Raises:
    UserError: as `measured`, or neither says how long saves and restarts take.
  """
  result = measured(from_run) if from_run else Times()
  result = dataclasses.replace(result, **{key: x for key, x in given.items() if x >= 0})
  if result.save_seconds is None or result.restart_seconds is None:
    missing = "save_seconds" if result.save_seconds is None else "restart_seconds"
    where = f"from_run={shown(from_run)} has not measured it" if from_run else "no run is named"
    raise UserError(
      f"mtbf needs {missing}, and {where}; give it, {_ANSWER}, or from_run=RUN, a run that has saved"
    )
  return result


@dataclasses.dataclass(frozen=True)
class Interval:
  """What is best with so many hosts and one way to recover."""

  num_hosts: int
  mtbf_seconds: float
  """Between failures of any host."""
  best: float
  young: float
  daly: float
  """Seconds of training between two saves, or copies."""
  goodput: float
  simulated: float
  at_period: float | None
  """Goodput with the configured period; None: there is none."""


@dataclasses.dataclass(frozen=True)
class ExpectedGoodput:
  """By numbers of hosts, with checkpoints in storage and with copies in memory."""

  mtbf_hours: float
  times: Times
  storage: Recovery
  memory: Recovery | None
  period_seconds: float | None
  from_storage: Sequence[Interval]
  from_memory: Sequence[Interval]

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values."""
    return dataclasses.asdict(self)

  def lines(self) -> Iterator[str]:
    """Yields what is printed."""
    storage, memory = self.storage, self.memory
    step = self.times.step_seconds
    unit = f"steps of {step:.3g} s" if step else "time"
    yield f"A host fails every {self.mtbf_hours:,g} hours (mtbf), each by itself. Best, by Young and by"
    yield f"Daly: {unit} between two saves, or copies."
    yield from wrapped(
      f"From storage: a save stops training for {storage.save_seconds:.3g} s, and a restart takes "
      f"{storage.restart_seconds:.4g} s, with compiling, on any number of hosts.",
      "",
    )
    yield from self._table(self.from_storage).lines("  ")
    if memory is None:
      yield "From another host's memory: not known without copy_seconds."
      return
    yield from wrapped(
      f"From another host's memory: a copy takes {memory.save_seconds:.3g} s, a restart "
      f"{memory.restart_seconds:.4g} s; from storage, saved at least once a day, only if that host fails "
      "meanwhile too.",
      "",
    )
    yield from self._table(self.from_memory).lines("  ")

  def _table(self, intervals: Sequence[Interval]) -> Table:
    period = [] if intervals[0].at_period is None else ["at period"]
    head = ("hosts", "fail every", "best", "Young", "Daly", "goodput", "simulated", *period)
    rows = [
      (
        f"{one.num_hosts:,}",
        span(one.mtbf_seconds / DAY),
        *map(self._length, (one.best, one.young, one.daly)),
        f"{one.goodput:.2%}",
        f"{one.simulated:.2%}",
        *([] if one.at_period is None else [f"{one.at_period:.2%}"]),
      )
      for one in intervals
    ]
    return Table(head, rows)

  def _length(self, seconds: float) -> str:
    """Formats the time between two saves, in whole steps where a step's time is known."""
    step = self.times.step_seconds
    return f"{max(round(seconds / step), 1):,}" if step else span(seconds / DAY)


def expected(
  mtbf_hours: float, times: Times, period_steps: int | None, hosts: Sequence[int]
) -> ExpectedGoodput:
  """Returns the goodput to expect.

  Args:
    mtbf_hours: of one host.
    period_steps: the configured steps between two checkpoints; None: there are none, or no steps.
    hosts: how many, besides HOSTS.
  """
  save, restart, step = times.save_seconds or 0.0, times.restart_seconds or 0.0, times.step_seconds
  storage = Recovery(save, restart + (times.compile_seconds or 0.0))
  memory = None
  if times.copy_seconds is not None:
    again = times.copy_restart_seconds
    memory = Recovery(times.copy_seconds, storage.restart_seconds if again is None else again)
  period, one_host = (period_steps * step if period_steps and step else None), mtbf_hours * _HOUR
  from_storage, from_memory = list[Interval](), list[Interval]()
  for count in sorted({*HOSTS, *hosts}):
    mtbf = one_host / count
    best = _whole(best_interval(save, mtbf), step)
    alike = _interval(count, mtbf, storage, best)
    from_storage.append(
      dataclasses.replace(
        alike,
        simulated=simulate(count, one_host, storage, best),
        at_period=None if period is None else goodput(period, storage, mtbf),
      )
    )
    if memory and count > 1:
      copies = _whole(best_interval(memory.save_seconds, mtbf), step)
      saves = _rare(memory, storage, count, one_host)
      share = saves / (saves + save)
      alike = _interval(count, mtbf, memory, copies)
      simulated = simulate(count, one_host, storage, saves, memory, copies)
      from_memory.append(
        dataclasses.replace(alike, goodput=share * alike.goodput, simulated=simulated)
      )
  return ExpectedGoodput(mtbf_hours, times, storage, memory, period, from_storage, from_memory)


def _interval(num_hosts: int, mtbf: float, recovery: Recovery, best: float) -> Interval:
  save = recovery.save_seconds
  near = young(save, mtbf), daly(save, mtbf)
  return Interval(num_hosts, mtbf, best, *near, goodput(best, recovery, mtbf), 0.0, None)


def _whole(seconds: float, step: float | None) -> float:
  """Returns a time of whole steps, at least one."""
  return max(round(seconds / step), 1) * step if step else max(seconds, 1e-3)


def _rare(memory: Recovery, storage: Recovery, num_hosts: int, one_host: float) -> float:
  """Returns the seconds between checkpoints that copies leave: those that are best where storage is
  needed only if one of the two neighbors fails during a restart; at most a day."""
  pairs = one_host / num_hosts * one_host / (2 * max(memory.restart_seconds, 1e-3))
  return min(best_interval(storage.save_seconds, pairs), DAY) or DAY
