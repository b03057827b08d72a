"""Random tokens: what the training loop costs when reading costs nothing.

R rows, T tokens per row, S = T + 1.
"""

import dataclasses

import numpy as np

from maxbatch.config.schema import DataConfig
from maxbatch.data.document_rows import segments
from maxbatch.data.rows import Arrays, Dataset
from maxbatch.data.tokenizer import Tokenizer, ordinary_ids

# The most rows the shuffle can number: as good as unlimited.
_TRAIN_ROWS = 2**31 - 1
# A bounded set, so that "the whole validation set" ends.
_VALIDATION_ROWS = 256


@dataclasses.dataclass(frozen=True)
class SyntheticRows:
  """Row i is a pure function of (seed, part, i)."""

  seed: int
  part: int
  num_rows: int
  length: int
  packing: bool
  ids: np.ndarray
  """The ids that are drawn from: those that stand for text."""

  def __len__(self) -> int:
    return self.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    """Returns the rows int[R], see `RowSource.rows`; all weights are 1, each row is one segment."""
    tokens_RS = np.empty((len(indices), self.length + 1), np.int32)
    for row, index in enumerate(indices):
      draws = np.random.default_rng((self.seed, self.part, int(index)))
      ids = draws.integers(0, len(self.ids), self.length + 1, dtype=self.ids.dtype)
      tokens_RS[row] = self.ids[ids]
    arrays = {
      "inputs": np.ascontiguousarray(tokens_RS[:, :-1]),
      "targets": np.ascontiguousarray(tokens_RS[:, 1:]),
      "weights": np.ones((len(indices), self.length), np.float32),
    }
    if self.packing:
      begins_RT = np.zeros(arrays["inputs"].shape, bool)
      filled_R = np.full(len(indices), self.length)
      arrays["segment_ids"], arrays["positions"] = segments(begins_RT, filled_R)
    return arrays


def build(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """Builds random tokens in rows of `max_target_length`; no path is read."""

  def part(number: int, rows: int) -> SyntheticRows:
    seed, ids = data.data_shuffle_seed, ordinary_ids(tokenizer)
    return SyntheticRows(seed, number, rows, max_target_length, data.segmented, ids)

  return Dataset(
    train=part(0, _TRAIN_ROWS),
    validation=part(1, _VALIDATION_ROWS),
    fingerprint=f"synthetic-{data.data_shuffle_seed}",
    description=f"random tokens, seed {data.data_shuffle_seed}",
  )
