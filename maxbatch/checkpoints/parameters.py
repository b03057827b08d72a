"""Only the parameters of a checkpoint, without the optimizer's state, compared with what was saved."""

import pathlib
from typing import Any

import jax

from maxbatch.checkpoints import refusals
from maxbatch.checkpoints.fingerprint import named_leaves
from maxbatch.checkpoints.newest import completed_steps
from maxbatch.checkpoints.quiet_orbax import silence_orbax
from maxbatch.checkpoints.reading import read_arrays, read_record
from maxbatch.checkpoints.record import changed_leaves, format_name, state_differences
from maxbatch.checkpoints.several import DamagedError, lone_reader, together
from maxbatch.errors import UserError

_PARAMETERS = "params"
"""Their place in what a run saves (training/state.py)."""


def read_parameters(step_folder: pathlib.Path, abstract: Any) -> Any:
  """The parameters of the checkpoint in `step_folder`.

  Args:
    step_folder: of one step, named by its number.
    abstract: their tree, of ShapeDtypeStructs with the shardings that they are to have.

  Raises:
    UserError: the checkpoint is damaged, or has other parameters.
  """
  silence_orbax()
  try:
    return _read(step_folder, abstract)
  except DamagedError as damage:
    others = [step for step in completed_steps(step_folder.parent) if str(step) != step_folder.name]
    other = f"checkpoint={step_folder.parent / str(others[-1])}" if others else "one of another run"
    raise UserError(
      f"checkpoint={step_folder} is damaged ({damage}); take another, for example {other}"
    ) from None


def _read(step_folder: pathlib.Path, abstract: Any) -> Any:
  wanted = named_leaves({_PARAMETERS: abstract})
  step = int(step_folder.name)
  with lone_reader(step_folder.parent) as reader:
    record = together(lambda: read_record(reader, step))
    saved = {
      name: leaf for name, leaf in record["leaves"].items() if name.startswith(f"{_PARAMETERS}/")
    }
    if misfits := state_differences(record | {"leaves": saved}, wanted):
      raise UserError(refusals.does_not_fit(step_folder.parent, step, misfits))
    arrays = together(lambda: read_arrays(reader, step, format_name(record), wanted, is_all=False))
  if wrong := changed_leaves(record, arrays):
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise DamagedError(f"leaf {wrong[0]}{others} differs from its fingerprint")
  return jax.tree.unflatten(jax.tree.structure(abstract), list(arrays.values()))
