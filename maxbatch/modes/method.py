"""How a run trains: on text, or, in run_rl.py, by reinforcement learning."""

import contextlib
from collections.abc import Mapping
from typing import Protocol

from maxbatch.checkpoints.checkpointer import Restored
from maxbatch.config.schema import Config
from maxbatch.data.dataset import Dataset
from maxbatch.data.registry import build_dataset, check_epochs
from maxbatch.models.registry import Model
from maxbatch.modes.noise import text_meter
from maxbatch.modes.resolve import ResolvedRun
from maxbatch.training.loop import Job
from maxbatch.training.noise_run import Meter
from maxbatch.training.objective import TEXT, Loss
from maxbatch.training.step import Trainer


class Method(Protocol):
  """What differs between the ways to train; all else of a run they share."""

  def loss(self, config: Config) -> Loss:
    """What a step minimizes."""
    ...

  @property
  def num_saved_policies(self) -> int:
    """Parameters of earlier steps without which a run cannot go on."""
    ...

  def held_beside(self, trainer: Trainer) -> Mapping[str, int]:
    """Bytes that each device which trains holds beside the state and what it is fed, by name."""
    ...

  def dataset(self, resolved: ResolvedRun) -> Dataset:
    """What is trained on.

    Raises:
      UserError: it cannot be read, or not for as long as the run is.
    """
    ...

  def meter(self, config: Config, model: Model) -> Meter:
    """What measures the noise scale."""
    ...

  def equipped(
    self, job: Job, resolved: ResolvedRun, restored: Restored | None
  ) -> contextlib.AbstractContextManager[Job]:
    """The job with what feeds it and evaluates it, which ends with the context.

    Args:
      job: with what all have.
      resolved: the run.
      restored: the checkpoint that it resumes from; None: it begins.
    """
    ...


class OnText:
  """Training on the rows of a dataset."""

  num_saved_policies = 0

  def loss(self, config: Config) -> Loss:
    """See `Method.loss`."""
    del config
    return TEXT

  def held_beside(self, trainer: Trainer) -> Mapping[str, int]:
    """See `Method.held_beside`: nothing."""
    del trainer
    return {}

  def dataset(self, resolved: ResolvedRun) -> Dataset:
    """See `Method.dataset`."""
    config = resolved.config
    dataset = build_dataset(config.data, config.batch.max_target_length)
    check_epochs(config.data, dataset.train, resolved.plan.total_samples)
    return dataset

  def meter(self, config: Config, model: Model) -> Meter:
    """See `Method.meter`."""
    return text_meter(config, model)

  def equipped(
    self, job: Job, resolved: ResolvedRun, restored: Restored | None
  ) -> contextlib.AbstractContextManager[Job]:
    """See `Method.equipped`; the job has it all."""
    del resolved, restored
    return contextlib.nullcontext(job)


ON_TEXT = OnText()
