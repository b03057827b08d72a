"""How long steps take."""

import time


class Clock:
  """Seconds between the ends of consecutive steps."""

  def __init__(self) -> None:
    self._last = time.perf_counter()

  def lap(self) -> float:
    """Returns the seconds since the clock was made or last asked."""
    last, self._last = self._last, time.perf_counter()
    return self._last - last
