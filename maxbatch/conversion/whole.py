"""The parameters of a checkpoint as a model without adapters has them, wherever they are.

Frozen parameters that the checkpoint does not hold are read where its record says, and adapters are
added to the matrices beside them: W + scale · A·B, in float32 and rounded once.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxbatch.checkpoints.fingerprint import verified
from maxbatch.checkpoints.parameters_only import StoredCheckpoint, open_checkpoint
from maxbatch.checkpoints.record import PARAMETERS
from maxbatch.checkpoints.tensor_files import Index, StoredArray
from maxbatch.config.schema import Config
from maxbatch.conversion.reading import FolderReader, reader_of
from maxbatch.conversion.source import FROZEN, frozen_folder
from maxbatch.errors import UserError
from maxbatch.hugging_face.registry import is_model_folder
from maxbatch.models import lora
from maxbatch.models.lora import ADAPTER
from maxbatch.models.registry import build_model


class WholeCheckpoint:
  """A checkpoint as `StoredCheckpoint` offers it, with all parameters of a model without adapters."""

  def __init__(self, checkpoint: StoredCheckpoint, base: "_Elsewhere | None", config: Config):
    """Takes as `base` the frozen parameters that it lacks, and the configuration of its run."""
    self.folder = checkpoint.folder
    self._own, self._base, self._config = checkpoint, base, config.model
    elsewhere = base.leaves if base else {}
    leaves = {**checkpoint.record["leaves"], **elsewhere}
    self._adapters = {name for name in leaves if name.endswith(ADAPTER)}
    kept = {name: leaf for name, leaf in leaves.items() if name not in self._adapters}
    self.record: Mapping[str, Any] = {**checkpoint.record, "leaves": kept}

  def __getitem__(self, name: str) -> StoredArray:
    """Returns one array, still on disk, without what adapters add to it."""
    return self._holder(name)[name]

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    """Yields all of an array in parts along its first dim, verified, with what adapters add to it.
    Raises UserError: it is damaged."""
    blocks = self._holder(name).blocks(name)
    beside = [f"{name.rpartition('/')[0]}/{each}" for each in ADAPTER]
    if not name.endswith("/kernel") or beside[0] not in self._adapters:
      yield from blocks
      return
    yield from self._merged(blocks, self[name].shape, *map(self.whole, beside))

  def whole(self, name: str) -> np.ndarray:
    return np.concatenate([np.atleast_1d(block) for block in self.blocks(name)])

  def _holder(self, name: str) -> "StoredCheckpoint | _Elsewhere":
    base = self._base
    return base if base is not None and name in base.leaves else self._own

  def _merged(
    self, blocks: Iterator[np.ndarray], shape: tuple[int, ...], a: np.ndarray, b: np.ndarray
  ) -> Iterator[np.ndarray]:
    """Yields blocks of a kernel (*lead, *in, *out) with those of A (*lead, *in, R) and B (*lead, R,
    *out) added."""
    rank, lead = a.shape[-1], a.ndim + b.ndim - 2 - len(shape)
    factor, first = np.float32(lora.scale(self._config)), 0
    for block in blocks:
      part = slice(first, first + len(block))
      first = part.stop
      # Parts are along the layers where they are stacked, else along the inputs.
      factors = (a[part], b[part]) if lead else (a[part], b)
      rows = factors[0].reshape(*factors[0].shape[:lead], -1, rank)
      columns = factors[1].reshape(*factors[1].shape[:lead], rank, -1)
      added = (rows @ columns).reshape(block.shape)
      yield (block.astype(np.float32) + factor * added).astype(block.dtype)


class _Elsewhere:
  """Frozen parameters that are in another folder, in the dtype that their run has them in."""

  def __init__(self, note: Mapping[str, Any], held: "WholeCheckpoint | FolderReader", where: Path):
    self.leaves = {PARAMETERS + name: leaf for name, leaf in note["leaves"].items()}
    self._held, self._where, self._version = held, where, note["fingerprint_version"]

  def __getitem__(self, name: str) -> StoredArray:
    leaf = self.leaves[name]
    shape, dtype = tuple(leaf["shape"]), np.dtype(jnp.dtype(leaf["dtype"]))

    def read(index: Index) -> np.ndarray:
      if isinstance(self._held, FolderReader):
        path = tuple(name.removeprefix(PARAMETERS).split("/"))
        return self._held.read(path, index, dtype)
      return self._held[name].read(index).astype(dtype, copy=False)

    together = 1 if isinstance(self._held, FolderReader) else self._held[name].rows_together
    return StoredArray(shape, dtype, together, read)

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    """Yields blocks as a checkpoint does, verified by the fingerprints that the run has noted."""
    differs = UserError(
      f"{self._where} does not hold the frozen parameters that the run began with: {name} differs "
      "from its fingerprint; put the folder back as it was"
    )
    return verified(self[name].blocks(), self.leaves[name]["fingerprint"], self._version, differs)


def whole_checkpoint(step: Path, config: Config) -> WholeCheckpoint:
  """Opens a step's folder, with the frozen parameters that are elsewhere. Raises UserError: there
  is no checkpoint that can be read so, or what it rests on is gone."""
  checkpoint = open_checkpoint(step)
  note = checkpoint.record.get("notes", {}).get(FROZEN)
  if note is None:
    return WholeCheckpoint(checkpoint, None, config)
  folder = frozen_folder(note, step.parent.parent)
  if not is_model_folder(folder):
    base = whole_checkpoint(folder, config)
    return WholeCheckpoint(checkpoint, _Elsewhere(note, base, folder), config)
  model = build_model(lora.without_adapters(config.model), config.batch.max_target_length)
  reader = reader_of(folder, model)
  return WholeCheckpoint(checkpoint, _Elsewhere(note, reader, folder), config)
