"""The checkpoint that branches start from: reading it, and forking it per branch."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from maxbatch.checkpoints.find import completed_steps, lone_reader, other_step, silence_orbax
from maxbatch.checkpoints.record import is_intact, is_parameters_only
from maxbatch.core.plan import Position
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import sync_errors
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.paths import RunFolder


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """One complete checkpoint of a run."""

  folder: pathlib.Path
  """The step's folder, named by its number."""
  position: Position
  plan: dict[str, Any]
  """The batch plan of the run that wrote it."""
  checksum: str
  """Checksum of its record, which holds the fingerprint of every array."""


def read_checkpoint(folder: pathlib.Path) -> Checkpoint:
  """Reads the record of a step's folder. The arrays are verified when a branch restores them.

  Raises:
    UserError: the record cannot be read or fails its checksum.
  """
  silence_orbax()
  step = int(folder.name)
  try:
    with lone_reader(folder.parent) as manager:
      args = ocp.args.Composite(record=ocp.args.JsonRestore())
      record = manager.restore(step, args=args)["record"]
  except (OSError, ValueError, KeyError, RecursionError) as error:
    raise UserError(_damaged(folder, str(error).splitlines()[0])) from error
  if not is_intact(record) or record["step"] != step:
    raise UserError(_damaged(folder, "its record is not the one written"))
  if is_parameters_only(record):
    raise UserError(
      f"checkpoint={folder} holds parameters alone, and branches continue a training run; give "
      "one that was saved in training"
    )
  if not (folder / "state").is_dir():
    raise UserError(_damaged(folder, "its state is missing"))
  position = Position(step, record["samples"])
  return Checkpoint(folder, position, record["plan"], record["checksum"])


def record_origin(folder: pathlib.Path, checkpoint: Checkpoint) -> None:
  """Records in `folder` that its branches start from this checkpoint; process 0 does.

  Raises:
    UserError: the folder's branches start from another checkpoint, or its record does not tell.
  """
  with sync_errors():
    if jax.process_index() == 0:
      _record_origin(folder / "origin.json", checkpoint)


def _record_origin(note: pathlib.Path, checkpoint: Checkpoint) -> None:
  folder = note.parent
  if note.exists():
    try:
      if not note.is_file():
        raise OSError("it is no file")
      recorded = json.loads(note.read_text(encoding="utf-8"))["checksum"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
      raise UserError(
        f"{note} does not say which checkpoint its branches come from ({error}); remove "
        f"{folder}, or choose another run_name for new branches"
      ) from error
    if recorded != checkpoint.checksum:
      raise UserError(
        f"the branches in {folder} come from another checkpoint of step "
        f"{checkpoint.position.step} than {checkpoint.folder} is now; remove that folder, or "
        "choose another run_name for new branches"
      )
    return
  content = {"checkpoint": str(checkpoint.folder), "checksum": checkpoint.checksum}
  write_run_file(note, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def removed_if_refused(folder: pathlib.Path) -> Iterator[None]:
  """Removes a folder that was made inside this context, if a UserError ends it before any training there;
  process 0 does."""
  made = next((each for each in [*folder.parents][::-1] if not each.exists()), folder)
  is_new = jax.process_index() == 0 and not folder.exists()
  try:
    yield
  except UserError:
    if is_new and not any(map(os.path.getsize, folder.rglob(RunFolder(folder).metrics.name))):
      shutil.rmtree(made, ignore_errors=True)
    raise


def fork_checkpoint(checkpoint: Checkpoint, branch_folder: pathlib.Path) -> None:
  """Hard-links the checkpoint into a branch that has none, or copies it where links do not work;
  process 0 does.

  Links are safe because checkpoint files are never modified, only removed. The folder is renamed
  when it is complete, so an interrupted fork leaves no partial checkpoint.

  Raises:
    UserError: the files cannot be linked or copied.
  """
  with sync_errors():
    if jax.process_index() == 0 and not completed_steps(RunFolder(branch_folder).checkpoints):
      _fork(checkpoint, branch_folder)


def _fork(checkpoint: Checkpoint, branch_folder: pathlib.Path) -> None:
  steps = RunFolder(branch_folder).checkpoints
  unfinished = branch_folder / "checkpoint.unfinished"
  try:
    shutil.rmtree(unfinished, ignore_errors=True)
    steps.mkdir(parents=True, exist_ok=True)
    shutil.copytree(checkpoint.folder, unfinished, copy_function=_link_or_copy)
    unfinished.rename(steps / checkpoint.folder.name)
  except OSError as error:
    raise UserError(
      f"checkpoint={checkpoint.folder} cannot be copied to {branch_folder}: {error}; make room "
      "there, or choose another base_output_directory"
    ) from error


def _link_or_copy(source: str, target: str) -> None:
  try:
    os.link(source, target)
  except OSError:  # Another file system, or one without links.
    shutil.copy2(source, target)


def _damaged(folder: pathlib.Path, reason: str) -> str:
  other = other_step(folder, "checkpoint")
  return f"checkpoint={folder} is damaged ({reason}); take another, for example {other}"
