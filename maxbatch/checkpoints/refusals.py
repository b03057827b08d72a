"""Why a run does not resume, and what to do, in words."""

import pathlib
from collections.abc import Mapping, Sequence

from maxbatch.checkpoints.record import listed


def changed_resume(directory: pathlib.Path, step: int, changed: Sequence[str]) -> str:
  """Other keys or data than those that the checkpoint was written with."""
  return (
    f"This run differs from the one that wrote checkpoint step {step} in {directory}:\n"
    + listed(changed)
    + "\nSet these values back, choose another run_name, or resume anyway with"
    " allow_changed_resume=true."
  )


def unreadable(directory: pathlib.Path, step: int, refused: str | None, attempts: int) -> str:
  """A checkpoint that cannot be read now, and of which nothing says that it is damaged."""
  return (
    f"checkpoint step {step} cannot be read: {refused}, after {attempts} attempts; "
    "nothing says that it is damaged, so it stays as it is. Start again when the disk or the "
    "network works; to resume from an older step instead, move "
    f"{directory / str(step)} elsewhere."
  )


def does_not_fit(directory: pathlib.Path, step: int, misfits: Sequence[str]) -> str:
  """Arrays of other names or shapes."""
  return (
    f"The state of this run has other arrays than checkpoint step {step} in {directory}:\n"
    + listed(misfits)
    + "\nModel and optimizer must have the shapes of the checkpoint (config.yml beside the"
    " checkpoints has its settings); set them back, or choose another run_name."
  )


def nothing_verifies(directory: pathlib.Path, damaged: Mapping[int, str]) -> str:
  """No checkpoint is left: damage by step."""
  return (
    f"No checkpoint in {directory} can be used:\n"
    + listed([f"step {step}: {reason}" for step, reason in damaged.items()])
    + "\nRestore the folder from a backup, choose another run_name, or remove the folder to"
    " start again from the beginning."
  )
