"""Processes that train together end together: one that fails says so, one that is gone is missed.

A process that waits in a collective hears nothing of another's error, and Python's own signal
handlers do not run in it. So each has two threads. One tells the others that this process lives, and
waits for the word that the run ends; the other measures for how long process 0 (in process 0:
everyone else) has been silent, and needs no network for that. The first failure that reaches the
coordinator's store is the one that all report, in one sentence and with one exit code.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from maxbatch.errors import EXIT_PROCESS_FAILED
from maxbatch.hardware.coordinator import Coordinator

_PACKAGE = Path(__file__).parents[1]

_GRACE_SECONDS = 3.0
"""For the main thread to come out of what it does, then for its way out, before it is ended."""
_TICK_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 5.0
_BEATS_PER_LIMIT = 8
_AT_THE_END_SECONDS = 7 * 24 * 3600.0
"""Processes wait for each other at the end; one that never comes is found by its silence."""
_PLACES_SHOWN = 8
_CLOCKS_SECONDS = 60.0
"""By which clocks may differ; signs of life themselves are that old at times."""
_BROKEN_CONNECTION = re.compile("UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED")
"""What jax's errors begin with when another process is gone: effects of a cause that is to come."""


def stacks() -> str:
  """Returns the stack of every thread of Python, the innermost call last."""
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  return "\n".join(
    f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
    for ident, frame in sys._current_frames().items()
  )


def main_place() -> str:
  """Returns the innermost line of this package that the main thread is in."""
  frame = sys._current_frames()[threading.main_thread().ident or 0]
  for call in reversed(traceback.extract_stack(frame)):
    path = Path(call.filename)
    if path.is_relative_to(_PACKAGE):
      return f"{path.relative_to(_PACKAGE.parent)}:{call.lineno} in {call.name}"
  return "outside of maxbatch"


@dataclasses.dataclass(frozen=True)
class End:
  """Why the run ends in all processes."""

  process: int
  host: str
  reason: str
  exit_code: int = EXIT_PROCESS_FAILED
  with_stacks: bool = False

  def __str__(self) -> str:
    return f"process {self.process} on {self.host} {self.reason}"


class Watch:
  """This process's part in noticing the failures of all, from its beginning to `leave`."""

  def __init__(self, store: Coordinator, limit_seconds: float) -> None:
    """Takes the seconds for which a process may be silent."""
    self._store, self._limit = store, limit_seconds
    self._pause = min(limit_seconds / _BEATS_PER_LIMIT, _LONGEST_PAUSE_SECONDS)
    self._host = socket.gethostname()
    self._end: End | None = None
    self._ended, self._closed = threading.Event(), threading.Event()
    self._main_is_out, self._speaking = threading.Event(), threading.Lock()
    self._has_spoken = False
    self._has_own_error = self._first_is_lost = False
    self._terminal = os.dup(2)  # All but process 0 print into a log later on.
    others = range(1, store.num_processes) if store.process == 0 else [0]
    self._heard = dict.fromkeys(others, time.monotonic())
    self._beats = dict.fromkeys(others, "")
    self._threads = [
      threading.Thread(target=work, daemon=True, name=f"watch{work.__name__}")
      for work in (self._exchange, self._guard)
    ]
    for thread in self._threads:
      thread.start()

  def fail(
    self, reason: str, exit_code: int = EXIT_PROCESS_FAILED, *, with_stacks: bool = False
  ) -> None:
    """Ends the run in all processes because of this one, unless something else has ended it."""
    self._has_own_error = self._store.process == 0 and not with_stacks
    if not self._ended.is_set():
      self._announce(End(self._store.process, self._host, reason, exit_code, with_stacks))

  def cause_of(self, error: BaseException) -> End | None:
    """Returns what has happened to another process, if that is why this one has met `error`.

    Takes as long as it takes to notice that a process is silent.
    """
    if not isinstance(error, RuntimeError | ValueError):
      return None
    if not _BROKEN_CONNECTION.match(str(error)):
      return None
    self._await_cause()
    return self._end

  def abort(self) -> NoReturn:
    """Ends this process, in which a library has called abort(), by what has happened to another one.

    Or all by this one, if nothing has. Takes as long as `cause_of`.
    """
    self._await_cause()
    self.fail("was aborted by a library, whose last words are in its log")
    while True:  # The guard ends it.
      time.sleep(_GRACE_SECONDS)

  def _await_cause(self) -> None:
    self._ended.wait(self._limit + 2 * self._pause + _GRACE_SECONDS)

  def leave(self, exit_code: int) -> int:
    """Waits for the others; the exit code on which they agree.

    After a success all come this far. After a failure the others need only know of it, and the
    process must end by os._exit, as jax would wait for them.
    """
    if not exit_code and not self._ended.is_set():
      with contextlib.suppress(RuntimeError):
        self._store.meet("end", _AT_THE_END_SECONDS)
    if not exit_code and not self._ended.is_set():
      self._close()
      return 0
    self.fail(f"has ended with exit code {exit_code}", exit_code)
    # The others' logs are closed now, and have said why.
    self._has_spoken |= self._store.process != 0 and not self._first_is_lost
    self._main_is_out.set()
    self.speak()
    self._wait_until_known()
    assert self._end is not None
    return self._end.exit_code

  def _close(self) -> None:
    """Ends the threads: Python cannot end while they are in jax's code."""
    self._closed.set()
    self._store.put_first("end", "")  # What they wait for.
    for thread in self._threads:
      thread.join(_GRACE_SECONDS)

  def speak(self, *, main_is_out: bool = True) -> None:
    """Says once why the run ends, unless process 0 has an error of its own to say.

    On the terminal it is process 0 that speaks; where that one is lost, the next.
    """
    with self._speaking:
      if self._has_spoken or self._end is None:
        return
      self._has_spoken = True
      sentence = f"stopped: {self._end}"
      if self._end.with_stacks:
        print(stacks(), file=sys.stderr)
        sentence += self._places()
      if self._has_own_error and main_is_out:
        return
      print(sentence, file=sys.stderr, flush=True)
      if self._first_is_lost and self._store.process == 1:
        with contextlib.suppress(OSError):
          os.write(self._terminal, f"{sentence}\n".encode())

  def _places(self) -> str:
    """Says where the processes are: first those of which few are at the same place."""
    self._store.put(f"place/{self._store.process}", main_place())
    self._wait_for_all("place")
    at: dict[str, list[int]] = {}
    for process, place in self._store.within("place").items():
      at.setdefault(place, []).append(int(process))
    rare_first = sorted(at.items(), key=lambda item: len(item[1]))[:_PLACES_SHOWN]
    return "".join(f"\n  {place}: {_numbers(processes)}" for place, processes in rare_first)

  def lose_coordinator(self) -> None:
    """Notes that process 0 has closed its connection."""
    if not self._closed.is_set():
      self._first_is_lost = True
      self._announce(End(0, self._host_of(0), "has ended without a word"))

  def _announce(self, end: End) -> None:
    """Makes `end`, or what came before it, known to all; without a network, to this process."""
    self._try(self._publish, end)
    self._set_end(end)

  def _try(self, work: Callable[..., None], *arguments: object) -> None:
    """Runs what needs the network, for which nobody waits long."""
    sender = threading.Thread(target=work, args=arguments, daemon=True)
    sender.start()
    sender.join(_GRACE_SECONDS)

  def _publish(self, end: End) -> None:
    self._store.put_first("end", json.dumps(dataclasses.asdict(end)))
    first = self._store.wait_for("end", _GRACE_SECONDS)
    self._set_end(End(**json.loads(first)) if first else end)

  def _set_end(self, end: End) -> None:
    """Sets how the run ends; the first end is the one that counts."""
    with self._speaking:
      self._end = self._end or end
    self._ended.set()

  def _exchange(self) -> None:
    """Sends and receives signs of life until the run ends."""
    number = 0
    while not (self._ended.is_set() or self._closed.is_set()):
      number, began = number + 1, time.monotonic()
      self._store.put(f"beat/{self._store.process}", f"{number} {time.time():.0f} {self._host}")
      if self._store.process == 0:
        self._hear(self._store.within("beat"))
      elif beat := self._store.wait_for("beat/0", self._pause):
        self._hear({"0": beat})
      # Process 0 soon hears of all for the first time, and of their clocks.
      pause = self._pause if all(self._beats.values()) else _TICK_SECONDS
      if first := self._store.wait_for("end", pause):
        self._set_end(End(**json.loads(first)))
      time.sleep(max(0.0, min(_TICK_SECONDS, began + pause - time.monotonic())))

  def _hear(self, beats: dict[str, str]) -> None:
    for name, beat in beats.items():
      process = int(name)
      if process in self._heard and self._beats[process] != beat:
        if not self._beats[process]:
          self._compare_clocks(process, beat)
        self._beats[process], self._heard[process] = beat, time.monotonic()

  def _compare_clocks(self, process: int, beat: str) -> None:
    """Says in process 0 that another one's clock is wrong: times in logs and of files are."""
    _, then, host = beat.split(" ", 2)
    ahead = float(then) - time.time()
    if self._store.process == 0 and abs(ahead) > _CLOCKS_SECONDS:
      print(
        f"warning: the clock of process {process} on {host} is {abs(ahead):,.0f} s "
        f"{'ahead of' if ahead > 0 else 'behind'} that of process 0; no decision rests on it, but "
        "the times in its log are wrong"
      )

  def _guard(self) -> None:
    """Finds who is silent; once the run ends, ends a main thread that does not come out."""
    last = time.monotonic()
    while not self._ended.wait(_TICK_SECONDS):
      now = time.monotonic()
      if self._closed.is_set():
        return
      silent = [process for process, heard in self._heard.items() if now - heard > self._limit]
      if now - last > self._limit:  # Stopped from outside: the others have gone on without it.
        self._set_end(End(self._store.process, self._host, f"stood still for {now - last:.0f} s"))
      elif silent:
        self._first_is_lost = silent[0] == 0
        self._announce(End(silent[0], self._host_of(silent[0]), self._silence(silent)))
      last = now
    self.speak(main_is_out=self._main_is_out.wait(_GRACE_SECONDS))
    self._wait_until_known()
    if self._main_is_out.is_set():
      time.sleep(_GRACE_SECONDS)
    assert self._end is not None
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    os._exit(self._end.exit_code)

  def _silence(self, silent: list[int]) -> str:
    also = f", nor have {len(silent) - 1} others" if len(silent) > 1 else ""
    return (
      f"has given no sign of life for {self._limit:g} s{also} "
      "(jax_distributed_heartbeat_timeout_seconds)"
    )

  def _host_of(self, process: int) -> str:
    return self._beats[process].split(" ", 2)[-1] or "an unknown host"

  def _wait_until_known(self) -> None:
    """Keeps the store in process 0 until the others have said why the run ends.

    jax aborts a process that still asks it for something when process 0 is gone.
    """
    if not self._first_is_lost:
      self._try(self._store.put, f"known/{self._store.process}", "")
    self._wait_for_all("known", 2 * _GRACE_SECONDS)

  def _wait_for_all(self, folder: str, seconds: float = _GRACE_SECONDS) -> None:
    """Waits, in process 0, until every process has put something there, or has had enough time."""
    deadline = time.monotonic() + seconds
    while self._store.process == 0 and time.monotonic() < deadline:
      if len(self._store.within(folder)) == self._store.num_processes:
        return
      time.sleep(_TICK_SECONDS)


def _numbers(processes: list[int]) -> str:
  shown = ", ".join(map(str, sorted(processes)[:_PLACES_SHOWN]))
  more = len(processes) - _PLACES_SHOWN
  return f"process {shown}{f' and {more:,} more' if more > 0 else ''}"
