"""Only the parameters of a checkpoint, without the optimizer's state, compared with what was saved."""

import pathlib

import jax
from jax.sharding import Mesh

from maxbatch.checkpoints import refusals
from maxbatch.checkpoints.fingerprint import named_leaves
from maxbatch.checkpoints.newest import completed_steps
from maxbatch.checkpoints.quiet_orbax import silence_orbax
from maxbatch.checkpoints.reading import read_arrays, read_record
from maxbatch.checkpoints.record import changed_leaves, format_name, state_differences
from maxbatch.checkpoints.several import DamagedError, lone_reader, together
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import sharding
from maxbatch.models.registry import Model, Parameters, by_path

_PARAMETERS = "params"
"""Their place in what a run saves (training/state.py)."""


def read_parameters(step_folder: pathlib.Path, model: Model, mesh: Mesh) -> Parameters:
  """The parameters of the checkpoint in `step_folder`, divided over a mesh as training divides them.

  Args:
    step_folder: of one step, named by its number.
    model: what they are the parameters of.
    mesh: of the devices here, whatever wrote them.

  Raises:
    UserError: the checkpoint is damaged, or has other parameters.
  """
  silence_orbax()
  try:
    return _read(step_folder, _placed(model, mesh))
  except DamagedError as damage:
    others = [step for step in completed_steps(step_folder.parent) if str(step) != step_folder.name]
    other = f"checkpoint={step_folder.parent / str(others[-1])}" if others else "one of another run"
    raise UserError(
      f"checkpoint={step_folder} is damaged ({damage}); take another, for example {other}"
    ) from None


def _placed(model: Model, mesh: Mesh) -> Parameters:
  """Shape, dtype and sharding of every parameter."""
  axes = model.axes()

  def place(path: tuple[str, ...], leaf: jax.Array) -> jax.ShapeDtypeStruct:
    where = sharding(axes[path], leaf.shape, mesh)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  return by_path(place, model.shapes())


def _read(step_folder: pathlib.Path, abstract: Parameters) -> Parameters:
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
