"""What a run writes down, one object per step: metrics.jsonl and TensorBoard.

Numbers are numbers; a key that is absent was not measured. Keys without a prefix belong to the
training step, others (`eval/loss`) to what their prefix names.
"""

import json
import pathlib
from typing import Self

import tensorboardX

from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import write_whole
from maxbatch.run_folder.paths import RunFolder

Record = dict[str, int | float]

_OVER_SAMPLES = frozenset({"loss", "eval/loss", "learning_rate", "global_batch_to_train"})
"""Plotted against samples too: runs with different batches compare there."""
_NOT_PLOTTED = ("step", "samples", "tokens")


class MetricsLog:
  """Appends records to the files of a run's folder; a context manager."""

  def __init__(self, folder: pathlib.Path, step: int):
    """Opens the files to go on after `step`; what an interrupted run wrote beyond it is dropped.

    A run that starts at step 0 writes that record again, so it keeps nothing.

    Raises:
      UserError: the folder cannot be written to, or holds a damaged metrics.jsonl.
    """
    path, first = RunFolder(folder).metrics, step + 1 if step else 0
    try:
      folder.mkdir(parents=True, exist_ok=True)
      samples = _cut(path, first)
      self._board = _board(RunFolder(folder).tensorboard, first)
      # Apart: TensorBoard drops every curve of a folder from one and the same number on.
      self._board_over_samples = _board(RunFolder(folder).tensorboard_over_samples, samples)
      self._file = path.open("a", buffering=1)
    except OSError as error:
      raise UserError(
        f"base_output_directory={folder.parent} run_name={folder.name}: {error.filename or folder} "
        f"cannot be written to ({error.strerror}); choose a folder that can, "
        "for example base_output_directory=runs"
      ) from None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._file.close()
    self._board.close()
    self._board_over_samples.close()

  def write(self, record: Record) -> None:
    """Appends one step's record, which has at least the keys step, samples and tokens.

    Raises:
      UserError: the disk is full, or the folder has become unwritable.
    """
    try:
      self._file.write(json.dumps(record) + "\n")
    except OSError as error:
      raise UserError(
        f"step {record['step']}: {self._file.name} cannot be written to ({error.strerror}); make "
        "room there and start again: the run goes on from its last checkpoint"
      ) from None
    for key, value in record.items():
      if key not in _NOT_PLOTTED:
        self._board.add_scalar(key, value, int(record["step"]))
    for key in _OVER_SAMPLES & record.keys():
      samples = int(record["samples"])
      self._board_over_samples.add_scalar(f"over_samples/{key}", record[key], samples)


def read_metrics(folder: pathlib.Path) -> list[Record]:
  """All records of a run's folder, oldest first; a last line cut off by a crash is left out.

  Raises:
    UserError: another line is not a record.
  """
  path = RunFolder(folder).metrics
  return [record for _, record in _lines(path)] if path.exists() else []


def _lines(path: pathlib.Path) -> list[tuple[str, Record]]:
  """Every whole line with its record."""
  lines = path.read_text().splitlines(keepends=True)
  if lines and not lines[-1].endswith("\n"):
    del lines[-1]
  return [(line, _parse(path, number, line)) for number, line in enumerate(lines, start=1)]


def _parse(path: pathlib.Path, number: int, line: str) -> Record:
  try:
    record = json.loads(line)
  except json.JSONDecodeError:
    record = None
  if isinstance(record, dict) and "step" in record:
    return record
  raise UserError(
    f"{path}:{number}: not a record of a step; remove the line, or choose another run_name"
  )


def _board(folder: pathlib.Path, first: int) -> tensorboardX.SummaryWriter:
  """Writes curves; TensorBoard drops what earlier writers of the folder have at `first` or later."""
  return tensorboardX.SummaryWriter(
    str(folder),
    purge_step=first,
    flush_secs=10,
    # Files are named by the second: without this a quick restart would overwrite the last one.
    filename_suffix=f".{first}",
  )


def _cut(path: pathlib.Path, first: int) -> int:
  """Leaves only the records before step `first`, replacing the file in one move.

  Returns the samples at which new records begin: one more than the last record left has, else 0.
  """
  if not path.exists():
    return 0
  kept = [(line, record) for line, record in _lines(path) if record["step"] < first]
  write_whole(path, "".join(line for line, _ in kept))
  return int(kept[-1][1]["samples"]) + 1 if kept else 0
