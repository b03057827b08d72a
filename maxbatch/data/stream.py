"""The canonical stream: which row of the dataset is sample i.

A pure function of (seed, i), so a run's only position is the number of samples it has consumed:
nothing about workers, hosts or batch sizes can change what comes next.
"""

import grain
import numpy as np

STREAM_VERSION = "grain-shuffle-1"
"""Saved with checkpoints: a stream that orders rows otherwise is another one, and its samples after
a resume would repeat some of those before and leave out others."""


class SampleStream:
  """Every row once per epoch, shuffled anew in each epoch, without end."""

  def __init__(self, num_rows: int, seed: int):
    # MapDataset.range would do, but its length check refuses nothing below 2**63 while the
    # shuffle numbers rows with 32 bits.
    if not 0 < num_rows < 2**32:
      raise ValueError(f"the shuffle numbers 1 to 2**32 - 1 rows, not {num_rows}")
    self._rows = grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat(None)

  def __call__(self, sample_ids: np.ndarray) -> np.ndarray:
    """The dataset rows int64[R] of the samples int64[R], counted from 0 over all epochs."""
    return np.array([self._rows[int(sample)] for sample in sample_ids], np.int64)
