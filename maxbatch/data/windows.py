"""Fixed windows over a token cache: row i is a place in the file, so any row can be read first.

R rows, T tokens per row. A window has T+1 tokens and starts T after the one before, so that every
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
  bos_id: int
  pad_id: int

  def __len__(self) -> int:
    return max(0, -(-(self.cache.num_tokens - 1) // self.length))

  def rows(self, indices: np.ndarray) -> Arrays:
    """The windows int[R] as new arrays, see `RowSource.rows`.

    The weight is 0 where the target is padding and, when packing, where it begins the next
    document, which nothing in this one predicts.
    """
    inputs_RT, targets_RT = self._windows(indices)
    counted_RT = targets_RT != self.pad_id
    arrays = {"inputs": inputs_RT, "targets": targets_RT}
    if self.packing:
      counted_RT &= targets_RT != self.bos_id
      arrays["segment_ids"], arrays["positions"] = segments(inputs_RT, self.bos_id, self.pad_id)
    return arrays | {"weights": counted_RT.astype(np.float32)}

  def _windows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets int32[R, T]; padding beyond the last token."""
    length = self.length
    inputs_RT = np.full((len(indices), length), self.pad_id, np.int32)
    targets_RT = np.full((len(indices), length), self.pad_id, np.int32)
    for row, index in enumerate(indices):
      window = self.cache.tokens[index * length : (index + 1) * length + 1]
      inputs_RT[row, : min(window.size, length)] = window[:length]
      targets_RT[row, : window.size - 1] = window[1:]
    return inputs_RT, targets_RT


def segments(inputs_RT: np.ndarray, bos_id: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
  """Segment numbers and positions, int32[R, T] each, of rows of packed documents.

  Segments count 1, 2, 3 … by document within the row, 0 is padding; positions restart at 0 with
  each document.
  """
  begins_RT = inputs_RT == bos_id
  # A row that begins inside a document counts that rest as its first segment.
  begins_RT[:, 0] = True
  columns_T = np.arange(inputs_RT.shape[1], dtype=np.int32)
  starts_RT = np.maximum.accumulate(np.where(begins_RT, columns_T[None], 0), axis=1)
  real_RT = inputs_RT != pad_id
  segment_ids_RT = np.cumsum(begins_RT, axis=1, dtype=np.int32) * real_RT
  return segment_ids_RT, (columns_T[None] - starts_RT) * real_RT
