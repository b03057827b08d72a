"""validate_only: everything that can be known of a run without compiling it, in seconds.

Nothing is compiled, no array is put on a device, and nothing stays behind in the run's folder: a
nameless file tests the nearest folder that is there, and no folder is made. Only the token cache,
which belongs to no run, is built if the dataset has none yet.
"""

import dataclasses
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxbatch.batch.learning_rate import learning_rate
from maxbatch.checkpoints.find import newest_record, resumable_steps
from maxbatch.checkpoints.fingerprint import named_leaves
from maxbatch.checkpoints.record import (
  changed_settings,
  identity,
  identity_differences,
  listed,
  settings,
  state_differences,
)
from maxbatch.command_line.screen import colored, for_screen
from maxbatch.compile.program import gib
from maxbatch.config import schema
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted, text
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology
from maxbatch.data.dataset import Dataset, RowSource
from maxbatch.data.input_report import input_report
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target, describe_devices, find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.sharding import num_processes
from maxbatch.metrics_writers.registry import chosen_writers
from maxbatch.modes.beginning import Beginning, beginning_of, saving_frozen
from maxbatch.modes.memory import check_memory, item_bytes
from maxbatch.modes.method import ON_TEXT, Method
from maxbatch.modes.resolve import (
  ResolvedRun,
  check_replaces_nothing,
  checkpoint_of,
  keeping_batch,
  planned,
)
from maxbatch.modes.start import started
from maxbatch.run_folder.atomic import elsewhere, nearest
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.build import (
  build_trainer,
  lost_updates,
  parameter_counts,
  step_rows,
  traced_step,
  undivided_parameters,
)
from maxbatch.training.state import TrainState
from maxbatch.training.step import Trainer
from maxbatch.tuning.candidates import (
  asked,
  is_open,
  sizes_of,
  with_default_batch,
  with_size,
)
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.exploration import without_variants
from maxbatch.tuning.microbatch_size import check_explored

_NEXT = "Valid: nothing was compiled. Next: compile_only=true"


def validate(config: Config, say: Callable[[str], None] = print) -> None:
  """Checks a run, a line for each check that passes.

  Args:
    config: the run, on any devices, those of a slice that is not here too. A microbatch that is to
      be chosen is checked at the smallest size.
    say: receives the lines.

  Raises:
    UserError: the first check that fails, as the run itself would put it.
  """
  with started(config, leaves_files=False), ending_together():
    show_checks(_checks(config), say)


Check = tuple[str, str, Sequence[str]]
"""What was checked, what was found, and lines below it."""


def show_checks(checks: Iterator[Check], say: Callable[[str], None]) -> None:
  """Says each as it passes; the next begins when the line of the one before is out."""
  for name, detail, more in checks:
    say(f"{colored('ok', 'green')}   " + for_screen(f"     {name:<13}  {detail}")[5:])
    for line in more:
      say(for_screen(f"  {line}"))
  say(for_screen(_NEXT))


def _below(plan: BatchPlan) -> Iterator[str]:
  """The plan's lines without its heading, which the check has."""
  return (line.removeprefix("  ") for line in str(plan).splitlines()[1:])


def check_of_keys(config: Config) -> Check:
  """What a configuration that could be loaded is."""
  return "configuration", f"{len(schema.to_flat(config))} keys", ()


def _checks(config: Config) -> Iterator[Check]:
  """Every check in turn."""
  yield check_of_keys(config)
  yield from checks_of_run(config, find_devices(config), ON_TEXT, examine)


Examine = Callable[[ResolvedRun, Trainer], Generator[Check, None, Dataset]]
"""Checks what a run is fed; gives the dataset."""


def checks_of_run(
  config: Config, target: Target, method: Method, examine: Examine, begins_with: str = ""
) -> Iterator[Check]:
  """Every check of a run on its devices, whatever it is trained by.

  Args:
    config: the run.
    target: its devices.
    method: how it trains.
    examine: what checks its input.
    begins_with: what is trained before it, so that there is nothing to look at yet.
  """
  chosen_writers(config.run.metrics_writers, config.run.plugins)
  check_explored(config)
  given, saved = config, checkpoint_of(config)
  beginning, unknown = (Beginning(), "") if saved else _beginning(config)
  if begins_with:
    beginning, unknown = Beginning(unseen=True), begins_with
  config = resolve_accumulation(keeping_batch(config, saved, target.layout), target.layout)
  config, choice = _with_smallest_choice(config, target.layout)
  run = dataclasses.replace(planned(config, target), saved=saved, begins=beginning.position)
  devices = target.devices
  plan, ahead = run.plan, run.plan_ahead
  yield "batch plan", _phases(ahead), [*choice, *_below(ahead)]
  build = functools.partial(
    build_trainer,
    config,
    plan,
    devices,
    keep=False,
    loss=method.loss(config),
    num_saved_policies=method.num_saved_policies,
  )
  trainer, state = _without_arrays(lambda: saving_frozen(build(), saved, beginning))
  yield "mesh", f"{plan.topology} on {describe_devices(devices)}", undivided_parameters(trainer)
  if trainer.pipeline:
    choice = [trainer.pipeline.choice] if trainer.pipeline.choice else []
    yield "pipeline", str(trainer.pipeline), choice
  yield (
    "model",
    f"{config.model.model_name}: {parameter_counts(trainer.model)}",
    lost_updates(trainer.model),
  )
  begins, *more = beginning.check(config, trainer) or [unknown]
  if begins:
    yield "beginning", begins, more
  beside = method.held_beside(trainer)
  yield "memory", check_memory(config, plan, state, devices, beside), ()
  yield "learning rate", _rates(config, plan), ()
  dataset = yield from examine(run, trainer)
  yield "step", _traced(config, plan, build, dataset.train), ()
  check_replaces_nothing(config)
  folder = RunFolder.of(config.run).path.absolute()
  yield "folder", _writable(folder), ()
  if config.checkpoint.enable_checkpointing:
    yield "checkpoints", _disk_space(config, plan, trainer.abstract_saved, folder), ()
    yield "resume", *_resumable(given, plan, trainer.abstract_saved, dataset, folder)


def examine(run: ResolvedRun, trainer: Trainer) -> Generator[Check, None, Dataset]:
  """What is known of a text's data, and their first rows."""
  config = run.config
  given = input_report(config.data, run.plan, num_processes(trainer.mesh))
  yield "input", given.headline, given.lines()
  dataset = ON_TEXT.dataset(run)
  _first_row(dataset.train)
  if dataset.validation is not None:
    _first_row(dataset.validation)
  yield "dataset", "the first rows can be read", dataset.description.splitlines()
  return dataset


def _beginning(config: Config) -> tuple[Beginning, str]:
  """What the run begins with; nothing, and a line, where it is not on this machine to be looked at.

  Raises:
    UserError: it is to take place here, and there is nothing of the kind.
  """
  try:
    return beginning_of(config.checkpoint, RunFolder.of(config.run)), ""
  except UserError as error:
    if not config.compile.compile_topology:
      raise
    unseen = bool(config.checkpoint.load_parameters_path)
    return Beginning(unseen=unseen), f"is not looked at: {error}"


def _with_smallest_choice(config: Config, layout: Topology) -> tuple[Config, Sequence[str]]:
  """The configuration with a microbatch to check, and a line if that is still to be chosen."""
  config = without_variants(config)
  if not is_open(config.batch):
    return config, ()
  config = with_default_batch(config, layout)
  sizes = sizes_of(config, layout)
  smallest, largest = sizes[0].per_device, sizes[-1].per_device
  batch = with_size(config.batch, smallest)
  line = (
    f"{asked(config.batch)} will choose from {counted(len(sizes), 'size')}, {text(smallest)} to "
    f"{text(largest)}; checked with {text(smallest)}"
  )
  return dataclasses.replace(config, batch=batch), [line]


def _phases(plan: BatchPlan) -> str:
  return f"{counted(len(plan.phases), 'phase')}, {counted(plan.steps, 'step')}"


def _without_arrays(build: Callable[[], Trainer]) -> tuple[Trainer, TrainState]:
  """Trainer and state by tracing alone: even a random key would compile a program."""
  made: list[tuple[Trainer, TrainState]] = []

  def traced() -> None:
    trainer = build()
    made.append((trainer, trainer.abstract))

  jax.eval_shape(traced)
  return made[0]


def _rates(config: Config, plan: BatchPlan) -> str:
  rate = learning_rate(config.optimizer, plan, config.run.schedule_unit)
  last = plan.phases[-1]
  before_end = last.after(last.num_steps - 1)
  return (
    f"{config.optimizer.lr_schedule_type}: {rate(Position(0, 0)):.3g} at the first step, "
    f"{max(map(rate.highest, plan.phases)):.3g} at most, {rate(before_end):.3g} at the last"
  )


def _first_row(source: RowSource) -> dict[str, np.ndarray]:
  return source.rows(np.zeros(1, np.int64))


def _traced(
  config: Config, plan: BatchPlan, build: Callable[[], Trainer], source: RowSource
) -> str:
  """Traces the training step for every microbatch of the run."""

  def trace(micro_batch: int) -> None:
    rows = step_rows(config, plan, source, micro_batch)
    traced_step(config, build(), rows)

  for micro_batch in plan.micro_batches:
    jax.eval_shape(functools.partial(trace, micro_batch))
  shapes = ", ".join(f"{micro_batch:,}" for micro_batch in plan.micro_batches)
  return f"can be traced, for microbatches of {shapes}"


def _writable(folder: Path) -> str:
  """The folder can be made and written, as far as the nearest one that is there tells."""
  there = nearest(folder)
  try:
    with tempfile.TemporaryFile(dir=there) as file:
      file.write(b"x")
  except OSError as error:
    raise UserError(
      f"base_output_directory={folder.parent}: {there} cannot be written: "
      f"{error.strerror or error}; choose another folder{elsewhere(folder)}"
    ) from error
  return f"{folder} can be written" if there == folder else f"{folder} can be made"


def _disk_space(config: Config, plan: BatchPlan, state: Mapping[str, Any], folder: Path) -> str:
  """There is disk space for the checkpoints that stay, and for one more while it is written.

  Raises:
    UserError: there is not, and the run is to take place on this machine.
  """
  each = sum(math.prod(x.shape) * item_bytes(x) for x in jax.tree.leaves(state))
  keep, period = (
    config.checkpoint.max_num_checkpoints_to_keep,
    config.checkpoint.checkpoint_keep_period,
  )
  forever = plan.steps // period if period > 0 else 0
  there = len(resumable_steps(RunFolder(folder).checkpoints))
  count = max(1, keep + 1 + forever - there)
  free = shutil.disk_usage(nearest(folder)).free
  needed = f"{counted(count, 'checkpoint')} of {gib(each)}, one of them while it replaces another"
  if count * each <= free:
    return f"{needed}; {gib(free)} are free"
  if config.compile.compile_topology:
    return f"{needed}; less is free on this machine, so look at the slice's own disk"
  fewer = free // each - 1 - forever + there
  offer = f"max_num_checkpoints_to_keep={fewer}" if fewer >= 1 else "enable_checkpointing=false"
  raise UserError(
    f"max_num_checkpoints_to_keep={keep}, checkpoint_keep_period={period}: this run needs "
    f"{needed}, and {gib(free)} are free in {nearest(folder)}; for example {offer}, or "
    "base_output_directory on a larger disk"
  )


def _resumable(
  config: Config, plan: BatchPlan, state: Mapping[str, Any], dataset: Dataset, folder: Path
) -> tuple[str, list[str]]:
  """Whether the run's newest checkpoint is this run's, by its record; its arrays are not read.

  Returns where the run resumes, and a line for every key that has changed since.

  Raises:
    UserError: it is another run's, or no record can be read.
  """
  directory = RunFolder(folder).checkpoints
  steps, record = resumable_steps(directory), newest_record(directory)
  if not steps:
    return "nothing to resume: the run begins at step 0", []
  if record is None:
    raise UserError(
      f"No checkpoint in {directory} has a record that can be read: {steps}. Restore the folder "
      "from a backup, choose another run_name, or remove the folder to start again."
    )
  step = record["step"]
  misfits = state_differences(record, named_leaves(state))
  changed = identity_differences(record, identity(config, dataset))
  if misfits or (changed and not config.checkpoint.allow_changed_resume):
    allow = "" if misfits else ", or resume all the same with allow_changed_resume=true"
    raise UserError(
      f"This run cannot resume from checkpoint step {step} in {directory}:\n"
      f"{listed(changed + misfits)}\nSet these back, choose another run_name{allow}."
    )
  at = f"step {step} ({record['samples']:,} samples)"
  lines = changed + list(changed_settings(record, settings(config)).values())
  end = plan.starting_at(Position(step, record["samples"])).steps
  if step < end:
    return f"resumes after {at}", lines
  return f"is complete at {at}; raise its budget for more", lines
