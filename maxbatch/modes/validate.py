"""validate_only: everything that can be known of a run without compiling it, in seconds.

Nothing is compiled, no array is put on a device, and nothing stays behind in the run's folder: a
nameless file tests the nearest folder that is there, and no folder is made. Only the token cache,
which belongs to no run, is built if the dataset has none yet.
"""

import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

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
from maxbatch.core.keys import counted
from maxbatch.core.phases import Position
from maxbatch.core.plan import BatchPlan
from maxbatch.data.dataset import Dataset, RowSource
from maxbatch.errors import UserError
from maxbatch.hardware.devices import find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.modes.memory import item_bytes
from maxbatch.modes.method import Check, Method, Passed, Purpose, ResolvedRun
from maxbatch.modes.prepare import Prepared, build, check_replaces_nothing, prepare
from maxbatch.modes.pretraining import PRETRAINING
from maxbatch.modes.start import started
from maxbatch.run_folder.atomic import elsewhere, nearest
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.build import step_rows, traced_step

_NEXT = "Valid: nothing was compiled. Next: compile_only=true"


def validate(
  config: Config, say: Callable[[str], None] = print, *, method: Method = PRETRAINING
) -> None:
  """Checks a run, a line for each check that passes.

  Args:
    config: the run, on any devices, those of a slice that is not here too. A microbatch that is to
      be chosen is checked at the smallest size.
    say: receives the lines.
    method: how it trains.

  Raises:
    UserError: the first check that fails, as the run itself would put it.
  """

  def passed(check: Check) -> None:
    name, detail, more = check
    say(f"{colored('ok', 'green')}   " + for_screen(f"     {name:<13}  {detail}")[5:])
    for line in more:
      say(for_screen(f"  {line}"))

  with started(config, leaves_files=False), ending_together():
    passed(("configuration", f"{len(schema.to_flat(config))} keys", ()))
    prepared = prepare(config, find_devices(config), method, Purpose.VALIDATE, passed=passed)
    _check_prepared(prepared, passed)
    say(for_screen(_NEXT))


def _check_prepared(prepared: Prepared, passed: Passed) -> None:
  """Checks the step, and the folder that the run is to write."""
  resolved, config, plan = prepared.resolved, prepared.config, prepared.plan
  passed(("step", _traced(resolved, prepared.dataset.train), ()))
  check_replaces_nothing(config)
  folder, kept = resolved.folder.path.absolute(), prepared.trainer.abstract_saved
  passed(("folder", _writable(folder), ()))
  if config.checkpoint.enable_checkpointing:
    passed(("checkpoints", _disk_space(config, plan, kept, folder), ()))
    passed(("resume", *_resumable(resolved.given, plan, kept, prepared.dataset, folder)))


def _traced(resolved: ResolvedRun, source: RowSource) -> str:
  """Traces the training step for every microbatch of the run."""
  plan = resolved.plan

  def trace(micro_batch: int) -> None:
    trainer = build(resolved, keep=False)
    traced_step(trainer, step_rows(plan, trainer, source, micro_batch))

  for micro_batch in plan.micro_batches:
    jax.eval_shape(functools.partial(trace, micro_batch))
  shapes = ", ".join(f"{micro_batch:,}" for micro_batch in plan.micro_batches)
  return f"can be traced, for microbatches of {shapes}"


def _writable(folder: Path) -> str:
  """Checks that the folder can be made and written, as far as the nearest one that is there
  tells."""
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
  """Checks that there is disk space for the checkpoints that stay, and for one more while it is
  written.

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
  """Checks by its record that the newest checkpoint is this run's; its arrays are not read.

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
