"""Rows of whole documents over a token cache, as the pack index has put them together.

R rows, T tokens per row.
"""

import dataclasses
import itertools

import numpy as np

from maxbatch.data.dataset import Arrays
from maxbatch.data.pack_index import PackIndex
from maxbatch.data.token_cache import TokenCache


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """The rows of one cache and one index."""

  cache: TokenCache
  index: PackIndex
  pad_id: int
  segmented: bool
  """Whether rows say which tokens belong together; else a token sees all before it in the row."""

  def __len__(self) -> int:
    return self.index.packed.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    """The rows int[R] as new arrays, see `RowSource.rows`; the weight is 0 on padding, and
    where the data say so."""
    pieces, length = self.index.pieces(np.asarray(indices, np.int64)), self.index.layout.length
    shape = (len(indices), length)
    arrays = {
      "inputs": np.full(shape, self.pad_id, np.int32),
      "targets": np.full(shape, self.pad_id, np.int32),
      "weights": np.zeros(shape, np.float32),
    }
    if self.segmented:
      arrays["segment_ids"], arrays["positions"] = np.zeros((2, *shape), np.int32)
    columns_T = np.arange(length, dtype=np.int32)
    piece = iter(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True))
    for row, count in enumerate(pieces.counts.tolist()):
      begin = 0
      for number, (start, places) in enumerate(itertools.islice(piece, count), 1):
        window, here = self.cache.read(start, start + places + 1), slice(begin, begin + places)
        arrays["inputs"][row, here] = window[:-1]
        arrays["targets"][row, here] = window[1:]
        counted = self.cache.read_weights(start + 1, start + places + 1)
        arrays["weights"][row, here] = 1 if counted is None else counted
        if self.segmented:
          arrays["segment_ids"][row, here] = number
          arrays["positions"][row, here] = columns_T[:places]
        begin += places
    return arrays
