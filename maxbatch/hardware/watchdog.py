"""Ends a run that does not get on: a loader, a disk or a collective that never answers."""

import threading
import time
from collections.abc import Callable
from typing import Self

from maxbatch.hardware.ending import end_hanging

_CHECKS_PER_LIMIT = 8


class Watchdog:
  """A context in which `feed` must be called again and again, or the run ends; 0 seconds: need not.

  It ends with the stacks of all threads, of all processes in their logs.
  """

  def __init__(self, limit_seconds: float, end: Callable[[str], None] = end_hanging) -> None:
    """`end` is called, once, with what to say."""
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
