"""Fixed windows over a token cache: row i is a place in the file, so any row can be read first.

R rows, T tokens per row, S = T + 1. A window has T+1 tokens and starts T after the one before, so that every
token but the first is a target exactly once; the last window is padded and nothing is dropped.
"""

import dataclasses

import numpy as np

from maxbatch.data.dataset import Arrays
from maxbatch.data.token_cache import TokenCache


@dataclasses.dataclass(frozen=True)
class TokenWindows:
  """The rows of one cache."""

  cache: TokenCache
  length: int
  packing: bool
  pad_id: int

  def __len__(self) -> int:
    return max(0, -(-(self.cache.num_tokens - 1) // self.length))

  def rows(self, indices: np.ndarray) -> Arrays:
    """The windows int[R] as new arrays, see `RowSource.rows`.

    The weight is 0 where the target is padding and, when packing, where it begins the next
    document, which nothing in this one predicts; and where the data say so.
    """
    length = self.length
    tokens_RS = np.full((len(indices), length + 1), self.pad_id, np.int32)
    is_real_RS = np.ones(tokens_RS.shape, bool)
    begins_RS = np.zeros(tokens_RS.shape, bool)
    counted_RS = np.ones(tokens_RS.shape, bool)
    for row, index in enumerate(indices):
      start, stop = int(index) * length, (int(index) + 1) * length + 1
      window = self.cache.read(start, stop)
      tokens_RS[row, : window.size] = window
      if window.size <= length:
        is_real_RS[row, window.size :] = False
      if self.packing and (begins := self.cache.document_starts(start, stop)).size:
        begins_RS[row, begins - start] = True
      if (counted := self.cache.read_weights(start, stop)) is not None:
        counted_RS[row, : window.size] = counted
    arrays = {
      "inputs": np.ascontiguousarray(tokens_RS[:, :-1]),
      "targets": np.ascontiguousarray(tokens_RS[:, 1:]),
      "weights": (is_real_RS & ~begins_RS & counted_RS)[:, 1:].astype(np.float32),
    }
    if self.packing:
      arrays["segment_ids"], arrays["positions"] = segments(begins_RS[:, :-1], is_real_RS[:, :-1])
    return arrays


def segments(begins_RT: np.ndarray, is_real_RT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Segment numbers and positions, int32[R, T] each, of rows of packed documents.

  Segments count 1, 2, 3 … by document within the row, 0 is padding; positions restart at 0 with
  each document.

  Args:
    begins_RT: where a document begins.
    is_real_RT: where there is no padding.
  """
  begins_RT = begins_RT.copy()
  # A row that begins inside a document counts that rest as its first segment.
  begins_RT[:, 0] = True
  columns_T = np.arange(begins_RT.shape[1], dtype=np.int32)
  starts_RT = np.maximum.accumulate(np.where(begins_RT, columns_T[None], 0), axis=1)
  segment_ids_RT = np.cumsum(begins_RT, axis=1, dtype=np.int32) * is_real_RT
  return segment_ids_RT, (columns_T[None] - starts_RT) * is_real_RT
