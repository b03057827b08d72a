"""One process at a time makes a file, or trains in a run's folder."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from maxbatch.errors import UserError
from maxbatch.run_folder.paths import RunFolder

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
