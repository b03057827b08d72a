"""Checkpoints of parameters alone, written leaf by leaf; and any checkpoint, read likewise.

A checkpoint of parameters alone is what a conversion leaves: step 0, no optimizer state, and a record
that names neither data nor a plan. A run that has no other begins with its parameters.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxbatch.checkpoints.find import cause, record_of
from maxbatch.checkpoints.fingerprint import PartsOfArray, verified
from maxbatch.checkpoints.formats import format_named
from maxbatch.checkpoints.record import (
  ORIGIN,
  describe_leaves,
  fingerprint_version,
  format_name,
  sealed,
)
from maxbatch.checkpoints.tensor_files import StoredArray, StoredArrays, TensorSpec, write_tensors
from maxbatch.core.plan import Position
from maxbatch.errors import UserError


def write_parameters(
  folder: Path,
  specs: Sequence[TensorSpec],
  values: Iterator[np.ndarray],
  identity: Mapping[str, object],
  origin: Mapping[str, object],
) -> None:
  """Writes a checkpoint of parameters alone.

  Args:
    folder: of step 0, not there yet; under a temporary name, as nothing here makes it appear whole.
    specs: the leaves by name, each beginning with PARAMETERS.
    values: theirs in this order, in parts of which each belongs to one leaf.
    identity: the model's keys, which a run must share.

  Raises OSError: a file cannot be written.
  """
  state, record = folder / "state", folder / "record"
  state.mkdir(parents=True)
  record.mkdir()
  prints: dict[str, int] = {}
  write_tensors(state, specs, _noting_fingerprints(specs, values, prints))
  leaves = describe_leaves({spec.name: spec for spec in specs}, prints)
  more = {"identity": dict(identity), "settings": {}, "plan": {}, "notes": {ORIGIN: dict(origin)}}
  content = json.dumps(sealed(Position(0, 0), leaves, "safetensors", more))
  (record / "metadata").write_text(content, encoding="utf-8")


def _noting_fingerprints(
  specs: Sequence[TensorSpec], values: Iterator[np.ndarray], prints: dict[str, int]
) -> Iterator[np.ndarray]:
  for spec in specs:
    noted, left = PartsOfArray(), spec.nbytes // spec.dtype.itemsize
    while left:
      part = next(values)
      noted.add(part)
      left -= part.size
      prints[spec.name] = noted.fingerprint
      yield part
  assert next(values, None) is None


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
  """One checkpoint, of which the record has been read and no array."""

  folder: Path
  record: Mapping[str, Any]
  arrays: StoredArrays

  def __getitem__(self, name: str) -> StoredArray:
    try:
      result = self.arrays[name]
    except (OSError, ValueError, LookupError, UserError) as error:
      raise self._damaged(cause(error)) from error
    leaf = self.record["leaves"][name]
    if (list(result.shape), result.dtype.name) != (leaf["shape"], leaf["dtype"]):
      raise self._damaged(f"{name} is {result.dtype.name}{list(result.shape)}")
    return result

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    """Yields all of an array in parts along its first dim, compared with its fingerprint at the
    end. Raises UserError: it is damaged."""
    stored, saved = self[name], self.record["leaves"][name]["fingerprint"]
    differs = self._damaged(f"leaf {name} differs from its fingerprint")
    try:
      yield from verified(stored.blocks(), saved, fingerprint_version(self.record), differs)
    except (OSError, ValueError) as error:
      raise self._damaged(cause(error)) from error

  def _damaged(self, reason: str) -> UserError:
    return UserError(f"checkpoint={self.folder} is damaged ({reason}); take another one")


def open_checkpoint(folder: Path) -> StoredCheckpoint:
  """Opens a step's folder, to be read array by array. Raises UserError: that cannot be."""
  record = record_of(folder)
  if record is None:
    raise UserError(f"checkpoint={folder}: there is no checkpoint whose record can be read")
  name = format_name(record)
  stored = format_named(name).stored
  if stored is None:
    raise UserError(
      f"checkpoint={folder} was written with checkpoint_format={name}, whose arrays are not read one by "
      "one; resume the run with checkpoint_format=orbax, and take the checkpoint that it writes"
    )
  fingerprint_version(record)
  return StoredCheckpoint(folder, record, stored(folder / "state"))
