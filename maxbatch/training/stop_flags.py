"""A stop signal that one of several processes has heard, as an input of its step.

Schedulers send SIGTERM to all processes or to one, and never at the same step. Each process hands
its flag to every step, and the step returns the largest: all learn of it with the same step's
metrics, without a message of its own. A single process has no flags, and its program no input for
them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def has_flags(mesh: Mesh) -> bool:
  """Returns whether the devices belong to several processes."""
  return len({device.process_index for device in mesh.devices.flat}) > 1


def stop_flags(mesh: Mesh, heard: bool = False) -> jax.Array | None:
  """Returns this process's flag as an input of its step, up if it has heard a signal; None for one process.

  A step returns the largest flag: 0, or 1 + the number of a process that has heard a signal.
  """
  return _flags(mesh, heard) if has_flags(mesh) else None


def abstract_stop_flags(mesh: Mesh) -> jax.ShapeDtypeStruct | None:
  """Returns the shape of `stop_flags`, for devices that may not be here."""
  if not has_flags(mesh):
    return None
  return jax.ShapeDtypeStruct((mesh.size,), jnp.int32)


def stop_flags_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of `stop_flags`."""
  return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


@functools.cache
def _flags(mesh: Mesh, heard: bool) -> jax.Array:
  """Returns int32[devices of all processes]: this process's flag on each of its own."""
  mine = np.int32(1 + jax.process_index() if heard else 0)
  return jax.make_array_from_callback(
    (mesh.size,), stop_flags_sharding(mesh), lambda index: np.full(1, mine, np.int32)
  )
