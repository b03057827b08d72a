"""What a run writes down, one object per step: metrics.jsonl, and what shows the same elsewhere.

Numbers are numbers; a key that is absent was not measured. Keys without a prefix belong to the
training step, others (`eval/loss`) to what their prefix names.

What shows a run's records elsewhere than in metrics.jsonl: TensorBoard's files, or one that may fail.
"""

import collections
import dataclasses
import json
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import AppendedFile, elsewhere, replacing
from maxbatch.run_folder.events import Record, StepTimes
from maxbatch.run_folder.paths import RunFolder

POSITIONS = ("step", "samples", "tokens")
OVER_OTHERS = frozenset({"loss", "eval/loss", "learning_rate", "global_batch_to_train"})
"""Shown over samples and tokens too: runs with different batches compare there."""


@dataclasses.dataclass(frozen=True)
class Opening:
  """What a writer is opened with."""

  folder: Path
  first: int
  """The step of the first record that will come."""
  last: Record | None = None
  """The record before it; None: there is none."""
  keys: Mapping[str, object] = dataclasses.field(default_factory=dict)
  """The configuration, as YAML has it."""
  report: Callable[[str], None] = print


class Writer(Protocol):
  """One place where records and texts are shown."""

  def write(self, record: Record) -> None:
    """Writes one step, with at least the keys of POSITIONS."""
    ...

  def write_text(self, name: str, step: int, text: str) -> None:
    """Writes a text by its name: what the model wrote, the plan, the configuration."""
    ...

  def close(self) -> None:
    """Writes what waits, as far as that is possible."""
    ...


WriterFactory = Callable[[Opening], Writer]


class Guarded:
  """A writer that is let go at its first error, with a warning: no run ends because of it."""

  def __init__(self, name: str, writer: Writer, report: Callable[[str], None]):
    self._name, self._report = name, report
    self._writer: Writer | None = writer

  def write(self, record: Record) -> None:
    self._try(lambda writer: writer.write(record))

  def write_text(self, name: str, step: int, text: str) -> None:
    self._try(lambda writer: writer.write_text(name, step, text))

  def close(self) -> None:
    self._try(lambda writer: writer.close())

  def _try(self, use: Callable[[Writer], None]) -> None:
    if self._writer is None:
      return
    try:
      use(self._writer)
    except Exception as error:  # Networks and services fail in ways that no list of classes has.
      self._writer = None
      self._report(let_go(self._name, error))


def let_go(name: str, error: Exception) -> str:
  """Says that a writer has failed, and is given no more."""
  return (
    f"warning: metrics_writers={name} has failed ({type(error).__name__}: {error}); training goes on "
    "without it, and metrics.jsonl has everything"
  )


# What is in them is generated when they are imported, and no type checker knows it.
_EVENTS: Any = event_pb2
_SUMMARIES: Any = summary_pb2
_TENSORS: Any = tensor_pb2
_TYPES: Any = types_pb2
_FILE_VERSION = "brain.Event:2"


class Curves:
  """Appends points to the curves of one folder."""

  def __init__(self, folder: pathlib.Path, first: int, report: Callable[[str], None]):
    """Opens TensorBoard's files, which drop what earlier writers have from step `first` on.

    `report` receives a line whenever something cannot be written; it is written later. Raises
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
    """Adds one point to each curve."""
    make = _SUMMARIES.Summary.Value
    points = [make(tag=tag, simple_value=value) for tag, value in values.items()]
    self._append(step=step, summary=_SUMMARIES.Summary(value=points))

  def add_text(self, step: int, tag: str, text: str) -> None:
    """Adds a text, which is shown letter by letter."""
    # It is taken for Markdown, in which an indented line is code.
    shown = "".join(f"    {line}\n" for line in text.splitlines())
    plugin = _SUMMARIES.SummaryMetadata.PluginData(plugin_name="text")
    encoded = shown.encode(errors="replace")
    content = _TENSORS.TensorProto(dtype=_TYPES.DT_STRING, string_val=[encoded])
    metadata = _SUMMARIES.SummaryMetadata(plugin_data=plugin)
    value = _SUMMARIES.Summary.Value(tag=tag, metadata=metadata, tensor=content)
    self._append(step=step, summary=_SUMMARIES.Summary(value=[value]))

  def close(self) -> None:
    """Writes what is not on disk yet, if that is possible."""
    self._records.close()

  def _append(self, **content: object) -> None:
    event = _EVENTS.Event(wall_time=time.time(), **content)
    self._records.write(event.SerializeToString())
    self._records.flush()


class TensorBoardWriter:
  """All curves over steps, and some over samples and tokens too."""

  def __init__(self, opening: Opening):
    """Goes on after the last record. Raises OSError: folders or files cannot be made."""
    paths, last = RunFolder(opening.folder), opening.last
    self._over_steps = Curves(paths.tensorboard, opening.first, opening.report)
    # Apart: TensorBoard drops every curve of a folder from one and the same number on.
    self._over_others = {
      name: Curves(folder, int(last[name]) + 1 if last else 0, opening.report)
      for name, folder in (
        ("samples", paths.tensorboard_over_samples),
        ("tokens", paths.tensorboard_over_tokens),
      )
    }

  def write(self, record: Record) -> None:
    curves = {key: value for key, value in record.items() if key not in POSITIONS}
    self._over_steps.add(int(record["step"]), curves)
    for name, board in self._over_others.items():
      chosen = {f"over_{name}/{key}": record[key] for key in OVER_OTHERS & record.keys()}
      board.add(int(record[name]), chosen)

  def write_text(self, name: str, step: int, text: str) -> None:
    self._over_steps.add_text(step, name, text)

  def close(self) -> None:
    for board in (self._over_steps, *self._over_others.values()):
      board.close()


class MetricsLog:
  """Appends records to the files of a run's folder; a context manager."""

  last_step: int | None = None
  """Last step of the earlier records; None: there were none."""
  times: StepTimes = StepTimes()
  """Sums over the records of the file."""
  dropped: StepTimes = StepTimes()
  """Sums over those of an interrupted run that were dropped."""

  def __init__(
    self,
    folder: pathlib.Path,
    step: int,
    report: Callable[[str], None] = print,
    *,
    open_others: Callable[[Opening], Iterable[Writer]] = lambda opening: [
      TensorBoardWriter(opening)
    ],
    keys: Mapping[str, object] | None = None,
  ):
    """Opens the files to go on after `step`; what an interrupted run wrote beyond it is dropped.

    A run that starts at step 0 writes that record again, so it keeps nothing.

    Args:
      report: receives a line whenever something later cannot be written; training goes on without.
      open_others: opens what shows the records elsewhere.

    Raises UserError: the folder cannot be written to, or holds a damaged metrics.jsonl.
    """
    path, first = RunFolder(folder).metrics, step + 1 if step else 0
    self._path, self._report = path, report
    self._missing: collections.deque[int] = collections.deque()
    try:
      folder.mkdir(parents=True, exist_ok=True)
      last, self.times, self.dropped = _cut(path, first)
      opening = Opening(folder, first, last, keys or {}, report)
      self._others = list(open_others(opening))
      self._file = AppendedFile(path, report)
      self.last_step = int(last["step"]) if last else None
    except OSError as error:
      raise UserError(
        f"base_output_directory={folder.parent} run_name={folder.name}: {error.filename or folder} "
        f"cannot be written to ({error.strerror}); choose a folder that can{elsewhere(folder)}"
      ) from None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._file.close()
    self._drop_written()
    if self._missing:
      self._report(
        f"warning: {self._path} misses the records of steps {self._missing[0]} to "
        f"{self._missing[-1]}, which could not be written"
      )
    for writer in self._others:
      writer.close()

  def write(self, record: Record) -> None:
    """Appends one step's record, which has at least the keys step, samples and tokens."""
    self._file.write(json.dumps(record).encode() + b"\n")
    self._file.flush()
    self._missing.append(int(record["step"]))
    self._drop_written()
    self.times = self.times.plus(record)
    for writer in self._others:
      writer.write(record)

  def write_text(self, name: str, step: int, text: str) -> None:
    for writer in self._others:
      writer.write_text(name, step, text)

  def _drop_written(self) -> None:
    while len(self._missing) > self._file.num_waiting:
      self._missing.popleft()


class NoMetricsLog(MetricsLog):
  """That of a process which leaves the files to another one."""

  def __init__(self) -> None: ...

  def __exit__(self, *_: object) -> None: ...

  def write(self, record: Record) -> None:
    """Does nothing."""

  def write_text(self, name: str, step: int, text: str) -> None:
    """Does nothing."""


def read_metrics(folder: pathlib.Path) -> list[Record]:
  """Reads all records of a run's folder, oldest first; a last line cut off by a crash is left out.
  Raises UserError: another line is not a record."""
  return list(each_record(folder))


def each_record(folder: pathlib.Path) -> Iterator[Record]:
  """Yields the same, one at a time: a run of millions of steps does not fit in memory. Raises
  UserError: as above, when it comes to such a line, or the file cannot be read."""
  path = RunFolder(folder).metrics
  try:
    if path.exists():
      yield from (record for _, record in _lines(path))
  except OSError as error:
    raise UserError(
      f"{path} cannot be read: {error.strerror}; put back the file, or name another run"
    ) from error


def _lines(path: pathlib.Path) -> Iterator[tuple[bytes, Record]]:
  if path.is_fifo():
    raise UserError(f"{path} is a pipe, not a file; remove it, or choose another run_name")
  with path.open("rb") as file:
    for number, line in enumerate(file, start=1):
      if line.endswith(b"\n"):
        yield line, _parse(path, number, line)


def _parse(path: pathlib.Path, number: int, line: bytes) -> Record:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    record = None
  if isinstance(record, dict) and type(record.get("step")) is int:
    # Not isinstance: for it, true is a number too.
    numbers = [value for value in record.values() if type(value) in (int, float)]
    if len(numbers) == len(record):
      return record
  raise UserError(
    f"{path}:{number}: not a record of a step; remove the line, or choose another run_name"
  )


def _cut(path: pathlib.Path, first: int) -> tuple[Record | None, StepTimes, StepTimes]:
  """Leaves only the records before step `first`, replacing the file in one move.

  Returns the last record left, if there is one, and sums over those left and those dropped.
  """
  last, kept, dropped = None, StepTimes(), StepTimes()
  if not path.exists():
    return last, kept, dropped
  with replacing(path) as file:
    for line, record in _lines(path):
      if record["step"] < first:
        file.write(line)
        last, kept = record, kept.plus(record)
      else:
        dropped = dropped.plus(record)
  return last, kept, dropped
