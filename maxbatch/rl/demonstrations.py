"""The warm start: demonstrations of a built-in task as rows, to train on before reinforcement learning.

R rows, T tokens per row.
"""

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np

from maxbatch.batch.rl_sizes import warm_start_batch
from maxbatch.checkpoints.find import newest_record
from maxbatch.config.schema import Config, DataConfig
from maxbatch.core.topology import Topology
from maxbatch.data.rows import Arrays, Dataset
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.models.lora import without_adapters
from maxbatch.rl.tasks import TASKS_VERSION, Task, task_named
from maxbatch.run_folder.paths import RunFolder
from maxbatch.sampling.text import encoded

NAME = "maxbatch.rl.demonstrations:build"
"""The `dataset_type` of these rows; `dataset_path` is then the task."""
_ROWS = 2**31 - 1
_WARM_START_RATE = 1e-3


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
    """Returns the rows int[R], see `RowSource.rows`.

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
  """Builds the demonstrations of the task that `dataset_path` names."""
  seed = data.data_shuffle_seed
  rows = DemonstrationRows(
    task_named(data.dataset_path), seed, tokenizer, data.add_bos, max_target_length
  )
  return Dataset(
    train=rows,
    validation=None,
    fingerprint=f"demonstrations-{data.dataset_path}-{seed}-{data.add_bos}-{TASKS_VERSION}",
    description=f"demonstrations of rl_task={data.dataset_path}, right and wrong ones, seed {seed}",
  )


def warms_up(config: Config) -> bool:
  """Returns whether a run of its own on demonstrations comes before: one is asked for, and nothing is saved.

  All processes must call it.
  """
  begun = config.checkpoint.enable_checkpointing and bool(
    newest_record(RunFolder.of(config.run).checkpoints)
  )
  return bool(config.rl.warm_start_steps) and not broadcast_one_to_all(begun)


def warm_start(config: Config, training: Topology) -> Config:
  """Returns a supervised run of all parameters on a task's demonstrations, in a folder of its own, on the
  devices that train."""
  return dataclasses.replace(
    config,
    run=dataclasses.replace(
      config.run,
      run_name=f"{config.run.run_name}/warm_start",
      steps=config.rl.warm_start_steps,
      total_samples=-1,
      total_tokens=-1,
      eval_interval=-1,
      generate_length=0,
    ),
    batch=dataclasses.replace(
      config.batch,
      batch_size=warm_start_batch(training),
      global_batch_to_train=-1,
      tokens_per_step=-1,
      micro_batch_size=Fraction(-1),
      per_device_batch_size=Fraction(-1),
      gradient_accumulation_steps=-1,
      accumulation="fused",
    ),
    data=dataclasses.replace(
      config.data, dataset_type=NAME, dataset_path=config.rl.rl_task, packing=False
    ),
    # All of the model, which begins at random: adapters or a part of it would learn next to nothing.
    model=without_adapters(config.model),
    optimizer=dataclasses.replace(config.optimizer, learning_rate=_WARM_START_RATE, trainable=()),
    checkpoint=dataclasses.replace(
      config.checkpoint, enable_checkpointing=True, max_num_checkpoints_to_keep=1
    ),
    # What is compiled there is no step on completions.
    compile=dataclasses.replace(config.compile, compiled_step="", save_compiled_step=""),
    noise=dataclasses.replace(config.noise, gns_from_microbatches=False),
    rl=dataclasses.replace(config.rl, num_generations=-1, rl_task="", num_prompts=-1),
  )
