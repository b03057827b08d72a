"""What the checkpoints of a folder say, without reading their arrays."""

import pathlib
from typing import Any

import orbax.checkpoint as ocp

from maxbatch.checkpoints.quiet_orbax import silence_orbax
from maxbatch.checkpoints.record import is_intact
from maxbatch.checkpoints.several import alone


def completed_steps(directory: pathlib.Path) -> list[int]:
  """The steps whose saves were completed, oldest first; not yet verified."""
  if not directory.is_dir():
    return []
  names = (path.name for path in directory.iterdir() if path.is_dir())
  return sorted(int(name) for name in names if name.isdecimal())


def newest_record(directory: pathlib.Path) -> dict[str, Any] | None:
  """The record of the newest step that has an intact one; None if there is none.

  A restore may still fall back to an older step, if the arrays of this one are damaged.
  """
  records = (record_of(directory / str(step)) for step in reversed(completed_steps(directory)))
  return next((record for record in records if record is not None), None)


def record_of(folder: pathlib.Path) -> dict[str, Any] | None:
  """A step's record; None if it cannot be read, or is not what was written."""
  silence_orbax()
  try:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler(), multiprocessing_options=alone()) as reader:
      record = reader.restore(folder / "record")
  except (OSError, ValueError, RecursionError):
    return None
  return record if is_intact(record) and record["step"] == int(folder.name) else None
