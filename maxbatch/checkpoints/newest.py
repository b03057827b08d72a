"""What the checkpoints of a folder say, without reading their arrays."""

import pathlib
from typing import Any

import orbax.checkpoint as ocp

from maxbatch.checkpoints.quiet_orbax import silence_orbax
from maxbatch.checkpoints.record import is_intact, is_parameters_only
from maxbatch.checkpoints.several import alone


def completed_steps(directory: pathlib.Path) -> list[int]:
  """The steps whose saves were completed, oldest first; not yet verified."""
  if not directory.is_dir():
    return []
  names = (path.name for path in directory.iterdir() if path.is_dir())
  return sorted(int(name) for name in names if name.isdecimal())


def parameters_to_begin_with(directory: pathlib.Path) -> pathlib.Path | None:
  """The folder of step 0, if a conversion left parameters alone there; no run ever removes it."""
  folder = directory / "0"
  record = record_of(folder) if folder.is_dir() else None
  return folder if record is not None and is_parameters_only(record) else None


def resumable_steps(directory: pathlib.Path) -> list[int]:
  """As `completed_steps`, of those that a run saved while it trained."""
  steps = completed_steps(directory)
  return steps[1:] if parameters_to_begin_with(directory) else steps


def newest_record(directory: pathlib.Path) -> dict[str, Any] | None:
  """The record of the newest resumable step that has an intact one; None if there is none.

  A restore may still fall back to an older step, if the arrays of this one are damaged.
  """
  records = (record_of(directory / str(step)) for step in reversed(resumable_steps(directory)))
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
