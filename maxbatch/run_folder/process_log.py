"""The log of one of several processes, of which the first alone speaks."""

import contextlib
import datetime
import io
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from maxbatch.errors import ProcessFailedError, TrainingDivergedError, UserError


@contextlib.contextmanager
def process_log(path: Path, *, speaks: bool) -> Iterator[None]:
  """Copies what this process prints inside this context to the file at `path`, and at the end what
  ended it.

  So is what libraries write past Python: a line of each of a thousand processes hides all others.

  Args:
    speaks: whether the lines are shown too; and what libraries write to standard error.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
  except OSError:
    yield  # The first process says what cannot be written in the run's folder.
    return
  shown = sys.stdout, sys.stderr
  now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
  _append(log, f"--- process {os.getpid()} on {socket.gethostname()}, {now}\n")
  sys.stdout, sys.stderr = (_Logged(log, stream if speaks else None) for stream in shown)
  kept = {number: os.dup(number) for number in ([1] if speaks else [1, 2])}
  for number in kept:
    os.dup2(log, number)
  try:
    yield
  except BaseException as error:
    _append(log, _last_words(error))
    raise
  finally:
    for number, before in kept.items():
      os.dup2(before, number)
      os.close(before)
    sys.stdout, sys.stderr = shown
    os.close(log)


class _Logged(io.TextIOBase):
  """A stream whose lines are in a file too; but not a live line, which is drawn again and again."""

  def __init__(self, log: int, shown: TextIO | None) -> None:
    self._log, self._shown = log, shown

  def write(self, text: str, /) -> int:
    if self._shown is not None:
      self._shown.write(text)
    if "\r" not in text:
      _append(self._log, text)
    return len(text)

  def flush(self) -> None:
    if self._shown is not None:
      self._shown.flush()

  def isatty(self) -> bool:
    return self._shown is not None and self._shown.isatty()

  def fileno(self) -> int:
    return self._shown.fileno() if self._shown is not None else self._log


def _append(log: int, text: str) -> None:
  with contextlib.suppress(OSError):
    os.write(log, text.encode(errors="replace"))


def _last_words(error: BaseException) -> str:
  if isinstance(error, ProcessFailedError):
    return ""  # It has been said.
  if isinstance(error, UserError | TrainingDivergedError):
    return f"error: {error}\n"
  return "".join(traceback.format_exception(error))
