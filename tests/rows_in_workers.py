"""Rows that tests read in worker processes, each of which imports this file and as little as it does."""

import dataclasses
import os
import signal

import numpy as np

from maxbatch.data.rows import Arrays

ROWS = 37


@dataclasses.dataclass(frozen=True)
class Numbered:
  """Row i holds i, plus 1 so that it differs from a filled-up row."""

  num_rows: int = ROWS

  def __len__(self) -> int:
    return self.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    inputs = np.repeat(np.asarray(indices, np.int32)[:, None] + 1, 2, axis=1)
    return {"inputs": inputs, "targets": inputs.copy(), "weights": np.ones_like(inputs, np.float32)}


@dataclasses.dataclass(frozen=True)
class Failing(Numbered):
  """Fails, or kills its process, on rows after the first step's."""

  error: str = "raise"

  def rows(self, indices: np.ndarray) -> Arrays:
    if 5 in indices:
      if self.error == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
      raise FileNotFoundError(2, "No such file or directory", "gone.tokens")
    return super().rows(indices)
