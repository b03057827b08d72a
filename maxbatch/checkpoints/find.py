"""The checkpoints of a folder and what they say without reading their arrays; the one that a key names."""

import pathlib
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp

from maxbatch.checkpoints.orbax import alone, silence_orbax
from maxbatch.checkpoints.record import is_intact, is_parameters_only
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.config.yaml_file import shown
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import RunFolder


def completed_steps(directory: pathlib.Path) -> list[int]:
  """Lists the steps whose saves were completed, oldest first; not yet verified."""
  if not directory.is_dir():
    return []
  names = (path.name for path in directory.iterdir() if path.is_dir())
  return sorted(int(name) for name in names if name.isdecimal())


def parameters_to_begin_with(directory: pathlib.Path) -> pathlib.Path | None:
  """Returns the folder of step 0, if a conversion left parameters alone there; no run ever removes
  it."""
  folder = directory / "0"
  record = record_of(folder) if folder.is_dir() else None
  return folder if record is not None and is_parameters_only(record) else None


def resumable_steps(directory: pathlib.Path) -> list[int]:
  """Lists the completed steps that a run saved while it trained."""
  steps = completed_steps(directory)
  return steps[1:] if parameters_to_begin_with(directory) else steps


def newest_record(directory: pathlib.Path) -> dict[str, Any] | None:
  """Returns the record of the newest resumable step that has an intact one; None if there is none.

  A restore may still fall back to an older step, if the arrays of this one are damaged.
  """
  records = (record_of(directory / str(step)) for step in reversed(resumable_steps(directory)))
  return next((record for record in records if record is not None), None)


def record_of(folder: pathlib.Path) -> dict[str, Any] | None:
  """Reads a step's record; None if it cannot be read, or is not what was written."""
  silence_orbax()
  try:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler(), multiprocessing_options=alone()) as reader:
      record = reader.restore(folder / "record")
  except (OSError, ValueError, RecursionError):
    return None
  return record if is_intact(record) and record["step"] == int(folder.name) else None


_SHOWN = 5
_LONGEST_PATH = 1000
_NO_PROCESSES = ("coordinator_address=", "num_processes=-1", "process_id=-1")
"""Where a run's processes found each other nobody waits now."""


def find_checkpoint(given: str, key: str = "checkpoint", others: str = "") -> pathlib.Path:
  """Finds the folder of the checkpoint that `key=given` names: a step, or a run's newest step.

  Args:
    others: what else the key may name, for messages: `; or …`.

  Raises UserError: the folder does not exist or has no checkpoint.
  """
  path = pathlib.Path(given).expanduser().absolute()
  if path.name.isdecimal() and path.parent == RunFolder(path.parent.parent).checkpoints:
    return _step_folder(given, key, path)
  steps = RunFolder(path).checkpoints
  if path == RunFolder(path.parent).checkpoints:
    steps = path
  result = completed_steps(steps)
  if result:
    return steps / str(result[-1])
  if not given or not path.exists():
    what = "there is no such folder" if given else "it has no value"
  else:
    what = (
      "no run has completed a checkpoint there" if steps.exists() else "that is not a run's folder"
    )
  raise UserError(
    f"{key}={shown(given, _LONGEST_PATH)}: {what}; name a run's folder, for its newest checkpoint, "
    f"or one of its steps{others}; for example {key}=runs/first_run or "
    f"{key}=runs/first_run/checkpoints/200"
  )


def config_of(step_folder: pathlib.Path, arguments: Sequence[str]) -> Config:
  """Loads the configuration of the run that wrote a checkpoint, in the folder where that is now.

  Args:
    arguments: keys on top of it, or config= and another file in its place.

  Raises UserError: there is none, or a key is wrong.
  """
  if any(argument.startswith("config=") for argument in arguments):
    return load_config(arguments)
  folder = step_folder.parent.parent
  written = RunFolder(folder).config
  if not written.exists():
    raise UserError(
      f"checkpoint={step_folder}: there is no {written} to tell how the run "
      "was configured; give its configuration, for example config=my.yml"
    )
  place = [f"base_output_directory={folder.parent}", f"run_name={folder.name}"]
  return load_config([f"config={written}", *place, *_NO_PROCESSES, *arguments])


def _step_folder(given: str, key: str, path: pathlib.Path) -> pathlib.Path:
  if path.is_dir():
    return path
  there = completed_steps(path.parent)
  newest = ", ".join(map(str, there[-_SHOWN:]))
  others = f"there are {newest}" if there else "there is none in that folder"
  raise UserError(
    f"{key}={shown(given, _LONGEST_PATH)}: there is no checkpoint of that step; {others}"
  )


def other_step(folder: pathlib.Path, key: str) -> str:
  """Suggests what to take instead of a step's folder that is damaged."""
  others = [step for step in completed_steps(folder.parent) if step != int(folder.name)]
  return f"{key}={folder.parent / str(others[-1])}" if others else "one of another run"
