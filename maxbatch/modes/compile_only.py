"""What is done instead of a run: checks, or compilation with its reports.

validate_only: everything that can be known of a run without compiling it, in seconds.

Nothing is compiled, no array is put on a device, and nothing stays behind in the run's folder: a
nameless file tests the nearest folder that is there, and no folder is made. Only the token cache,
which belongs to no run, is built if the dataset has none yet.
"""

import dataclasses
import datetime
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from maxbatch.batch.from_config import is_rl
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
from maxbatch.compile import cache
from maxbatch.compile.compile_step import check_fits, compile_reports, write_reports
from maxbatch.compile.program import gib
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_file import save_steps
from maxbatch.config import schema
from maxbatch.config.keys.batch import Explore
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.phases import Position
from maxbatch.core.plan import BatchPlan
from maxbatch.data.input_report import InputReport, input_report
from maxbatch.data.rows import Dataset, RowSource
from maxbatch.errors import UserError
from maxbatch.estimate.compiled_steps import remember
from maxbatch.estimate.step_work import step_work
from maxbatch.hardware.agreement import write_shared_file
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.sharding import num_processes
from maxbatch.modes.method import Check, Method, Passed, Purpose, ResolvedRun
from maxbatch.modes.prepare import Prepared, build, check_replaces_nothing, item_bytes, prepare
from maxbatch.modes.pretraining import PRETRAINING
from maxbatch.modes.start import connected_devices, started
from maxbatch.run_folder.atomic import elsewhere, nearest
from maxbatch.run_folder.paths import RunFolder, remembered_choices
from maxbatch.training.build import step_rows, traced_step
from maxbatch.tuning.microbatch_size import explore_sizes
from maxbatch.tuning.remembered_probes import remembering

_NEXT = "Valid: nothing was compiled. Next: compile_only=true"


def validate(
  config: Config, say: Callable[[str], None] = print, *, method: Method = PRETRAINING
) -> None:
  """Checks a run, a line for each check that passes.

  Args:
    config: the run, on any devices. A microbatch that is to be chosen is checked at its smallest.

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
  """Checks that the folder can be made and written, by the nearest one that is there."""
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
  """Checks the disk space for the checkpoints that stay, and for one more while it is written.

  Raises:
    UserError: there is not, and the run is to take place on this machine.
  """
  each = sum(math.prod(x.shape) * item_bytes(x) for x in jax.tree.leaves(state))
  keys = config.checkpoint
  keep, period = keys.max_num_checkpoints_to_keep, keys.checkpoint_keep_period
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


def prepare_only(config: Config, *, retune: bool = False, method: Method = PRETRAINING) -> None:
  """Runs validate_only or compile_only: says what it finds, and ends before any training.

  Raises:
    UserError: something in the configuration or the input does not work.
  """
  if config.compile.validate_only:
    validate(config, method=method)
    return
  with started(config), ending_together():
    target = connected_devices(config)
    batch = config.batch
    if any(
      isinstance(size, Explore)
      for size in (batch.micro_batch_size, batch.eval_per_device_batch_size)
    ):
      cache.enable(config.compile.jax_cache_dir)
      _explore(config, target, method, retune=retune)
    else:
      _compile(prepare(config, target, method, Purpose.COMPILE, retune=retune))


def _compile(prepared: Prepared) -> None:
  """Compiles every step of the run, with a report of each; with what samples for it, if it does."""
  config, plan, trainer = prepared.config, prepared.plan, prepared.trainer
  sampler = prepared.resolved.training.sampler
  reports = compile_reports(config, plan, trainer, prepared.resolved.target.devices, sampler)
  if not sampler:
    known = input_function(config, plan, num_processes(trainer.mesh))
    reports[-1] = dataclasses.replace(reports[-1], input_function=known)
  _show(reports, prepared.resolved.folder)
  if not sampler:
    _remember(config, "\n\n".join(map(str, reports)))
  if config.compile.save_compiled_step:
    steps = {each.micro_batch: each.program.step for each in reports}
    save_steps(config, plan, trainer, prepared.dataset.train, steps)
  check_fits(config, plan, reports)
  _check_estimated(reports)


def input_function(config: Config, plan: BatchPlan, num_hosts: int) -> InputReport | None:
  """Returns what is known of the run's data; None, and a line, where they are not here to compile for."""
  try:
    return input_report(config.data, plan, num_hosts)
  except UserError as error:
    print(f"The run's data are not looked at: {error}\n", flush=True)
    return None


def _explore(config: Config, target: Target, method: Method, *, retune: bool) -> None:
  """Ranks the sizes, with the report of the one recommended. What is compiled for a slice is remembered."""
  config, prober, sizes_of = method.explored(config, target)
  folder, probe = RunFolder.of(config.run), prober
  say = functools.partial(_say_and_log, folder.exploration_log)
  of_text = isinstance(config.batch.micro_batch_size, Explore) and not is_rl(config.rl)
  if of_text and config.compile.compile_topology:
    known = remembered_choices()
    probe = remembering(prober, config, target, known, retune=retune, say=say)
  chosen, ranking = explore_sizes(config, target, probe, find=sizes_of, say=say)
  print()
  best = ranking.ranked[0].candidate
  if best not in prober.reports:
    prober(best)  # It is remembered without its report.
  report = prober.reports[best]
  _show([report], folder)
  if report.sampling is None and isinstance(config.batch.micro_batch_size, Explore):
    _remember(chosen, f"{ranking}\n\n{report}")
  write_shared_file(folder.exploration, json.dumps(ranking.as_dict(), indent=2) + "\n")
  _check_estimated([report])


def _check_estimated(reports: Sequence[CompileReport]) -> None:
  """Ends with what is missing, once all that is known has been reported. Raises UserError: the compiler's
  text of a step is not understood well enough for an estimate of its time."""
  if missing := next((each.not_estimated for each in reports if each.not_estimated), ""):
    raise UserError(missing)


def _say_and_log(log: Path, line: str) -> None:
  """Prints a line, and adds it to a log with the time: an exploration may take hours."""
  print(line, flush=True)
  now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
  try:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
      file.write(f"{now} {line}\n")
  except OSError as error:
    raise UserError(f"{log} cannot be written: {error.strerror or error}") from None


def _show(reports: Sequence[CompileReport], folder: RunFolder) -> None:
  print(for_screen("\n\n\n".join(map(str, reports))))
  written = write_reports(reports, folder.path)
  print("\n" + for_screen(f"Written: {', '.join(map(str, written))}"), flush=True)


def _remember(config: Config, report: str) -> None:
  """Keeps the times of one slice's steps for estimates, which know of no flags of the compiler, no state
  on the host or divided over data, no measurements beside the step, no frozen parameters, and no other network."""
  measures = config.noise.gns != "off" or config.noise.gns_from_microbatches
  is_partial = config.model.lora_rank > 0 or config.optimizer.trainable
  is_streamed = config.batch.accumulation == "streamed"
  has_flags = config.compile.compiler_flags != "none" or os.environ.get("LIBTPU_INIT_ARGS")
  on_host = config.optimizer.optimizer_memory_host_offload
  on_host |= config.optimizer.shard_optimizer_over_data
  other = measures or is_partial or is_streamed or has_flags or on_host
  keys = config.compile
  is_slice = keys.compile_topology and keys.compile_topology_num_slices == 1
  if is_slice and not (other or keys.compile_topology_network_gbps):
    remember(report, step_work(config))
