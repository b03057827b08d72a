"""checkpoint_format=safetensors: arrays under the names of their leaves, in files that others read.

Written while the run waits, and by one process: what the arrays of several have in common is no
single file. What was written so can be read in parts, on any devices.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxbatch.checkpoints.stored import Index
from maxbatch.checkpoints.tensor_files import TensorFolder, TensorSpec, write_tensors
from maxbatch.errors import UserError


class _Handler(ocp.CheckpointHandler):
  def save(self, directory: Path, args: "SafetensorsSave") -> None:
    specs = [
      TensorSpec(name, leaf.shape, np.dtype(leaf.dtype)) for name, leaf in args.arrays.items()
    ]
    write_tensors(Path(directory), specs, map(np.asarray, args.arrays.values()))

  def restore(self, directory: Path, args: "SafetensorsRestore") -> dict[str, jax.Array]:
    try:
      with TensorFolder(Path(directory)) as folder:
        return {name: _placed(folder, name, leaf) for name, leaf in args.arrays.items()}
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


def _placed(folder: TensorFolder, name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  stored = folder[name]
  if (stored.shape, stored.dtype) != (leaf.shape, leaf.dtype):
    raise ValueError(f"{name} is {stored.dtype}{list(stored.shape)}")
  assert leaf.sharding is not None

  def part(index: Index | None) -> np.ndarray:
    return stored.read(whole_slices(index, leaf.shape))

  return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def whole_slices(index: Index | None, shape: tuple[int, ...]) -> Index:
  """An index of jax, in which None stands for an end, or for all of it, with numbers."""
  index = index or (slice(None),) * len(shape)
  return tuple(slice(*each.indices(size)[:2]) for each, size in zip(index, shape, strict=True))
