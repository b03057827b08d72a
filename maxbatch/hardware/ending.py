"""One end for all processes of a run, whichever of them it begins in."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from maxbatch.hardware.coordinator import Coordinator
from maxbatch.hardware.watch import Watch, stacks

_watches: list[Watch] = []
"""The one of this process, once it has joined others: jax, too, joins them once and for all."""

_CHECKS_PER_LIMIT = 8


def watch_others(limit_seconds: float) -> None:
  """Begins to watch the other processes, which have joined; one that is silent so long is lost."""
  _watches.append(Watch(Coordinator(), limit_seconds))
  _libc().signal(signal.SIGABRT, _aborted)


def _libc() -> ctypes.CDLL:
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
  libc.signal.restype = ctypes.c_void_p
  return libc


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(_: int) -> None:
  """Holds the thread in which a library has called abort(), until the process ends.

  Gloo does so in a thread of its own when another process goes in the midst of a collective; Python's own
  handlers wait for the main thread, which never comes.
  """
  for watch in _watches:
    watch.abort()


def lose_coordinator() -> None:
  """Notes that process 0 has closed its connection."""
  for watch in _watches:
    watch.lose_coordinator()


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
