"""How a checkpoint's arrays are written and read, by name.

A format is a pair of Orbax `CheckpointArgs`, one to save and one to restore, each registered with a
handler of its own. So Orbax treats every format as its own: it writes under a temporary name, in
the background, on all processes, and keeps as many steps as it is asked to.

checkpoint_format=safetensors has arrays under the names of their leaves, in files that others read:
written while the run waits, and by one process, since what the arrays of several have in common is no
single file. What was written so can be read in parts, on any devices.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from maxbatch.checkpoints.tensor_files import (
  Index,
  StoredArray,
  StoredArrays,
  TensorFolder,
  TensorSpec,
  write_tensors,
)
from maxbatch.config.registry import registered
from maxbatch.errors import UserError


class _Handler(ocp.CheckpointHandler):
  def save(self, directory: Path, args: "SafetensorsSave") -> None:
    specs = [TensorSpec(name, x.shape, np.dtype(x.dtype)) for name, x in args.arrays.items()]
    write_tensors(Path(directory), specs, map(np.asarray, args.arrays.values()))

  def restore(self, directory: Path, args: "SafetensorsRestore") -> dict[str, jax.Array]:
    try:
      folder = TensorFolder(Path(directory))
      return {name: placed(folder, name, leaf) for name, leaf in args.arrays.items()}
    except UserError as error:  # A checkpoint that cannot be read is damaged; another may be there.
      raise ValueError(error) from error


@ocp.args.register_with_handler(_Handler, for_save=True)
@dataclasses.dataclass
class SafetensorsSave(ocp.args.CheckpointArgs):
  """What is saved."""

  arrays: dict[str, jax.Array]

  def __post_init__(self) -> None:
    """Raises UserError where several processes have the arrays in common."""
    if jax.process_count() > 1:
      raise UserError(
        f"checkpoint_format=safetensors is written by one process, and there are "
        f"{jax.process_count()}; use checkpoint_format=orbax"
      )


@ocp.args.register_with_handler(_Handler, for_restore=True)
@dataclasses.dataclass
class SafetensorsRestore(ocp.args.CheckpointArgs):
  """What is restored, and where it is to lie."""

  arrays: dict[str, jax.ShapeDtypeStruct]


def placed(arrays: StoredArrays, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns an array, each device's part of which is read for it."""
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


def whole_slices(index: Index | None, shape: tuple[int, ...]) -> Index:
  """Replaces None in an index of jax, which stands for an end or for all, by numbers."""
  index = index or (slice(None),) * len(shape)
  return tuple(slice(*each.indices(size)[:2]) for each, size in zip(index, shape, strict=True))


_BYTES_TOGETHER = 2**26
"""Larger arrays of stacked layers are stored layer by layer, so that one can be read by itself."""
_SMALLEST_CHUNK_BYTES = 2**21
"""Unless a device's part of a layer is smaller: pieces of half of that take half as long again."""
_SMALLEST_SHARE_BYTES = 2**22
"""Bytes of an array above which the devices that hold it write a share each."""


@functools.cache
def share_large_arrays_only() -> None:
  """Lets one device write a small array that others hold too, from now on.

  Orbax divides every such array among its devices, by a program for each shape and device: with 8
  devices that took 0.8 s at the first save of a small model, which is written in less.
  """
  handler = ocp.type_handlers.ArrayHandler(
    min_slice_bytes_for_replica_parallel=_SMALLEST_SHARE_BYTES
  )
  ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


@dataclasses.dataclass(frozen=True)
class Format:
  """What makes the arguments that Orbax is given for a step's arrays.

  A handler that cannot read what is there raises OSError or ValueError; the step then counts as
  damaged. It need not check values: their fingerprints are compared after every restore.
  """

  save: Callable[[dict[str, jax.Array]], Any]
  """Made from the arrays by leaf name, none of them empty."""
  restore: Callable[[dict[str, jax.ShapeDtypeStruct]], Any]
  """Made from the shapes, dtypes and shardings by leaf name; `restore` returns arrays."""
  stored: Callable[[pathlib.Path], StoredArrays] | None = None
  """Opens a step's folder of arrays, each to be read in parts; None: they are read all together."""


def _save_args(leaf: jax.Array) -> ocp.SaveArgs:
  if leaf.ndim < 3 or leaf.nbytes <= _BYTES_TOGETHER:
    return ocp.SaveArgs()
  chunk = leaf.sharding.shard_shape(leaf.shape)[1:]
  divides = math.prod(chunk) * leaf.dtype.itemsize >= _SMALLEST_CHUNK_BYTES
  return ocp.SaveArgs(shard_axes=(0,) if divides else ())


@dataclasses.dataclass(frozen=True)
class _OrbaxArrays:
  """The arrays of a folder that Orbax has written."""

  folder: pathlib.Path

  def __getitem__(self, name: str) -> StoredArray:
    kvstore = {"driver": "ocdbt", "base": f"file://{self.folder}/", "path": f"{name}/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
    chunk = array.chunk_layout.read_chunk.shape
    return StoredArray(
      shape=tuple(array.shape),
      dtype=array.dtype.numpy_dtype,
      rows_together=(chunk[0] if chunk else 0) or 1,
      read=lambda index: array[index].read().result(),
    )


FORMATS: dict[str, Format] = {
  "orbax": Format(
    lambda arrays: ocp.args.StandardSave(arrays, jax.tree.map(_save_args, arrays)),
    ocp.args.StandardRestore,
    _OrbaxArrays,
  ),
  "safetensors": Format(SafetensorsSave, SafetensorsRestore, TensorFolder),
}


def format_named(name: str) -> Format:
  """Returns the format that `checkpoint_format` names. Raises UserError for an unknown name."""
  return registered("checkpoint_format", name, FORMATS)
