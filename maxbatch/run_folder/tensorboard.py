"""A run's curves in the files that TensorBoard reads."""

import pathlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from maxbatch.run_folder.appending import AppendedFile

# What is in them is generated when they are imported, and no type checker knows it.
_EVENTS: Any = event_pb2
_SUMMARIES: Any = summary_pb2
_FILE_VERSION = "brain.Event:2"


class Curves:
  """Appends points to the curves of one folder."""

  def __init__(self, folder: pathlib.Path, first: int, report: Callable[[str], None]):
    """TensorBoard drops what earlier writers of the folder have at step `first` or later.

    `report` receives a line whenever something cannot be written; it is written later.

    Raises:
      OSError: the folder cannot be made, or no file in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads a folder's files in the order of their names, and goes on where it was in
    # each: a quick restart must have one of its own, which comes later.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f"events.out.tfevents.{seconds}.{nanoseconds:09}.{socket.gethostname()}"
    self._records = RecordWriter(AppendedFile(folder / name, report))
    self._append(file_version=_FILE_VERSION)
    starts = _EVENTS.SessionLog(status=_EVENTS.SessionLog.START)
    self._append(step=first, session_log=starts)

  def add(self, step: int, values: Mapping[str, float]) -> None:
    """One point of each curve."""
    points = [
      _SUMMARIES.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
    ]
    self._append(step=step, summary=_SUMMARIES.Summary(value=points))

  def close(self) -> None:
    """Writes what is not on disk yet, if that is possible."""
    self._records.close()

  def _append(self, **content: object) -> None:
    event = _EVENTS.Event(wall_time=time.time(), **content)
    self._records.write(event.SerializeToString())
    self._records.flush()
