"""A stop signal that one of several processes has heard, as an input of its step.

Schedulers send SIGTERM to all processes or to one, and never at the same step. Each process hands
its flag to every step, and the step returns the largest: all learn of it with the same step's
metrics, without a message of its own. A single process has no flags, and its program no input for
them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.hardware.sharding import MESH_AXES, replicated


def has_flags(mesh: Mesh) -> bool:
  """Returns whether the devices belong to several processes."""
  return len({device.process_index for device in mesh.devices.flat}) > 1


def flagged(mesh: Mesh, control: Any, heard: bool = False) -> Any:
  """A step's control input with this process's flag, which is up if it has heard a signal."""
  return (control, _flags(mesh, heard)) if has_flags(mesh) else control


def abstract_flagged(mesh: Mesh, control: Any) -> Any:
  """Returns the shapes of `flagged`, for devices that may not be here."""
  flags = jax.ShapeDtypeStruct((mesh.size,), jnp.int32)
  return (control, flags) if has_flags(mesh) else control


def flagged_shardings(mesh: Mesh) -> Any:
  """The shardings of `flagged`: the control input is on all devices, the flags are divided."""
  return (replicated(mesh), _sharding(mesh)) if has_flags(mesh) else replicated(mesh)


def unflagged(mesh: Mesh, control: Any) -> tuple[Any, jax.Array | None]:
  """In a step, what `flagged` was made of: the control input, and the largest flag: int32.

  The flag is 0, or 1 + the number of a process that has heard a signal.
  """
  if not has_flags(mesh):
    return control, None
  control, flags = control
  return control, flags.max()


@functools.cache
def _flags(mesh: Mesh, heard: bool) -> jax.Array:
  """int32[devices of all processes]: this process's flag on each of its own."""
  mine = np.int32(1 + jax.process_index() if heard else 0)
  return jax.make_array_from_callback(
    (mesh.size,), _sharding(mesh), lambda index: np.full(1, mine, np.int32)
  )


def _sharding(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(MESH_AXES))
