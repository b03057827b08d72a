"""Ctrl-C, SIGTERM and SIGHUP: an end with a sentence, and in the loop only after the step under way."""

import os
import queue
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import NoReturn, Self

INTERRUPTED = "interrupted; what was saved before is kept"
SUPERVISOR = "MAXBATCH_SUPERVISOR"
"""Holds, in a process that a supervisor has started, what it is told (hardware/copies.py)."""
STOP = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 5
"""What a supervisor sends its process in the place of a signal that ends a command. Some schedulers send
such a signal to every process of a task: of those that the process gets itself none counts."""
_PATIENCE_SECONDS = 5.0
"""For files and threads to be closed; an exception may also be lost, in a destructor or a lock."""


_Handler = Callable[[int, types.FrameType | None], None]


def ending_signals() -> list[signal.Signals]:
  """Returns those that end a command; not SIGHUP where nohup has it ignored."""
  ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def _handlers(handle: _Handler) -> dict[int, _Handler]:
  """Returns a handler for each signal that ends a command."""
  direct = ending_signals()
  if SUPERVISOR not in os.environ:
    return dict.fromkeys(direct, handle)
  return {
    **dict.fromkeys(direct, lambda _, __: None),
    STOP: lambda _, frame: handle(signal.SIGTERM, frame),
  }


class Interrupted(KeyboardInterrupt):
  """A signal that ends the command at once; what is under way is dropped as by Ctrl-C."""

  def __init__(self, number: int) -> None:
    super().__init__()
    self.exit_code = 128 + number


class EndingSignals:
  """A context in which a signal raises Interrupted, wherever the main thread is.

  For before and after training: nothing there is worth finishing, and what is cut off is ignored.
  """

  def __init__(self) -> None:
    # A SimpleQueue, as a signal handler may take no lock that the main thread may hold.
    self._exit_codes: queue.SimpleQueue[int | None] = queue.SimpleQueue()

  def __enter__(self) -> Self:
    threading.Thread(target=self._insist, daemon=True).start()
    self._before = {
      number: signal.signal(number, handler)
      for number, handler in _handlers(self._interrupt).items()
    }
    return self

  def __exit__(self, *_: object) -> None:
    self._exit_codes.put(None)
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _interrupt(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    interrupted = Interrupted(number)
    self._exit_codes.put(interrupted.exit_code)
    raise interrupted

  def _insist(self) -> None:
    """Ends the process if the exception does not, or at a second signal."""
    exit_code = self._exit_codes.get()
    if exit_code is None:
      return
    try:
      second = self._exit_codes.get(timeout=_PATIENCE_SECONDS)
    except queue.Empty:
      second = exit_code
    if second is not None:
      print(INTERRUPTED, file=sys.stderr)
      leave(second)


def leave(exit_code: int) -> NoReturn:
  """Ends the process; after a signal without waiting for threads that still compile."""
  if exit_code > 128:
    for stream in (sys.stdout, sys.stderr):
      if stream is not None:  # as it is in a process that was started without
        stream.flush()
    os._exit(exit_code)
  sys.exit(exit_code)


class StopSignals:
  """A context in which the first signal sets `requested`, and a second one stops at once.

  Of several processes that train together each may hear it at another step, or only one at all:
  they stop when the steps say that one of them has (`hear`).
  """

  def __init__(self, *, shared: bool = False) -> None:
    """Takes as `shared` whether several processes train together."""
    self.requested = False
    self._shared, self._heard = shared, False
    self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    self._announcer = threading.Thread(target=self._announce, daemon=True)

  def __enter__(self) -> Self:
    self._announcer.start()
    self._before = {
      number: signal.signal(number, handler) for number, handler in _handlers(self._note).items()
    }
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._names.put(None)
    self._announcer.join(_PATIENCE_SECONDS)

  @property
  def agreed(self) -> bool:
    """Returns whether to stop after this step, alike in all processes."""
    return self._heard if self._shared else self.requested

  def hear(self, flag: int | None) -> None:
    """Takes up what a step has returned: 0, or 1 + the number of a process that heard a signal."""
    if flag and not self._heard:
      self._heard = True
      if not self.requested:
        self._names.put(f"a stop signal in process {int(flag) - 1}")

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    if not self.requested:
      self.requested = True
      self._names.put(signal.Signals(number).name)
    elif number != signal.SIGHUP:  # A terminal that goes away may say so several times.
      raise Interrupted(number)

  def _announce(self) -> None:
    """Says what a signal does. In a thread: the main one may be in the midst of printing."""
    while (name := self._names.get()) is not None:
      print(f"\n{name}: finishing the step and saving; once more stops at once", flush=True)
