"""What is done instead of a run: checks, or compilation with its reports."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence

from maxbatch.command_line.screen import for_screen
from maxbatch.compile import cache
from maxbatch.compile.compile_step import (
  Sampler,
  check_fits,
  compile_reports,
  placeholder_rows,
  write_reports,
)
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_file import check_replaces_no_other, save_steps
from maxbatch.config.keys.batch import Explore
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.data.input_report import InputReport, input_report
from maxbatch.errors import UserError
from maxbatch.estimate.compiled_steps import remember
from maxbatch.estimate.step_work import step_work
from maxbatch.hardware.agreement import write_shared_file
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.sharding import num_processes
from maxbatch.modes.resolve import ResolvedRun, resolve
from maxbatch.modes.start import started
from maxbatch.modes.validate import validate
from maxbatch.pipeline_parallel.layout import check_unused_keys
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.build import build_trainer
from maxbatch.training.step import Trainer
from maxbatch.tuning.candidates import Candidate, sizes_of
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.microbatch_size import explore_sizes
from maxbatch.tuning.prober import Prober


def is_run(config: Config) -> bool:
  """Whether there is something to train, not only to check or compile.

  Raises:
    UserError: keys that exclude each other, a run on devices that are not here, keys without
      effect, or a file that a compiled step would replace.
  """
  check_unused_keys(config.pipeline)
  keys = config.compile
  if keys.validate_only and keys.compile_only:
    raise UserError(
      "validate_only=true and compile_only=true: one of them; validate_only=true first, it takes "
      "seconds"
    )
  instead = keys.validate_only or keys.compile_only
  if keys.compile_topology and not instead:
    raise UserError(
      f"compile_topology={keys.compile_topology} names devices that are not here, on which nothing "
      "can run; compile for them with compile_only=true, or check with validate_only=true"
    )
  if keys.compiled_step and (instead or keys.save_compiled_step):
    other = "save_compiled_step" if keys.save_compiled_step else "compile_only or validate_only"
    raise UserError(
      f"compiled_step={keys.compiled_step} runs what was compiled before, and {other} asks for "
      'compiling; keep one of them, for example with compiled_step=""'
    )
  if keys.save_compiled_step:
    check_replaces_no_other(keys.save_compiled_step)
  return not instead


def prepare_only(config: Config, *, forget: bool = False) -> None:
  """validate_only or compile_only: says what it finds, and ends before any training.

  Raises:
    UserError: something in the configuration or the input does not work.
  """
  if config.compile.validate_only:
    validate(config)
    return
  with started(config), ending_together():
    target = find_devices(config)
    cache.enable(config.compile.jax_cache_dir)
    if isinstance(config.batch.micro_batch_size, Explore):
      _explore(config, target)
    else:
      run = resolve(config, target, forget=forget)
      compile_run(run, build_trainer(run.config, run.plan, target.devices))


def compile_run(run: ResolvedRun, trainer: Trainer, sampler: Sampler | None = None) -> None:
  """Compiles every step of the run, with a report of each; with what samples for it, if it does."""
  config, plan, devices = run.config, run.plan, run.target.devices
  print(f"{for_screen(str(plan))}\n", flush=True)
  reports = compile_reports(config, plan, trainer, devices, sampler)
  if not sampler:
    found = input_function(config, plan, num_processes(trainer.mesh))
    reports[-1] = dataclasses.replace(reports[-1], input_function=found)
  _show(reports, run.folder)
  if not sampler:
    _remember(config, "\n\n".join(map(str, reports)))
  if config.compile.save_compiled_step:
    steps = {each.micro_batch: each.program.step for each in reports}
    save_steps(config, plan, trainer, placeholder_rows(config), steps)
  check_fits(config, plan, reports)


def input_function(config: Config, plan: BatchPlan, num_hosts: int) -> InputReport | None:
  """What is known of the run's data; None, and a line, where they are not here to compile for."""
  try:
    return input_report(config.data, plan, num_hosts)
  except UserError as error:
    print(f"The run's data are not looked at: {error}\n", flush=True)
    return None


def _explore(config: Config, target: Target) -> None:
  """Every size, ranked, and the report of the one recommended."""
  if resolve_accumulation(config, target.layout) != config:
    raise UserError(
      "micro_batch_size=explore: the model's samples depend on each other, so that a step has one "
      "microbatch of the whole batch; micro_batch_size=none is the only size"
    )
  if (
    config.pipeline.pipeline_schedule != "none" and config.pipeline.num_pipeline_microbatches == -1
  ):
    print(
      "num_pipeline_microbatches=-1: every size is tried with the fewest microbatches that work; "
      "compile_only=true with the size that you take ranks the others too",
      flush=True,
    )
  rank_sizes(config, target, Prober(config, target.devices, target.layout))


def rank_sizes(
  config: Config,
  target: Target,
  prober: Prober,
  find: Callable[[Config, Topology], Sequence[Candidate]] = sizes_of,
) -> None:
  """Ranks every size that explore asks for, with the report of the one recommended."""
  chosen, found = explore_sizes(config, target, prober, find=find)
  folder = RunFolder.of(config.run)
  print()
  report = prober.reports[found.ranked[0].candidate]
  _show([report], folder)
  if find is sizes_of:
    _remember(chosen, f"{found}\n\n{report}")
  write_shared_file(folder.exploration, json.dumps(found.as_dict(), indent=2) + "\n")


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
