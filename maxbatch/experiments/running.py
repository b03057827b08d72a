"""Branches as runs: each is an ordinary run in a folder of its own, resumed from one checkpoint.

What a branch shares with the run it comes from: model, data, samples, optimizer and its state, and
the microbatch. What differs: the batch, and with it the rate, which then stays constant (Merrill et
al. keep their schedule, of which a branch sees next to nothing; here it may be a large part).
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax

from maxbatch.batch.from_config import follows_noise_scale, plan_batches, resumed_plan
from maxbatch.batch.learning_rate import COUPLINGS, learning_rate
from maxbatch.checkpoints.record import fixed_keys, identity_differences, listed
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import BatchConfig, Config, RunConfig
from maxbatch.core.phases import Budget, Phase
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.experiments.branching import Branch, Branching
from maxbatch.experiments.losses import Measured, block_means
from maxbatch.experiments.origin import Checkpoint, fork_checkpoint, removed_if_refused
from maxbatch.hardware.agreement import broadcast_one_to_all, sync_errors, write_shared_file
from maxbatch.hardware.ending import surviving
from maxbatch.modes.run import run
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.run_folder.paths import RunFolder

SET_HERE = {
  "steps": "branch_tokens",
  "total_samples": "branch_tokens",
  "total_tokens": "branch_tokens",
  "eval_interval": "",
  "generate_length": "",
  "enable_checkpointing": "",
  "max_num_checkpoints_to_keep": "",
  "checkpoint_keep_period": "",
  "gns": "",
  "gns_from_microbatches": "",
}
"""Keys that a branch sets itself, and what to give instead."""

_UNRELATED = (
  "dataset_cache_directory",
  "grain_worker_count",
  "grain_num_threads",
  "grain_prefetch_buffer_size",
  "grain_per_worker_buffer_size",
)
_DIVERGED = "diverged.txt"


@dataclasses.dataclass(frozen=True)
class Experiment:
  """All that the branches are made from."""

  config: Config
  """The run that wrote the checkpoint."""
  checkpoint: Checkpoint
  branching: Branching
  learning_rate: float
  """In force at the checkpoint, for factor 1."""
  coupling: str
  folder: pathlib.Path
  """Total over all branches."""

  def rate_of(self, branch: Branch) -> float:
    """Returns the learning rate of a branch."""
    return self.learning_rate * float(branch.factor) ** COUPLINGS[self.coupling]

  def folder_of(self, branch: Branch) -> pathlib.Path:
    """Returns where a branch is trained."""
    return self.folder / branch.name


@dataclasses.dataclass(frozen=True)
class AtCheckpoint:
  """How the run would go on from its checkpoint."""

  phase: Phase
  learning_rate: float
  plan: BatchPlan


def at_checkpoint(config: Config, checkpoint: Checkpoint, layout: Topology) -> AtCheckpoint:
  """Returns batch and learning rate of the step that comes after the checkpoint.

  Raises:
    UserError: the configuration has no plan on these devices, or the rate is 0.
  """
  position, unit = checkpoint.position, config.run.schedule_unit
  # One step more, whatever the budget: a run that is complete, or would cut its last step, has a
  # batch in force all the same.
  whole = _planned(config, checkpoint, layout)
  budget = Budget("steps", Fraction(position.step + 1))
  plan = dataclasses.replace(whole, budget=budget).starting_at(position)
  scheduled = learning_rate(config.optimizer, whole, unit)
  rate = dataclasses.replace(scheduled, plan=plan)(position)
  if rate == 0:
    raise UserError(
      f"checkpoint={checkpoint.folder}: the learning rate after step {position.step} is 0 "
      f"(lr_schedule_type={config.optimizer.lr_schedule_type}), so no branch would learn; "
      "take an earlier checkpoint, or set a learning rate, for example "
      "lr_schedule_type=constant warmup_steps=0 learning_rate=1e-3"
    )
  return AtCheckpoint(plan.phase_at(position.samples), rate, plan)


def _planned(config: Config, checkpoint: Checkpoint, layout: Topology) -> BatchPlan:
  """Returns the plan from the checkpoint on, with what a steered run had decided until then."""
  plan = plan_batches(config.batch, config.run, layout, config.optimizer)
  steered = follows_noise_scale(config.batch) and not config.noise.gns_dry_run
  return resumed_plan(plan, checkpoint.plan, checkpoint.position, steered=steered)


def branch_config(experiment: Experiment, branch: Branch) -> Config:
  """Returns the run that a branch is."""
  config, end = experiment.config, experiment.checkpoint.position.step + branch.steps
  return dataclasses.replace(
    config,
    run=dataclasses.replace(
      _budget(config.run, end),
      run_name=branch.name,
      base_output_directory=str(experiment.folder),
      eval_interval=-1,
      generate_length=0,
    ),
    batch=_constant_batch(config.batch, branch, experiment.branching.per_device_batch_size),
    optimizer=dataclasses.replace(
      config.optimizer,
      learning_rate=experiment.rate_of(branch),
      lr_schedule_type="constant",
      learning_rate_schedule_steps=-1,
      learning_rate_batch_coupling="none",
      warmup_steps=0,
    ),
    checkpoint=dataclasses.replace(
      config.checkpoint,
      enable_checkpointing=True,
      # Its period stays, so that a killed branch goes on, but no more than one takes up room.
      max_num_checkpoints_to_keep=1,
      checkpoint_keep_period=-1,
    ),
    compile=dataclasses.replace(config.compile, save_compiled_step="", compiled_step=""),
    noise=dataclasses.replace(
      config.noise, gns="off", gns_from_microbatches=False, gns_dry_run=False
    ),
  )


def train_branch(experiment: Experiment, branch: Branch) -> Measured | None:
  """Trains a branch to its end, unless it is there; None if a signal stopped it before.

  Raises:
    UserError: the branch's folder holds something else, or training is refused.
    TrainingDivergedError: the smallest branch diverged; for others that is a result.
  """
  config, folder = branch_config(experiment, branch), experiment.folder_of(branch)
  with sync_errors():
    if jax.process_index() == 0:
      _check_same(config, folder)
  if (done := _measured(experiment, branch)) is not None:
    print("Finished before.", flush=True)
    return done
  try:
    with removed_if_refused(folder), surviving(TrainingDivergedError):
      fork_checkpoint(experiment.checkpoint, folder)
      # The state is not kept: it may be large.
      complete = run(config, advise=False)[1].step >= config.run.steps
  except TrainingDivergedError as error:
    if branch == experiment.branching.branches[0]:
      raise
    write_shared_file(folder / _DIVERGED, f"{error}\n")
    print(f"Branch {branch.name} diverged: {error}", flush=True)
    complete = True
  except UserError as error:
    start = experiment.checkpoint.folder
    raise UserError(
      f"{error}\n(In branch {branch.name}, which starts as a copy of {start}.)"
    ) from error
  if not complete:
    return None
  if (done := _measured(experiment, branch)) is None:
    raise UserError(
      f"{RunFolder(folder).metrics} lacks steps that this branch has made; remove {folder} to "
      "train it again"
    )
  return done


def _budget(run_config: RunConfig, steps: int) -> RunConfig:
  return dataclasses.replace(run_config, steps=steps, total_samples=-1, total_tokens=-1)


def _constant_batch(batch: BatchConfig, branch: Branch, per_device: Fraction) -> BatchConfig:
  """Keeps one batch throughout, whatever the run did before and after."""
  return dataclasses.replace(
    batch,
    batch_size=branch.batch,
    global_batch_to_train=-1,
    tokens_per_step=-1,
    per_device_batch_size=per_device,
    micro_batch_size=Fraction(-1),
    gradient_accumulation_steps=-1,
    enable_rampup_batch_size=False,
    batch_schedule=(),
    batch_schedule_file="",
    batch_schedule_type="constant",
    batch_schedule_unit="samples",
    batch_schedule_length=-1,
    batch_size_start=-1,
    batch_size_increment=-1,
    gns_max_batch_size=-1,
  )


def _measured(experiment: Experiment, branch: Branch) -> Measured | None:
  """Returns what the branch's files say to process 0, if it is at its end."""
  with sync_errors():
    result = _read(experiment, branch) if jax.process_index() == 0 else None
  agreed = broadcast_one_to_all(result)
  if agreed is None:
    return None
  blocks, eval_loss, seconds = agreed
  return Measured(branch, experiment.rate_of(branch), tuple(blocks), eval_loss, seconds)


def _read(
  experiment: Experiment, branch: Branch
) -> tuple[Sequence[float], float | None, float] | None:
  """Returns losses of blocks, loss of the evaluation and seconds of a branch at its end."""
  folder = experiment.folder_of(branch)
  first = experiment.checkpoint.position.step
  # The branch may have gone further once.
  records = [one for one in read_metrics(folder) if first < one["step"] <= first + branch.steps]
  seconds = sum(record["step_seconds"] for record in records)
  if len(records) == branch.steps:
    losses = [float(record["loss"]) for record in records]
    return block_means(losses, branch.steps_per_block), records[-1].get("eval/loss"), seconds
  return ((), None, seconds) if (folder / _DIVERGED).exists() else None


def _check_same(config: Config, folder: pathlib.Path) -> None:
  """Refuses to go on with a branch that was trained in another way."""
  written = RunFolder(folder).config
  if not written.exists():
    return
  before = load_config([f"config={written}"])
  changed = identity_differences({"identity": _what_decides(before)}, _what_decides(config))
  if changed:
    lines = listed([one.replace("in the checkpoint", "there") for one in changed])
    raise UserError(
      f"{folder} holds a branch trained with other settings:\n{lines}\nRemove that folder, or "
      "choose another run_name for new branches."
    )


def _what_decides(config: Config) -> dict[str, Any]:
  """Returns what a branch's losses follow from, besides its checkpoint, by configuration key."""
  # As they are written, for lists and exact numbers are compared with what a file gives back.
  values = to_flat_dict(config.data) | to_flat_dict(config.optimizer)
  used = {name: value for name, value in values.items() if name not in _UNRELATED}
  return fixed_keys(config) | used | {"batch_size": config.batch.batch_size}
