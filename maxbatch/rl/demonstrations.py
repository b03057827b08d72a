"""Demonstrations of a built-in task as rows, to train on before reinforcement learning.

R rows, T tokens per row.
"""

import dataclasses
from typing import Any

import numpy as np

from maxbatch.config.schema import DataConfig
from maxbatch.data.dataset import Arrays, Dataset
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError
from maxbatch.rl.tasks import Task, task_named
from maxbatch.sampling.text import encoded

NAME = "maxbatch.rl.demonstrations:build"
"""The `dataset_type` of these rows; `dataset_path` is then the task."""
_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class DemonstrationRows:
  """Row i is the task's demonstration i; what counts is what is answered, and its end."""

  task: Task
  seed: int
  tokenizer: Tokenizer
  add_bos: bool
  length: int

  def __len__(self) -> int:
    return _ROWS

  def rows(self, indices: np.ndarray) -> Arrays:
    """The rows int[R], see `RowSource.rows`.

    Raises:
      UserError: one is longer than a row.
    """
    shape = len(indices), self.length + 1
    tokens_RS, weights_RS = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, index in enumerate(indices):
      prompt, answer = self._encoded(int(index))
      ids = [*prompt, *answer]
      if len(ids) > shape[1]:
        raise UserError(
          f"max_target_length={self.length}: a demonstration of the task has {len(ids)} tokens; for "
          f"example max_target_length={len(ids)}"
        )
      tokens_RS[row, : len(ids)] = ids
      weights_RS[row, len(prompt) : len(ids)] = 1
    fields: dict[str, Any] = {
      "inputs": tokens_RS[:, :-1],
      "targets": tokens_RS[:, 1:],
      "weights": weights_RS[:, 1:],
    }
    return {name: np.ascontiguousarray(array) for name, array in fields.items()}

  def _encoded(self, number: int) -> tuple[list[int], list[int]]:
    prompt, answer = self.task.demonstration(self.seed, number)
    ids = self.tokenizer.encode(answer.encode()).tolist()
    return encoded(self.tokenizer, prompt, add_bos=self.add_bos), [*ids, self.tokenizer.eos_id]


def build(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """The demonstrations of the task that `dataset_path` names."""
  seed = data.data_shuffle_seed
  rows = DemonstrationRows(
    task_named(data.dataset_path), seed, tokenizer, data.add_bos, max_target_length
  )
  return Dataset(
    train=rows,
    validation=None,
    fingerprint=f"demonstrations-{data.dataset_path}-{seed}-{data.add_bos}",
    description=f"demonstrations of rl_task={data.dataset_path}, right and wrong ones, seed {seed}",
  )
