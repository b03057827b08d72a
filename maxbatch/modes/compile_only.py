"""What is done instead of a run: checks, or compilation with its reports."""

import json
from collections.abc import Sequence
from pathlib import Path

from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.plan import plan_batches
from maxbatch.batch.topology import Topology, topology
from maxbatch.compile import cache
from maxbatch.compile.compile_step import (
  check_fits,
  compile_reports,
  placeholder_rows,
  write_reports,
)
from maxbatch.compile.report import CompileReport
from maxbatch.compile.steps import save_steps
from maxbatch.config.schema import Config, Explore
from maxbatch.errors import UserError
from maxbatch.hardware.compile_devices import devices_of
from maxbatch.hardware.devices import Device, num_slices
from maxbatch.modes.resolve import resolve
from maxbatch.modes.validate import validate
from maxbatch.pipeline_parallel.unused_keys import check_unused
from maxbatch.training.build import build_trainer
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.microbatch_size import Target, explore_sizes
from maxbatch.tuning.prober import Prober


def is_run(config: Config) -> bool:
  """Whether there is something to train, not only to check or compile.

  Raises:
    UserError: keys that exclude each other, a run on devices that are not here, or keys
      without effect.
  """
  check_unused(config.pipeline)
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
      "can run; with compile_only=true or validate_only=true it works"
    )
  if keys.compiled_step and (instead or keys.save_compiled_step):
    other = "save_compiled_step" if keys.save_compiled_step else "compile_only or validate_only"
    raise UserError(
      f"compiled_step={keys.compiled_step} runs what was compiled before, and {other} asks for "
      'compiling; keep one of them, for example with compiled_step=""'
    )
  return not instead


def prepare_only(config: Config, *, forget: bool = False) -> None:
  """validate_only or compile_only: says what it finds, and ends before any training.

  Raises:
    UserError: something in the configuration or the input does not work.
  """
  devices = devices_of(config)
  if config.compile.validate_only:
    validate(config, devices)
    return
  cache.enable(config.compile.jax_cache_dir)
  layout = topology(config.mesh, len(devices), num_slices(devices))
  folder = Path(config.run.base_output_directory) / config.run.run_name
  if isinstance(config.batch.micro_batch_size, Explore):
    _explore(config, devices, layout, folder)
    return
  config = resolve(config, devices, layout, forget=forget)
  plan = plan_batches(config.batch, config.run, layout)
  learning_rate(config.optimizer, plan, config.run.schedule_unit)
  print(f"{plan}\n", flush=True)
  reports = compile_reports(config, plan, devices)
  _show(reports, folder)
  if config.compile.save_compiled_step:
    steps = {each.micro_batch: each.program.step for each in reports}
    trainer = build_trainer(config, plan, devices)
    save_steps(config, plan, trainer, placeholder_rows(config), steps)
  check_fits(config, plan, reports)


def _explore(config: Config, devices: Sequence[Device], layout: Topology, folder: Path) -> None:
  """Every size, ranked, and the report of the one recommended."""
  if resolve_accumulation(config, layout) != config:
    raise UserError(
      "micro_batch_size=explore: the model's samples depend on each other, so that a step has one "
      "pass of the whole batch; micro_batch_size=none is the only size"
    )
  if (
    config.pipeline.pipeline_schedule != "none" and config.pipeline.num_pipeline_microbatches == -1
  ):
    print(
      "num_pipeline_microbatches=-1: every size is tried with the fewest microbatches that work; "
      "compile_only=true with the size that you take ranks the others too",
      flush=True,
    )
  prober = Prober(config, devices, layout)
  _, found = explore_sizes(config, Target(devices, layout), prober)
  report = prober.reports[found.ranked[0].candidate]
  print()
  _show([report], folder)
  written = folder / "exploration.json"
  written.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")


def _show(reports: Sequence[CompileReport], folder: Path) -> None:
  print("\n\n\n".join(map(str, reports)))
  written = write_reports(reports, folder)
  print(f"\nWritten: {', '.join(map(str, written))}", flush=True)
