"""Files that grow while a run goes on, and wait for room while there is none."""

import collections
import io
from collections.abc import Callable
from pathlib import Path


class AppendedFile:
  """A file to which bytes are appended; what cannot be written is kept, in order, and tried again.

  On disk is always a beginning of what was written here, whatever the disk refuses meanwhile. So
  no error of writing ends a run: it is reported once, and once more when all is on disk again.
  """

  def __init__(self, path: Path, report: Callable[[str], None]):
    """Opens the file at its end; `report` receives a line about what could not be written.

    Raises:
      OSError: it cannot be opened.
    """
    self._path = path
    self._report = report
    # Unbuffered: the interpreter's buffer does not say how much of it is on disk after an error.
    self._file = io.FileIO(path, "a")
    self._waiting: collections.deque[bytes] = collections.deque()
    self._failing = False

  @property
  def num_waiting(self) -> int:
    """How many of the pieces given to `write` are not, or not wholly, on disk."""
    return len(self._waiting)

  def write(self, data: bytes) -> None:
    """Takes a piece, which `flush` writes."""
    self._waiting.append(data)

  def flush(self) -> None:
    """Writes what waits, as far as there is room."""
    try:
      while self._waiting:
        written = self._file.write(self._waiting[0])
        self._waiting[0] = self._waiting[0][written:]
        if not self._waiting[0]:
          self._waiting.popleft()
    except OSError as error:
      if not self._failing:
        self._report(
          f"warning: {self._path} cannot be written to ({error.strerror}); training continues, and "
          "what is missing there is written once that is possible again"
        )
      self._failing = True
    else:
      if self._failing:
        self._report(f"{self._path} can be written to again; nothing is missing")
      self._failing = False

  def close(self) -> None:
    """Writes what waits, if there is room now, and closes the file."""
    self.flush()
    self._file.close()
    if self._waiting:
      missing = sum(map(len, self._waiting))
      self._report(f"warning: the last {missing:,} bytes of {self._path} could not be written")
