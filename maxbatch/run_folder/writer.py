"""What shows a run's records elsewhere than in metrics.jsonl: TensorBoard's files, or one that may fail."""

import dataclasses
import pathlib
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from maxbatch.run_folder.atomic import AppendedFile
from maxbatch.run_folder.paths import RunFolder

Record = dict[str, int | float]

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
    """Opens TensorBoard's files, which drop what earlier writers of the folder have at step `first`
    or later.

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
    points = [
      _SUMMARIES.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
    ]
    self._append(step=step, summary=_SUMMARIES.Summary(value=points))

  def add_text(self, step: int, tag: str, text: str) -> None:
    """Adds a text, which is shown letter by letter."""
    # It is taken for Markdown, in which an indented line is code.
    shown = "".join(f"    {line}\n" for line in text.splitlines())
    plugin = _SUMMARIES.SummaryMetadata.PluginData(plugin_name="text")
    content = _TENSORS.TensorProto(
      dtype=_TYPES.DT_STRING, string_val=[shown.encode(errors="replace")]
    )
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
    """Goes on after the last record. Raises OSError: the folders cannot be made, or no files in
    them."""
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
