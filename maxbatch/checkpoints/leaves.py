"""Some arrays of a checkpoint, for a run that begins with them: read into their places, verified.

Of a checkpoint whose arrays can be read one by one nothing else is read, and of these each process
reads what its own devices hold.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.checkpoints.faults import cause
from maxbatch.checkpoints.find import other_step
from maxbatch.checkpoints.formats import format_named
from maxbatch.checkpoints.newest import record_of
from maxbatch.checkpoints.reading import patiently, read_arrays
from maxbatch.checkpoints.record import changed_leaves, format_name
from maxbatch.checkpoints.safetensors_format import whole_slices
from maxbatch.checkpoints.several import DamagedError, lone_reader, together
from maxbatch.checkpoints.stored import Index, StoredArrays
from maxbatch.errors import UserError

Leaves = dict[str, jax.Array]
"""Arrays by the names that a checkpoint has for them."""
Wanted = Mapping[str, jax.ShapeDtypeStruct]
"""Shapes, dtypes and shardings by these names."""


def read_step_record(key: str, folder: pathlib.Path) -> dict[str, Any]:
  """The record of the step's folder that `key` names.

  Raises:
    UserError: it cannot be read, or is not what was written.
  """
  record = record_of(folder)
  if record is None:
    raise UserError(damaged(key, folder, "its record cannot be read, or is not what was written"))
  return record


def read_leaves(key: str, folder: pathlib.Path, record: dict[str, Any], wanted: Wanted) -> Leaves:
  """Some arrays of a step, compared with their fingerprints.

  All processes must call it, each with the parts of its own devices.

  Args:
    key: the key that names the folder, for messages.
    folder: of the step.
    record: that of the step.
    wanted: what is read; cast where the checkpoint has another dtype, one array at a time.

  Raises:
    UserError: the checkpoint is damaged, or the file system refuses to read it.
  """
  dtypes = {name: jnp.dtype(record["leaves"][name]["dtype"]) for name in wanted}
  alike = {name: leaf for name, leaf in wanted.items() if leaf.dtype == dtypes[name]}
  found = _verified(key, folder, record, alike) if alike else {}
  for name, leaf in wanted.items():
    if name not in alike:
      stored = jax.ShapeDtypeStruct(leaf.shape, dtypes[name], sharding=leaf.sharding)
      found |= cast(_verified(key, folder, record, {name: stored}), {name: leaf})
  return {name: found[name] for name in wanted}


def cast(arrays: Leaves, wanted: Wanted) -> Leaves:
  """Arrays in the wanted dtypes, where they lie."""
  return {
    name: array if array.dtype == wanted[name].dtype else _cast(array, wanted[name].dtype)
    for name, array in arrays.items()
  }


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _cast(array: jax.Array, dtype: Any) -> jax.Array:
  return array.astype(dtype)


def damaged(key: str, folder: pathlib.Path, reason: str) -> str:
  """A checkpoint that is not what was saved, and what to take instead."""
  return (
    f"{key}={folder} is damaged ({reason}); take another, for example {other_step(folder, key)}"
  )


def _verified(key: str, folder: pathlib.Path, record: dict[str, Any], wanted: Wanted) -> Leaves:
  def read() -> Leaves:
    arrays = together(lambda: _read(folder, record, wanted))
    if wrong := changed_leaves(record, arrays):
      others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
      raise DamagedError(f"leaf {wrong[0]}{others} differs from its fingerprint")
    return arrays

  try:
    return patiently(folder.parent, int(folder.name), read)
  except DamagedError as damage:
    raise UserError(damaged(key, folder, str(damage))) from None


def _read(folder: pathlib.Path, record: dict[str, Any], wanted: Wanted) -> Leaves:
  name = format_name(record)
  stored = format_named(name).stored
  if stored is None:
    return read_arrays(lone_reader(folder.parent), int(folder.name), name, dict(wanted))
  try:
    arrays = stored(folder / "state")
    return {name: _placed(arrays, name, leaf) for name, leaf in wanted.items()}
  except (OSError, ValueError, LookupError, UserError) as error:
    raise DamagedError(f"its state cannot be read: {cause(error)}") from None


def _placed(arrays: StoredArrays, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  """An array, of which each device's part is read for it."""
  if not leaf.size:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
  array = arrays[name]
  if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
    raise ValueError(f"{name} is {array.dtype}{list(array.shape)}")

  @functools.cache
  def read(starts_and_stops: tuple[tuple[int, int], ...]) -> np.ndarray:
    return array.read(tuple(slice(*each) for each in starts_and_stops))

  def part(index: Index | None) -> np.ndarray:
    # jax asks once for each device, also where several hold the same.
    whole = whole_slices(index, leaf.shape)
    return read(tuple((each.start, each.stop) for each in whole))

  return jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)
