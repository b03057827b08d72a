"""What every dataset offers: rows addressed by number, for training and for validation."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

Arrays = dict[str, np.ndarray]
"""Rows on the host, with the field names of `maxbatch.data.rows.Rows`."""


class RowSource(Protocol):
  """Rows addressed by number. Pickled to worker processes, so it holds no tokens itself."""

  def __len__(self) -> int:
    """Returns the number of rows."""
    ...

  def rows(self, indices: np.ndarray) -> Arrays:
    """Returns the rows int[R] as new arrays: inputs, targets int32[R, T], weights float32[R, T],
    and segment_ids, positions int32[R, T] when the rows are packed.

    Of no indices it opens no file: a process that others read for asks for no more.
    """
    ...


@dataclasses.dataclass(frozen=True)
class FirstRows:
  """The first `count` rows of a source, or all if it has fewer."""

  source: RowSource
  count: int

  def __len__(self) -> int:
    return min(self.count, len(self.source))

  def rows(self, indices: np.ndarray) -> Arrays:
    return self.source.rows(indices)


@dataclasses.dataclass(frozen=True)
class SourceRows:
  """Rows of one source of a mixture."""

  name: str
  share: float
  """Share in the loss of the whole."""
  rows: RowSource


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A named dataset, ready to read."""

  train: RowSource
  validation: RowSource | None
  """None: nothing is kept for validation."""
  fingerprint: str
  """Equal exactly when the training tokens are equal; a resume compares it."""
  description: str
  """What was found, in a line or two for the person who starts the run."""
  validation_fingerprint: str = ""
  """Likewise, of the validation tokens."""
  train_files: Mapping[str, int] = dataclasses.field(default_factory=dict)
  """Bytes of every file, by name: what a refused resume names beside fingerprints."""
  validation_files: Mapping[str, int] = dataclasses.field(default_factory=dict)
  tokenizer_version: str = ""
  """Version of the tokenizer that made the ids; changes with the contents of its vocabulary."""
  num_skipped_records: int = 0
  """Bad records among those to train on, which max_bad_records lets pass."""
  validation_by_source: tuple[SourceRows, ...] = ()
  """The validation rows of a mixture by source, where each has its own."""
