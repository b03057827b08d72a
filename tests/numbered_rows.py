"""Rows that show which they are, for tests of what is read and sent."""

import dataclasses

import numpy as np

from maxbatch.data.rows import Arrays


@dataclasses.dataclass(frozen=True)
class NumberedRows:
  """Row i holds numbers that follow from i, others in every array."""

  num_rows: int = 37
  length: int = 4

  def __len__(self) -> int:
    return self.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    """See `RowSource.rows`."""
    numbers = np.asarray(indices, np.int32)[:, None] * 100 + np.arange(self.length, dtype=np.int32)
    arrays = {
      name: numbers * 5 + place
      for place, name in enumerate(("inputs", "targets", "segment_ids", "positions"))
    }
    return arrays | {"weights": (numbers % 3 > 0).astype(np.float32)}
