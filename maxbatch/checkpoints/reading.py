"""Reads the two items of a step's folder, or some arrays for a run that begins with them, verified.

What cannot be read is damage, and says why. Of a checkpoint whose arrays can be read one by one
nothing else is read, and of these each process reads what its own devices hold.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, NamedSharding

from maxbatch.checkpoints.find import (
  DamagedError,
  cause,
  lone_reader,
  other_step,
  record_of,
  refusal,
  root_cause,
  together,
)
from maxbatch.checkpoints.formats import format_named, placed
from maxbatch.checkpoints.record import changed_leaves, format_name, is_intact
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import gather
from maxbatch.hardware.copies import MemoryCopies

_Read = TypeVar("_Read")
_PAUSES_SECONDS = (0.2, 1.0, 5.0)
"""After each refusal of the file system to read, before the next attempt; the last one ends it."""

# What Orbax and TensorStore raise for folders they cannot read. JaxRuntimeError (out of memory) is
# not among them: it says nothing about the folder.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_UNREADABLE += (RecursionError,)


def patiently(directory: pathlib.Path, step: int, read: Callable[[], _Read]) -> _Read:
  """Returns what `read` returns of a step, which is damaged if that fails twice while its files can
  be read. Raises DamagedError: it is; UserError: the files stay unreadable."""
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
      raise UserError(
        f"checkpoint step {step} cannot be read: {refused}, after {len(_PAUSES_SECONDS) + 1} "
        "attempts; it is not known to be damaged, so it is kept. Start again when the disk "
        "or the network works; to resume from an older step instead, move "
        f"{directory / str(step)} elsewhere."
      )
    time.sleep(pause)


def read_record(reader: ocp.CheckpointManager, step: int) -> dict[str, Any]:
  """Reads a step's record. Raises DamagedError: it cannot be read, was changed, or is another's."""
  record = _read(reader, step, "record", ocp.args.JsonRestore())
  if not is_intact(record):
    raise DamagedError("its record differs from its checksum")
  if record["step"] != step:
    raise DamagedError(f"its record is that of step {record['step']}")
  return record


def read_arrays(
  reader: ocp.CheckpointManager, step: int, written_as: str, wanted: dict[str, Any]
) -> dict[str, jax.Array]:
  """Reads the arrays of a step, without checking that they are those that were saved.

  Args:
    wanted: ShapeDtypeStructs by leaf name; without a sharding: the first device.

  Raises DamagedError: they cannot be read.
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


def read_copy_record(copies: MemoryCopies) -> dict[str, Any]:
  """Reads the record of the copy in memory. Raises DamagedError: it cannot be read, or was changed."""
  try:
    record = copies.record()
  except OSError as error:
    raise DamagedError(str(error)) from None
  if not is_intact(record):
    raise DamagedError("its record differs from its checksum")
  return record


def read_copy(copies: MemoryCopies, wanted: dict[str, Any]) -> dict[str, jax.Array]:
  """Reads the arrays of the copy in memory, each process those of its devices, as `read_arrays` does."""

  def read(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
      return copies.read(name, index or (), leaf.shape, leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

  try:
    return {name: read(name, _on_devices(leaf)) for name, leaf in wanted.items()}
  except OSError as error:
    raise DamagedError(f"its state cannot be read: {cause(error)}") from None


def write_copy(
  copies: MemoryCopies,
  make_record: Callable[[], dict[str, Any]],
  leaves: Mapping[str, jax.Array],
  step_seconds: float,
) -> dict[str, Any]:
  """Writes a copy of the state to memory, and chooses when the next one is due; all processes call it.

  Args:
    copies: of this process.
    make_record: returns the record of the state.
    leaves: its arrays.
    step_seconds: how long a step takes.

  Returns: What is noted of it: seconds, bytes of all processes, and the steps until the next one.

  Raises UserError: a host has too little memory.
  """
  began, record, failure, size = time.perf_counter(), make_record(), "", 0
  try:
    copies.await_sent()
    gather(None)  # From here on the copy before the last is needed by nobody.
    size = copies.write(record, leaves)
  except OSError as error:
    failure = (
      f"state_copy_period: the copy of step {record['step']} does not fit into memory: {error}"
    )
  results = gather([time.perf_counter() - began, step_seconds, size, failure])
  if failures := [each[3] for each in results if each[3]]:
    raise UserError(failures[0])
  seconds, step = (max(each[number] for each in results) for number in (0, 1))
  copies.plan_next(record["step"], seconds, step)
  steps = copies.next_step - record["step"]
  return {"seconds": seconds, "bytes": sum(each[2] for each in results), "next_after_steps": steps}


def check_leaves(record: dict[str, Any], arrays: object) -> None:
  """Compares arrays with their fingerprints. Raises DamagedError if they are not what was saved."""
  if wrong := changed_leaves(record, arrays):
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise DamagedError(f"leaf {wrong[0]}{others} differs from its fingerprint")


def difference_on_disk(reader: ocp.CheckpointManager, step: int) -> str:
  """Reads a whole step into the host's memory, that of the devices may be full; says what is damaged."""
  host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  try:
    record = read_record(reader, step)
    wanted = {
      name: jax.ShapeDtypeStruct(leaf["shape"], jnp.dtype(leaf["dtype"]), sharding=host)
      for name, leaf in record["leaves"].items()
    }
    check_leaves(record, read_arrays(reader, step, format_name(record), wanted))
  except DamagedError as damage:
    return str(damage)
  return ""


def _read(
  reader: ocp.CheckpointManager, step: int, item: str, args: ocp.args.CheckpointArgs
) -> Any:
  try:
    return reader.restore(step, args=ocp.args.Composite(**{item: args}))[item]
  except Exception as error:
    # Orbax wraps what it meets in a chunk into a plain Exception: the cause says which.
    root = root_cause(error)
    if not isinstance(root, _UNREADABLE):
      raise
    raise DamagedError(f"its {item} cannot be read: {cause(root)}") from None


def _on_devices(leaf: Any) -> jax.ShapeDtypeStruct:
  """Returns `leaf` with a sharding on real devices; a mistake in it must not look like a damaged
  file."""
  if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, AbstractMesh):
    raise TypeError(f"The sharding {leaf.sharding} of a restored leaf names no devices.")
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


Leaves = dict[str, jax.Array]
"""Arrays by the names that a checkpoint has for them."""
Wanted = Mapping[str, jax.ShapeDtypeStruct]
"""Shapes, dtypes and shardings by these names."""


def read_step_record(key: str, folder: pathlib.Path) -> dict[str, Any]:
  """Reads the record of the step's folder that `key` names. Raises UserError: it is damaged."""
  record = record_of(folder)
  if record is None:
    raise UserError(damaged(key, folder, "its record cannot be read, or is not what was written"))
  return record


def read_leaves(key: str, folder: pathlib.Path, record: dict[str, Any], wanted: Wanted) -> Leaves:
  """Reads some arrays of a step, and compares them with their fingerprints.

  All processes must call it, each with the parts of its own devices.

  Args:
    wanted: what is read; cast where the checkpoint has another dtype, one array at a time.

  Raises UserError: the checkpoint is damaged, or the file system refuses to read it.
  """
  dtypes = {name: jnp.dtype(record["leaves"][name]["dtype"]) for name in wanted}
  alike = {name: leaf for name, leaf in wanted.items() if leaf.dtype == dtypes[name]}
  result = _verified(key, folder, record, alike) if alike else {}
  for name, leaf in wanted.items():
    if name not in alike:
      stored = jax.ShapeDtypeStruct(leaf.shape, dtypes[name], sharding=leaf.sharding)
      result |= cast(_verified(key, folder, record, {name: stored}), {name: leaf})
  return {name: result[name] for name in wanted}


def cast(arrays: Leaves, wanted: Wanted) -> Leaves:
  """Casts arrays to the wanted dtypes, on the devices that hold them."""
  return {
    name: array if array.dtype == wanted[name].dtype else _cast(array, wanted[name].dtype)
    for name, array in arrays.items()
  }


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _cast(array: jax.Array, dtype: Any) -> jax.Array:
  return array.astype(dtype)


def damaged(key: str, folder: pathlib.Path, reason: str) -> str:
  """Says that a checkpoint is not what was saved, and what to take instead."""
  return (
    f"{key}={folder} is damaged ({reason}); take another, for example {other_step(folder, key)}"
  )


def _verified(key: str, folder: pathlib.Path, record: dict[str, Any], wanted: Wanted) -> Leaves:
  def read() -> Leaves:
    arrays = together(lambda: _read_some(folder, record, wanted))
    check_leaves(record, arrays)
    return arrays

  try:
    return patiently(folder.parent, int(folder.name), read)
  except DamagedError as damage:
    raise UserError(damaged(key, folder, str(damage))) from None


def _read_some(folder: pathlib.Path, record: dict[str, Any], wanted: Wanted) -> Leaves:
  name = format_name(record)
  stored = format_named(name).stored
  if stored is None:
    return read_arrays(lone_reader(folder.parent), int(folder.name), name, dict(wanted))
  try:
    arrays = stored(folder / "state")
    return {name: placed(arrays, name, leaf) for name, leaf in wanted.items()}
  except (OSError, ValueError, LookupError, UserError) as error:
    raise DamagedError(f"its state cannot be read: {cause(error)}") from None
