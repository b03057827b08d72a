"""Reads the two items of a step's folder; what cannot be read is damage, and says why."""

import pathlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, NamedSharding

from maxbatch.checkpoints import refusals
from maxbatch.checkpoints.faults import cause, refusal, root_cause
from maxbatch.checkpoints.formats import format_named
from maxbatch.checkpoints.record import is_intact
from maxbatch.checkpoints.several import DamagedError
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import gather

_Read = TypeVar("_Read")
_PAUSES_SECONDS = (0.2, 1.0, 5.0)
"""After each refusal of the file system to read, before the next attempt; the last one ends it."""

# What Orbax and TensorStore raise for folders they cannot read. JaxRuntimeError (out of memory) is
# not among them: it says nothing about the folder.
_UNREADABLE = (
  OSError,
  ValueError,
  LookupError,
  TypeError,
  AttributeError,
  AssertionError,
  RecursionError,
)


def patiently(directory: pathlib.Path, step: int, read: Callable[[], _Read]) -> _Read:
  """What `read` returns of a step, which is damaged only if that fails twice while all of its files
  can be read.

  Raises:
    DamagedError: it is.
    UserError: the file system refuses to read the files, again and again.
  """
  pauses, readable = iter(_PAUSES_SECONDS), False
  while True:
    try:
      return read()
    except DamagedError:
      refused = next(filter(None, gather(refusal(directory / str(step)))), None)
      if readable and refused is None:
        raise
      readable = refused is None
    pause = 0.0 if readable else next(pauses, None)
    if pause is None:
      raise UserError(refusals.unreadable(directory, step, refused, len(_PAUSES_SECONDS) + 1))
    time.sleep(pause)


def read_record(reader: ocp.CheckpointManager, step: int) -> dict[str, Any]:
  """The record of a step, as it was written.

  Raises:
    DamagedError: it cannot be read, was changed, or is another step's.
  """
  record = _read(reader, step, "record", ocp.args.JsonRestore())
  if not is_intact(record):
    raise DamagedError("its record differs from its checksum")
  if record["step"] != step:
    raise DamagedError(f"its record is that of step {record['step']}")
  return record


def read_arrays(
  reader: ocp.CheckpointManager, step: int, written_as: str, wanted: dict[str, Any]
) -> dict[str, jax.Array]:
  """The arrays of a step; whether they are those that were saved is not looked at.

  Args:
    reader: of the folder of all steps.
    step: which one.
    written_as: the checkpoint_format of its record.
    wanted: ShapeDtypeStructs by leaf name; without a sharding: the first device.

  Raises:
    DamagedError: they cannot be read.
  """
  targets = {name: _on_devices(leaf) for name, leaf in wanted.items()}
  stored = {name: target for name, target in targets.items() if target.size}
  arrays = _read(reader, step, "state", format_named(written_as).restore(stored))
  return {
    # Orbax refuses arrays without elements; there is nothing in them to save.
    name: arrays[name]
    if target.size
    else jnp.zeros(target.shape, target.dtype, device=target.sharding)
    for name, target in targets.items()
  }


def _read(
  reader: ocp.CheckpointManager, step: int, item: str, args: ocp.args.CheckpointArgs
) -> Any:
  """One item of a step's folder, or DamagedError."""
  try:
    return reader.restore(step, args=ocp.args.Composite(**{item: args}))[item]
  except Exception as error:
    # Orbax wraps what it meets in a chunk into a plain Exception: the cause says which.
    root = root_cause(error)
    if not isinstance(root, _UNREADABLE):
      raise
    raise DamagedError(f"its {item} cannot be read: {cause(root)}") from None


def _on_devices(leaf: Any) -> jax.ShapeDtypeStruct:
  """`leaf` with a sharding on real devices; a mistake in it must not look like a damaged file."""
  if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, AbstractMesh):
    raise TypeError(f"The sharding {leaf.sharding} of a restored leaf names no devices.")
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
