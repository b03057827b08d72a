"""Ctrl-C and SIGTERM as a wish to stop after the step under way."""

import signal
import types
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
      raise KeyboardInterrupt
    self.requested = True
    name = signal.Signals(number).name
    print(f"\n{name}: finishing the step and saving; once more stops at once", flush=True)
