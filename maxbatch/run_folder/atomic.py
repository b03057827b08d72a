"""Files that appear whole, and files that grow: never a part that a reader could take for all.

A reader of a file that appears whole finds what was there before, or all of the new content: whatever
happens while it is written (an error, a signal, a full disk, a crash of the machine), it never holds
a part. A file that grows holds a beginning of what was written, and waits for room while there is none.

One process at a time makes a file, or trains in a run's folder.
"""

import collections
import contextlib
import datetime
import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from maxbatch.errors import UserError
from maxbatch.run_folder.paths import RunFolder

_KEPT_OF_NAME = 50
"""Letters of a file's name in that of its temporary file, which may not become too long."""
_ROOM_BYTES = 2**28
"""Free where a message sends a run."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
  """Yields a file to write to, which replaces `path` once on disk; after an error none is left.

  Its folder is made if need be. Who may read it follows from the umask: not made by tempfile, whose
  files nobody else may read. Several processes may write the same path; the last one wins. Raises
  OSError: it cannot be written; `path` is as it was.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  # Beside it, since a file can be renamed only within its file system.
  name = f".{path.name[:_KEPT_OF_NAME]}-{os.getpid()}-{secrets.token_hex(4)}"
  temporary = path.with_name(name)
  try:
    with open(temporary, "xb") as file:
      yield file
      file.flush()
      # Otherwise the new name may reach the disk before the content does.
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
  """Yields a folder to write to, renamed to `folder` at the end; after an error none is left.

  What a killed process left under the temporary name is removed. Two must not write at once.

  Args:
    folder: not there yet, or empty.

  Raises OSError: it cannot be made.
  """
  temporary = folder.with_name(f".{folder.name[:_KEPT_OF_NAME]}.unfinished")
  shutil.rmtree(temporary, ignore_errors=True)
  try:
    temporary.mkdir(parents=True)
    yield temporary
    os.replace(temporary, folder)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def write_whole(path: Path, content: str | bytes) -> None:
  """Writes a file, text in UTF-8, as `replacing` does. Raises OSError; `path` is then as it was."""
  with replacing(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


def write_run_file(path: Path, content: str | bytes) -> None:
  """Writes a file of a run's folder, as `write_whole` does. Raises UserError: it cannot be written;
  `path` is as it was."""
  try:
    write_whole(path, content)
  except OSError as error:
    raise UserError(
      f"{path} cannot be written ({error.strerror}); make room there, or choose another folder"
      f"{elsewhere(path)}"
    ) from error


def nearest(folder: Path) -> Path:
  return next(path for path in (folder, *folder.parents) if path.exists())


def elsewhere(path: Path) -> str:
  """Returns `, for example base_output_directory=…`, writable where `path` is not; or nothing."""
  for folder in (Path("runs"), Path.home() / "runs", Path(tempfile.gettempdir()) / "runs"):
    there = nearest(folder.absolute())
    is_other = not path.absolute().is_relative_to(folder.absolute())
    can_be_made = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    if is_other and can_be_made and shutil.disk_usage(there).free > _ROOM_BYTES:
      return f", for example base_output_directory={folder}"
  return ""


class AppendedFile:
  """A file to which bytes are appended; what cannot be written is kept, in order, and tried again.

  On disk is always a beginning of what was written here, whatever the disk refuses meanwhile. So
  no error of writing ends a run: it is reported once, and once more when all is on disk again.
  """

  def __init__(self, path: Path, report: Callable[[str], None]):
    """Opens the file at its end; `report` receives a line about what could not be written. Raises
    OSError: it cannot be opened."""
    self._path = path
    self._report = report
    # Unbuffered: the interpreter's buffer does not say how much of it is on disk after an error.
    self._file = io.FileIO(path, "a")
    self._waiting: collections.deque[bytes] = collections.deque()
    self._failing = False

  @property
  def num_waiting(self) -> int:
    """Number of the pieces given to `write` that are not, or not wholly, on disk."""
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


_HELD = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def claimed(path: Path, *, wait: bool) -> Iterator[bool]:
  """Yields whether this process alone has `path`, a file that is made for it and removed again.

  The system gives a claim back when its process ends, however it ends. Where files cannot be
  locked, everyone has what they claim: files that appear whole may be made twice.

  Args:
    wait: until another process gives it back; else False while one has it.

  Raises OSError: the file cannot be made.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a+b") as file:
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
      if error.errno in _HELD:
        yield False
        return
    try:
      yield True
    finally:
      path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
  """Holds the lock of a run's folder, which is made if need be, in this context.

  The system gives the lock back when the process ends, however it ends. A record lock, since one by
  flock would live on in worker processes after a kill -9. The file stays, so that two processes
  cannot each lock a file of their own under that name. Raises UserError: another process holds it.
  """
  try:
    folder.path.mkdir(parents=True, exist_ok=True)
    file = folder.lock.open("a+", encoding="utf-8")
  except OSError:
    yield  # No other process can write there either; what is to be written says so.
    return
  with file:
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in _HELD:
        raise UserError(_held(folder, file)) from None
      print(f"warning: {folder.lock} cannot be locked ({error.strerror}); start this run once only")
    else:
      _sign(file)
    yield


def _sign(file: TextIO) -> None:
  now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
  holder = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
  with contextlib.suppress(OSError):  # On a full disk the lock holds without a name.
    file.truncate(0)
    file.write(json.dumps(holder))
    file.flush()


def _held(folder: RunFolder, file: TextIO) -> str:
  try:
    file.seek(0)
    holder = json.load(file)
    who = f"process {holder['process']} on {holder['host']} since {holder['since']}"
  except (OSError, ValueError, KeyError, TypeError):
    who = f"a process that {folder.lock} does not name"
  return (
    f"run_name={folder.path.name} base_output_directory={folder.path.parent}: this run is being "
    f"trained by {who}, and two would write over each other's files; wait for it or stop it, or "
    f"choose another name, for example run_name={folder.free_name()}"
  )
