"""Rows of whole documents over a token cache, as the pack index has put them together.

R rows, T tokens per row, P pieces of the rows asked for, N tokens of these pieces.
"""

import dataclasses

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
    """The rows int[R] as new arrays, see `RowSource.rows`; the weight is 0 on padding alone."""
    pieces, length = self.index.pieces(np.asarray(indices, np.int64)), self.index.layout.length
    counts_P = pieces.lengths.astype(np.int64)
    first_P = np.cumsum(counts_P) - counts_P
    # The number of each piece within its row, and where it begins there.
    first_piece_R = np.cumsum(pieces.counts) - pieces.counts
    row_P = np.repeat(np.arange(len(indices)), pieces.counts)
    number_P = np.arange(len(row_P)) - first_piece_R[row_P]
    column_P = first_P - first_P[first_piece_R[row_P]]
    within_N = np.arange(counts_P.sum()) - np.repeat(first_P, counts_P)
    places_N = np.repeat(row_P * length + column_P, counts_P) + within_N
    tokens_N = np.repeat(pieces.starts, counts_P) + within_N

    def placed(values: np.ndarray | float, filler: float, dtype: type) -> np.ndarray:
      array_RT = np.full((len(indices), length), filler, dtype)
      array_RT.reshape(-1)[places_N] = values
      return array_RT

    tokens = self.cache.tokens
    arrays = {
      "inputs": placed(tokens[tokens_N], self.pad_id, np.int32),
      "targets": placed(tokens[tokens_N + 1], self.pad_id, np.int32),
      "weights": placed(1.0, 0.0, np.float32),
    }
    if self.segmented:
      arrays["segment_ids"] = placed(np.repeat(number_P + 1, counts_P), 0, np.int32)
      arrays["positions"] = placed(within_N, 0, np.int32)
    return arrays
