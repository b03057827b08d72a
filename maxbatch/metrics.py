"""What a run writes down, one object per step: metrics.jsonl and TensorBoard.

Numbers are numbers; a key that is absent was not measured. Keys without a prefix belong to the
training step, others (`eval/loss`) to what their prefix names.
"""

import json
import os
import pathlib
from typing import Self

import tensorboardX

from maxbatch.errors import UserError

Record = dict[str, int | float]

_NOT_PLOTTED = ("step", "samples", "tokens")


class MetricsLog:
  """Appends records to the files of a run's folder; a context manager."""

  def __init__(self, folder: pathlib.Path, step: int):
    """Opens the files to go on after `step`; what an interrupted run wrote beyond it is dropped.

    Raises:
      UserError: the folder cannot be written to.
    """
    self._path = folder / "metrics.jsonl"
    try:
      folder.mkdir(parents=True, exist_ok=True)
      _cut_after(self._path, step)
      self._file = self._path.open("a", buffering=1)
    except OSError as error:
      raise UserError(
        f"base_output_directory, run_name: {folder} cannot be written to ({error.strerror}); "
        "choose a folder that can, for example base_output_directory=/tmp/runs"
      ) from None
    self._board = tensorboardX.SummaryWriter(
      str(folder / "tensorboard"), purge_step=step + 1, flush_secs=10
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._file.close()
    self._board.close()

  def write(self, record: Record) -> None:
    """Appends one step's record, which has at least the keys step, samples and tokens."""
    self._file.write(json.dumps(record) + "\n")
    for key, value in record.items():
      if key not in _NOT_PLOTTED:
        self._board.add_scalar(key, value, record["step"])


def read_metrics(folder: pathlib.Path) -> list[Record]:
  """All records of a run's folder, oldest first; a last line cut off by a crash is left out."""
  path = folder / "metrics.jsonl"
  return [json.loads(line) for line in _whole_lines(path)] if path.exists() else []


def _whole_lines(path: pathlib.Path) -> list[str]:
  return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def _cut_after(path: pathlib.Path, step: int) -> None:
  """Leaves only the records up to `step`, replacing the file in one move."""
  if not path.exists():
    return
  kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
  temporary = path.with_suffix(".tmp")
  temporary.write_text("".join(kept))
  os.replace(temporary, path)
