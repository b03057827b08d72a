"""One end for all processes of a run, whichever of them it begins in.

A process that waits in a collective hears nothing of another's error, and Python's own signal handlers
do not run in it. So its connections to the others (hardware/peers.py) are in a thread, and another one
ends the process. The first failure that reaches process 0 is the one that all report, in one sentence
and with one exit code.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Self

from maxbatch.command_line.signals import Interrupted, leave
from maxbatch.errors import (
  EXIT_DIVERGED,
  EXIT_PROCESS_FAILED,
  EXIT_ROWS,
  EXIT_USER_ERROR,
  ProcessFailedError,
  RowsError,
  TrainingDivergedError,
  UserError,
)
from maxbatch.hardware.peers import LAST, Peers

_PACKAGE = Path(__file__).parents[1]

_GRACE_SECONDS = 3.0
"""For the main thread to come out of what it does, then for its way out, before it is ended."""
_TICK_SECONDS = 0.25
_CHECKS_PER_LIMIT = 8
_PLACES_SHOWN = 8
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

  def __init__(self, peers: Peers) -> None:
    """Takes the connections to the others, who have all come."""
    self.peers = peers
    self._end: End | None = None
    self._ended, self._main_is_out = threading.Event(), threading.Event()
    self._speaking = threading.Lock()
    self._has_spoken = self._has_own_error = self._first_is_lost = False
    self._terminal = os.dup(2)  # All but process 0 print into a log later on.
    threading.Thread(target=self._guard, daemon=True, name="watch").start()

  def fail(
    self, reason: str, exit_code: int = EXIT_PROCESS_FAILED, *, with_stacks: bool = False
  ) -> None:
    """Ends the run in all processes because of this one, unless something else has ended it."""
    own = self.peers.process
    self._has_own_error = own == 0 and not with_stacks
    if self._ended.is_set():
      return
    end = End(own, self.peers.own_host, reason, exit_code, with_stacks)
    said = {"kind": "end", "end": dataclasses.asdict(end)}
    if own:
      self.peers.tell(said)  # Process 0 says which end was first, if it still can.
      self._ended.wait(_GRACE_SECONDS)
    self.peers.heard.put((own, said))
    self._ended.wait()

  def cause_of(self, error: BaseException) -> End | None:
    """Returns what has happened to another process, if that is why this one has met `error`.

    Takes as long as it takes to notice that a process is silent. A save that failed as the run ended is an error
    of the user's by now: it only says what the others met, so nothing is waited for.
    """
    met: BaseException | None = error
    while isinstance(met, UserError):
      met = met.__cause__
    if not isinstance(met, RuntimeError | ValueError):
      return None
    if not _BROKEN_CONNECTION.match(str(met)):
      return None
    if met is error:
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
    self._ended.wait(self.peers.limit_seconds + 2 * _GRACE_SECONDS)

  def leave(self, exit_code: int) -> int:
    """Waits for the others; the exit code on which they agree.

    After a success all come this far. After a failure the others need only know of it, and the
    process must end by os._exit, as jax would wait for them.
    """
    if not exit_code and self._all_finish():
      self.peers.heard.put((self.peers.process, {"kind": "finished"}))
      return 0
    self.fail(f"has ended with exit code {exit_code}", exit_code)
    # The others' logs are closed now, and have said why.
    self._has_spoken |= self.peers.process != 0 and not self._first_is_lost
    self._main_is_out.set()
    self.speak()
    self._wait_until_known()
    assert self._end is not None
    return self._end.exit_code

  def _all_finish(self) -> bool:
    """Waits for all to come here, or for the end of the run; which of both it was."""
    all_are_here = self.peers.gather(LAST, None)
    while not self._ended.is_set():
      with contextlib.suppress(concurrent.futures.TimeoutError):
        all_are_here.result(_TICK_SECONDS)
        return True
    return False

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
      if self._first_is_lost and self.peers.process == 1:
        with contextlib.suppress(OSError):
          os.write(self._terminal, f"{sentence}\n".encode())

  def _places(self) -> str:
    """Says where the processes are: first those of which few are at the same place."""
    at: dict[str, list[int]] = {}
    # One that hangs says where only after it has waited for its main thread to come out.
    places = self.peers.collect("place", main_place(), 2 * _GRACE_SECONDS)
    for process, place in places.items():
      at.setdefault(place, []).append(process)
    rare_first = sorted(at.items(), key=lambda item: len(item[1]))[:_PLACES_SHOWN]
    return "".join(f"\n  {place}: {_numbers(processes)}" for place, processes in rare_first)

  def _first_end(self) -> End | None:
    """Waits for what is the matter with a process, which ends all; None: all have finished."""
    process, message = self.peers.heard.get()
    if message["kind"] == "finished":
      return None
    if message["kind"] == "end":
      return End(**message["end"])
    self._first_is_lost = message["kind"] == "lost" and process == 0
    if message["kind"] == "still":  # The others have gone on without it.
      reason = f"stood still for {message['seconds']:.0f} s"
    elif message["silent"]:
      limit = f"{self.peers.limit_seconds:g} s (jax_distributed_heartbeat_timeout_seconds)"
      reason = f"has given no sign of life for {limit}"
    else:
      reason = "has ended without a word"
    return End(process, self.peers.host_of(process), reason)

  def _guard(self) -> None:
    """Waits for the end of the run, says why, and ends a main thread that does not come out."""
    self._end = self._first_end()
    if self._end is None:
      return
    if self.peers.process == 0:
      self.peers.tell({"kind": "end", "end": dataclasses.asdict(self._end)})
    self._ended.set()
    self.peers.give_up()
    self.speak(main_is_out=self._main_is_out.wait(_GRACE_SECONDS))
    self._wait_until_known()
    if self._main_is_out.is_set():
      time.sleep(_GRACE_SECONDS)
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    os._exit(self._end.exit_code)

  def _wait_until_known(self) -> None:
    """Keeps process 0, with jax's service, until the others have said why the run ends."""
    if not self._first_is_lost:
      with contextlib.suppress(TimeoutError):
        self.peers.collect("known", None, 2 * _GRACE_SECONDS)


def _numbers(processes: list[int]) -> str:
  shown = ", ".join(map(str, sorted(processes)[:_PLACES_SHOWN]))
  more = len(processes) - _PLACES_SHOWN
  return f"process {shown}{f' and {more:,} more' if more > 0 else ''}"


_watches: list[Watch] = []
"""The one of this process, once it has joined others: jax, too, joins them once and for all."""


def watch_others(peers: Peers) -> None:
  """Begins to watch the other processes, which have joined."""
  _watches.append(Watch(peers))
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
  libc.signal(signal.SIGABRT, _aborted)


def own_peers() -> Peers:
  """Returns the connections to the other processes, which this one has joined."""
  return _watches[0].peers


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(_: int) -> None:
  """Holds the thread in which a library has called abort(), until the process ends.

  Gloo does so in a thread of its own when another process goes in the midst of a collective; Python's own
  handlers wait for the main thread, which never comes.
  """
  for watch in _watches:
    watch.abort()


_survived: list[type[Exception]] = []


@contextlib.contextmanager
def surviving(kind: type[Exception]) -> Iterator[None]:
  """Lets an error of this kind end no process: all meet it alike in this context, and catch it outside."""
  _survived.append(kind)
  try:
    yield
  finally:
    _survived.remove(kind)


@contextlib.contextmanager
def ending_together(*, alone: bool = False) -> Iterator[None]:
  """Ends all processes by what ends this one in this context, and this one by what has ended another.

  `alone`: an error in this context is this process's and not the configuration's, so that to start again
  may help: the exit code says so.

  Raises:
    ProcessFailedError: this process has met what another one's failure has led to.
  """
  try:
    yield
  except BaseException as error:
    if isinstance(error, tuple(_survived)):
      raise
    for watch in _watches:
      if cause := watch.cause_of(error):
        watch.speak()
        raise ProcessFailedError(str(cause), cause.exit_code) from None
      watch.fail(*_reason(error, alone=alone))
    raise


def end_hanging(reason: str) -> None:
  """Ends all processes because this one does not get on; each says where its threads are."""
  for watch in _watches:
    watch.fail(reason, with_stacks=True)
  if not _watches:
    print(f"{stacks()}\nstopped: this run {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_PROCESS_FAILED)


def leave_with_others(exit_code: int, *, at_once: bool = False) -> NoReturn:
  """Ends this process, after a success with the others, else as soon as they know of it.

  `exit_code` is what it would end with alone; `at_once`: after a failure without Python's own way out.
  """
  agreed = exit_code
  for watch in _watches:
    agreed = watch.leave(exit_code)
    if not agreed:
      signal.signal(signal.SIGABRT, signal.SIG_DFL)  # Python is taken down.
  if agreed and (_watches or at_once):
    for stream in (sys.stdout, sys.stderr):
      if stream is not None:  # as it is in a process that was started without
        stream.flush()
    os._exit(agreed)
  leave(exit_code)


def _reason(error: BaseException, *, alone: bool) -> tuple[str, int]:
  """Returns what others say of it, and with which code all exit."""
  if isinstance(error, Interrupted):
    return f"was ended by signal {error.exit_code - 128}", error.exit_code
  if isinstance(error, TrainingDivergedError):
    return f"stopped: {error}", EXIT_DIVERGED
  if isinstance(error, RowsError):
    return f"stopped: {error}", EXIT_ROWS
  if isinstance(error, UserError):
    return f"failed: {error}", EXIT_PROCESS_FAILED if alone else EXIT_USER_ERROR
  text = str(error).partition("\n")[0]
  return f"failed: {type(error).__name__}: {text}", EXIT_PROCESS_FAILED


class Watchdog:
  """A context in which `feed` must be called again and again, or the run ends; 0 seconds: need not.

  It ends with the stacks of all threads, of all processes in their logs.
  """

  def __init__(self, limit_seconds: float, end: Callable[[str], None] = end_hanging) -> None:
    """Takes a function `end` that is called, once, with what to say."""
    self._limit, self._end = limit_seconds, end
    self._fed = time.monotonic()
    self._over = threading.Event()

  def __enter__(self) -> Self:
    self.feed()
    if self._limit:
      threading.Thread(target=self._guard, daemon=True, name="watchdog").start()
    return self

  def __exit__(self, *_: object) -> None:
    self._over.set()

  def feed(self) -> None:
    """Takes note that the run gets on."""
    self._fed = time.monotonic()

  def _guard(self) -> None:
    while not self._over.wait(self._limit / _CHECKS_PER_LIMIT):
      if time.monotonic() - self._fed > self._limit:
        self._end(f"has ended no step for {self._limit:g} s (hang_timeout_seconds)")
        return
