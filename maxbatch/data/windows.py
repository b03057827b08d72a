"""Fixed windows over a token cache: row i is a place in the file, so any row can be read first.

R rows, T tokens per row. A window has T+1 tokens and starts T after the one before, so that every
token but the first is a target exactly once; the last window is padded and nothing is dropped.
"""

import dataclasses

import numpy as np

from maxbatch.data.dataset import Arrays
from maxbatch.data.segments import clear_padding, segments
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
    cache, shape_RT = self.cache, (len(indices), self.length)
    starts_R = np.asarray(indices, np.int64) * self.length
    num_inputs_R = np.minimum(cache.num_tokens - starts_R, self.length)
    num_targets_R = np.minimum(cache.num_tokens - starts_R - 1, self.length)
    places_R = np.arange(len(indices)) * self.length
    arrays = {
      "inputs": np.full(shape_RT, self.pad_id, np.int32),
      "targets": np.full(shape_RT, self.pad_id, np.int32),
      "weights": np.ones(shape_RT, np.float32),
    }
    cache.copy_tokens(starts_R, num_inputs_R, arrays["inputs"], places_R)
    cache.copy_tokens(starts_R + 1, num_targets_R, arrays["targets"], places_R)
    cache.copy_weights(starts_R + 1, num_targets_R, arrays["weights"], places_R)
    clear_padding(arrays["weights"], num_targets_R)
    if self.packing:
      begins_RT = np.zeros(shape_RT, bool)
      # Of the targets: where a document begins as an input, one token later.
      rows, columns = cache.document_starts(starts_R + 1, starts_R + 1 + self.length)
      arrays["weights"][rows, columns] = 0
      inside = columns + 1 < self.length
      begins_RT[rows[inside], columns[inside] + 1] = True
      arrays["segment_ids"], arrays["positions"] = segments(begins_RT, num_inputs_R)
    return arrays
