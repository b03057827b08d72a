"""Rows of whole documents over a token cache, as the pack index has put them together.

R rows, T tokens per row, P pieces of documents in these rows.
"""

import dataclasses

import numpy as np

from maxbatch.data.dataset import Arrays
from maxbatch.data.pack_index import PackIndex
from maxbatch.data.segments import clear_padding, segments
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
    pieces = self.index.pieces(np.asarray(indices, np.int64))
    shape_RT = (len(indices), self.index.layout.length)
    starts_P, lengths_P = pieces.starts, pieces.lengths
    rows_P = np.repeat(np.arange(len(indices)), pieces.counts)
    filled_R = np.bincount(rows_P, lengths_P, len(indices)).astype(np.int64)
    # Without padding pieces would lie one after the other.
    padding_R = shape_RT[1] - filled_R
    places_P = np.cumsum(lengths_P) - lengths_P + (np.cumsum(padding_R) - padding_R)[rows_P]
    arrays = {
      "inputs": np.full(shape_RT, self.pad_id, np.int32),
      "targets": np.full(shape_RT, self.pad_id, np.int32),
      "weights": np.ones(shape_RT, np.float32),
    }
    self.cache.copy_tokens(starts_P, lengths_P, arrays["inputs"], places_P)
    self.cache.copy_tokens(starts_P + 1, lengths_P, arrays["targets"], places_P)
    self.cache.copy_weights(starts_P + 1, lengths_P, arrays["weights"], places_P)
    clear_padding(arrays["weights"], filled_R)
    if self.segmented:
      begins_RT = np.zeros(shape_RT, bool)
      begins_RT.reshape(-1)[places_P] = True
      arrays["segment_ids"], arrays["positions"] = segments(begins_RT, filled_R)
    return arrays
