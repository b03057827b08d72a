"""Ctrl-C and SIGTERM: an end with a sentence, and in the loop only after the step under way."""

import os
import signal
import sys
import types
from typing import NoReturn, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
  """A signal that ends the command at once; what is under way is dropped as by Ctrl-C."""

  def __init__(self, number: int) -> None:
    super().__init__()
    self.exit_code = 128 + number


class EndingSignals:
  """A context in which a signal raises Interrupted, wherever the main thread is.

  For what comes before and after training: nothing there is worth finishing, and a checkpoint or
  a cache that is cut off is ignored by the next run.
  """

  def __enter__(self) -> Self:
    self._before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
  del frame
  raise Interrupted(number)


def leave(exit_code: int) -> NoReturn:
  """Ends the process; after a signal without waiting for threads that still compile."""
  if exit_code > 128:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
  sys.exit(exit_code)


class StopSignals:
  """A context in which the first signal sets `requested`, and a second one stops at once."""

  def __init__(self) -> None:
    self.requested = False

  def __enter__(self) -> Self:
    self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    if self.requested:
      raise Interrupted(number)
    self.requested = True
    name = signal.Signals(number).name
    print(f"\n{name}: finishing the step and saving; once more stops at once", flush=True)
