"""What is done instead of a run: checks (validate.py), or compilation with its reports."""

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from maxbatch.command_line.screen import for_screen
from maxbatch.compile import cache
from maxbatch.compile.compile_step import check_fits, compile_reports, write_reports
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_file import save_steps
from maxbatch.config.keys.batch import Explore
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.input_report import InputReport, input_report
from maxbatch.errors import UserError
from maxbatch.estimate.compiled_steps import remember
from maxbatch.estimate.step_work import step_work
from maxbatch.hardware.agreement import write_shared_file
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.sharding import num_processes
from maxbatch.modes.method import Method, Purpose
from maxbatch.modes.prepare import Prepared, prepare
from maxbatch.modes.pretraining import PRETRAINING
from maxbatch.modes.start import started
from maxbatch.modes.validate import validate
from maxbatch.run_folder.paths import RunFolder
from maxbatch.tuning.microbatch_size import explore_sizes


def prepare_only(config: Config, *, retune: bool = False, method: Method = PRETRAINING) -> None:
  """Runs validate_only or compile_only: says what it finds, and ends before any training.

  Args:
    config: the run.
    retune: choose anew what the keys leave open, whatever is remembered.
    method: how it trains.

  Raises:
    UserError: something in the configuration or the input does not work.
  """
  if config.compile.validate_only:
    validate(config, method=method)
    return
  with started(config), ending_together():
    target = find_devices(config)
    if isinstance(config.batch.micro_batch_size, Explore):
      cache.enable(config.compile.jax_cache_dir)
      _explore(config, target, method)
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


def _explore(config: Config, target: Target, method: Method) -> None:
  """Ranks every size, with the report of the one recommended."""
  config, prober, sizes_of = method.explored(config, target)
  folder = RunFolder.of(config.run)
  say = functools.partial(_say_and_log, folder.exploration_log)
  chosen, ranking = explore_sizes(config, target, prober, find=sizes_of, say=say)
  print()
  report = prober.reports[ranking.ranked[0].candidate]
  _show([report], folder)
  if report.sampling is None:
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
  on the host, no measurements beside the step, and no frozen parameters."""
  measures = config.noise.gns != "off" or config.noise.gns_from_microbatches
  is_partial = config.model.lora_rank > 0 or config.optimizer.trainable
  is_streamed = config.batch.accumulation == "streamed"
  has_flags = config.compile.compiler_flags != "none" or os.environ.get("LIBTPU_INIT_ARGS")
  on_host = config.optimizer.optimizer_memory_host_offload
  other = measures or is_partial or is_streamed or has_flags or on_host
  is_slice = config.compile.compile_topology and config.compile.compile_topology_num_slices == 1
  if is_slice and not other:
    remember(report, step_work(config))
