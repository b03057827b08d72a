"""What a run without a checkpoint of its own begins with, and what a run that resumes takes up."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax

from maxbatch.checkpoints.checkpointer import Restored
from maxbatch.checkpoints.find import parameters_to_begin_with
from maxbatch.checkpoints.fingerprint import named_leaves
from maxbatch.checkpoints.reading import read_leaves
from maxbatch.checkpoints.record import fixed_keys, listed, state_differences
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import CheckpointConfig, Config
from maxbatch.conversion.source import (
  FROZEN,
  CheckpointSource,
  Source,
  find_source,
  frozen_note,
  open_source,
  read_frozen,
)
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all, sync_errors
from maxbatch.models.registry import joined
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.job import LOSS_SCALE
from maxbatch.training.state import TrainState
from maxbatch.training.step import Trainer

_FULL, _PARAMETERS = "load_full_state_path", "load_parameters_path"
_WITHOUT_MEANING = ("dropout_rate", "init_weights_seed", "max_position_embeddings")
_WITHOUT_MEANING += ("vocab_size", "z_loss_multiplier", "lora_rank", "lora_alpha", "lora_targets")
"""Keys of a model that may be others where trained parameters are taken up."""


@dataclasses.dataclass(frozen=True)
class Initialization:
  """Random parameters, unless there is a source."""

  source: Source | None = None
  full: bool = False
  """Whether optimizer state and position are the source's too."""
  unseen: bool = False
  """There is a source of parameters, which is not on this machine to be looked at."""
  note: str = ""
  """Where there is no source yet: why."""

  @property
  def position(self) -> Position:
    """The position at which the run begins to count."""
    return self.source.position if self.source is not None and self.full else Position(0, 0)

  def check(self, config: Config, trainer: Trainer) -> list[str]:
    """Checks that it fits the run, without reading an array; returns what is said about it, in lines.

    Raises:
      UserError: it is not of this run's model, or optimizer.
    """
    if self.source is None:
      return [self.note] if self.note else []
    with sync_errors():
      if isinstance(self.source, CheckpointSource) and self.full:
        self.source.check(trainer.model, full=True)
        _check_optimizer(self.source, trainer)
      else:
        self.source.check(trainer.model)
    at, differences = self.source.position, _otherwise(self.source, config)
    if self.full:
      line = (
        f"parameters, optimizer state and position of {self.source.folder}: continues after step "
      )
      return [line + f"{at.step} ({at.samples:,} samples)", *differences]
    line = f"parameters of {self.source.folder}, with a new optimizer, at step 0"
    return [line, *differences]

  def state(self, trainer: Trainer, seed: int) -> TrainState:
    """Returns the state before the run's first step; all processes must call it.

    Raises:
      UserError: the source is damaged, or cannot be read.
    """
    if self.source is None:
      return trainer.init(seed)
    loaded = self.source.read(trainer.model, trainer.abstract.parameters)
    if not isinstance(self.source, CheckpointSource) or not self.full:
      return trainer.begin(seed, loaded)
    rest = {name: part for name, part in trainer.abstract_saved.items() if name != "params"}
    wanted = cast(dict[str, jax.ShapeDtypeStruct], named_leaves(rest))
    arrays = read_leaves(_FULL, self.source.folder, self.source.record, wanted)
    saved = jax.tree.unflatten(jax.tree.structure(rest), [arrays[name] for name in wanted])
    noted = self.source.record.get("notes", {}).get(LOSS_SCALE)
    return trainer.from_saved(saved | {"params": loaded}, noted)

  def notes(self, trainer: Trainer, state: TrainState) -> dict[str, Any]:
    """Returns what each checkpoint notes of it."""
    if self.source is None or trainer.keeps_frozen:
      return {}
    return {FROZEN: frozen_note(self.source, trainer.by_layer(state.frozen))}


def _otherwise(source: Source, config: Config) -> list[str]:
  """Lists keys of the model that give the same parameters another meaning, a line each."""
  now, before = (json.loads(json.dumps(dict(x))) for x in (fixed_keys(config), source.model_keys))
  keys = [key for key in to_flat_dict(config.model) if key not in _WITHOUT_MEANING]
  return [
    f"{key}={now[key]}, and they were trained with {key}={before[key]}"
    for key in [*keys, "tokenizer_type"]
    if key in now and key in before and before[key] != now[key]
  ]


def _check_optimizer(source: CheckpointSource, trainer: Trainer) -> None:
  kept = trainer.abstract_saved | {"params": {}}
  leaves = source.record["leaves"].items()
  saved = {name: leaf for name, leaf in leaves if not name.startswith("params/")}
  misfits = state_differences({"leaves": saved}, named_leaves(kept))
  if misfits:
    raise UserError(
      f"{_FULL}={source.folder} has another optimizer state than this run:\n{listed(misfits)}\n"
      "opt_type, trainable and the model's keys must be those of that run; or begin with its "
      f'parameters alone: {_PARAMETERS}={source.folder} {_FULL}=""'
    )


def find_initialization(config: CheckpointConfig, folder: RunFolder) -> Initialization:
  """Finds what the keys name, and reads the record of its folder. All processes must call it.

  A run that a conversion has made begins with what lies in its own folder.

  Raises:
    UserError: both are given, or there is nothing of the kind.
  """
  key = _FULL if config.load_full_state_path else _PARAMETERS
  own = parameters_to_begin_with(folder.checkpoints)
  given = config.load_full_state_path or config.load_parameters_path
  given = given or broadcast_one_to_all(str(own or ""))
  if not given:
    return Initialization()
  with sync_errors():
    if config.load_full_state_path and config.load_parameters_path:
      raise UserError(
        f"{_PARAMETERS}={config.load_parameters_path} and {_FULL}={config.load_full_state_path}: a "
        f'run begins with one of them; for example {_PARAMETERS}=""'
      )
    result = str(find_source(key, given))
  # Process 0's: the newest checkpoint of a run that goes on may not be the same for all.
  chosen = Path(broadcast_one_to_all(result))
  with sync_errors():
    source = open_source(key, chosen)
    has_state = isinstance(source, CheckpointSource) and any(
      not name.startswith("params/") for name in source.record["leaves"]
    )
    if key == _FULL and not has_state:
      raise UserError(
        f'{key}={given} holds parameters alone; begin with these: {_PARAMETERS}={given} {key}=""'
      )
  return Initialization(source, full=key == _FULL)


def resumed_state(config: Config, trainer: Trainer, restored: Restored) -> TrainState:
  """Restores the state of a run's own checkpoint; frozen parameters it lacks are read again.

  Raises:
    UserError: they are not where they were, or not the same any more.
  """
  saved = restored.state
  if not trainer.keeps_frozen:
    wanted, given = trainer.abstract.frozen, config.checkpoint.load_parameters_path
    run = RunFolder.of(config.run).path
    frozen = read_frozen(restored.notes[FROZEN], trainer.model, wanted, run, given)
    saved = saved | {"params": joined(saved["params"], frozen)}
  return trainer.from_saved(saved, restored.notes.get(LOSS_SCALE))


def saving_frozen(
  trainer: Trainer, saved: Mapping[str, Any] | None, initialization: Initialization
) -> Trainer:
  """Returns the trainer; its checkpoints hold frozen parameters unless these are elsewhere.

  Args:
    saved: the record of the run's newest checkpoint, as which it goes on; None: it begins.
  """
  taken = (initialization.source is not None and not initialization.full) or initialization.unseen
  elsewhere = FROZEN in saved.get("notes", {}) if saved else taken and bool(trainer.model.frozen)
  return dataclasses.replace(trainer, keeps_frozen=False) if elsewhere else trainer


def no_steps_left(config: Config, plan: BatchPlan, position: Position) -> str:
  """Says that another run's position has used up the budget."""
  key, at = plan.budget.key, f"step {position.step} ({position.samples:,} samples)"
  return (
    f"{_FULL}={config.checkpoint.load_full_state_path} is at {at}, where the budget of this run ends; "
    f"it counts from the initialization of that run: raise {key}, or start over with {_PARAMETERS}"
  )


def ignored_key(config: CheckpointConfig) -> str:
  """Names keys that counted only when the run began; empty where none is given."""
  given = {_PARAMETERS: config.load_parameters_path, _FULL: config.load_full_state_path}
  keys = [f"{key}={value}" for key, value in given.items() if value]
  return (
    f"{keys[0]} was used when the run began; it continues from its own checkpoint" if keys else ""
  )
