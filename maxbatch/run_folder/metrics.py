"""What a run writes down, one object per step: metrics.jsonl, and what shows the same elsewhere.

Numbers are numbers; a key that is absent was not measured. Keys without a prefix belong to the
training step, others (`eval/loss`) to what their prefix names.
"""

import collections
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import AppendedFile, elsewhere, replacing
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.writer import Opening, Record, TensorBoardWriter, Writer


class MetricsLog:
  """Appends records to the files of a run's folder; a context manager."""

  last_step: int | None = None
  """Last step of the earlier records; None: there were none."""

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
      last = _cut(path, first)
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
  UserError: as above, when it comes to such a line."""
  path = RunFolder(folder).metrics
  if path.exists():
    yield from (record for _, record in _lines(path))


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


def _cut(path: pathlib.Path, first: int) -> Record | None:
  """Leaves only the records before step `first`, replacing the file in one move.

  Returns the last record left, if there is one.
  """
  if not path.exists():
    return None
  last: Record | None = None
  with replacing(path) as file:
    for line, record in _lines(path):
      if record["step"] < first:
        file.write(line)
        last = record
  return last
