"""Compiling without training: the step's programs with their reports, and one size's probe."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from maxbatch.batch.from_config import eval_plan, plan_batches
from maxbatch.command_line.screen import GIB
from maxbatch.compile.measured_time import Timing, measure_evaluation, measure_step
from maxbatch.compile.program import (
  DoesNotFitError,
  capacity_bytes,
  compile_eval_program,
  compile_program,
  gib,
  memory_of,
  memory_suggestions,
  refuse_if_too_large,
  state_bytes,
)
from maxbatch.compile.report import CompileReport, Sampling, make_report
from maxbatch.compile.traced_flops import named_bytes, step_flops
from maxbatch.config.schema import Config
from maxbatch.core.keys import text
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import RowSource
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all, write_shared_file
from maxbatch.hardware.devices import Device
from maxbatch.models.remat import NAMED, with_kept
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.build import build_trainer, step_rows, traced_step
from maxbatch.training.step import Trainer

_LEAST_SAVING = 0.002
"""Of a step's products: keeping a tensor that saves less is not worth a compilation."""
_PASSES_OF_TRAINING = 3
"""Forward, and twice as much backward, of which an evaluation does the first."""


class Sampler(Protocol):
  """What samples what a step is fed, on the devices of the step or on others."""

  def compiled(self, config: Config, trainer: Trainer) -> tuple[Sampling, Callable[[], Sampling]]:
    """Compiles it; returns what is known then, and what also tells its time, measured when called."""
    ...


def compile_reports(
  config: Config,
  plan: BatchPlan,
  trainer: Trainer,
  devices: Sequence[Device],
  sampler: Sampler | None = None,
) -> list[CompileReport]:
  """Compiles the step for every microbatch of the run and reports on each.

  On devices that are here the step is timed if it fits; for others the time is estimated.

  Args:
    sampler: where a step trains on what is sampled: compiled and timed too.

  Raises:
    UserError: the compiler finds no way to run a step in a device's memory.
  """
  results = list[CompileReport]()
  for each in plan.micro_batches:
    try:
      results.append(try_report(config, plan, trainer, devices, each, sampler))
    except DoesNotFitError as error:
      capacity, samples = (
        capacity_bytes(devices, config.compile.device_memory_gb),
        sampler is not None,
      )
      raise _too_large(
        config, plan, each, error.needed_bytes, capacity, with_sampler=samples
      ) from error
  return results


def report_or_refusal(
  config: Config, devices: Sequence[Device], layout: Topology, micro_batch: int | None = None
) -> CompileReport:
  """Compiles the step for one microbatch; measures or estimates it if it fits.

  Args:
    micro_batch: samples of a microbatch on all devices; None: the run's own.

  Raises:
    DoesNotFitError: the compiler refuses, or the step runs out of memory while it is timed.
    UserError: a device's memory is not known.
  """
  plan = plan_batches(config.batch, config.run, layout, config.optimizer)
  trainer = build_trainer(config, plan, devices)
  return try_report(config, plan, trainer, devices, micro_batch or plan.micro_batch_to_train)


def write_reports(
  reports: Sequence[CompileReport], folder: pathlib.Path
) -> tuple[pathlib.Path, pathlib.Path]:
  """Writes compile_report.txt and .json in `folder`; returns their paths.

  Raises:
    UserError: they cannot be written.
  """
  as_text, as_json = RunFolder(folder).compile_report_text, RunFolder(folder).compile_report_json
  content = [report.as_dict() for report in reports]
  write_shared_file(as_text, "\n\n\n".join(map(str, reports)) + "\n")
  write_shared_file(as_json, json.dumps(content, indent=2) + "\n")
  return as_text, as_json


def placeholder_rows(config: Config) -> RowSource:
  """Returns rows of the run's shapes, which follow from its keys alone: the data need not be
  here."""
  data = dataclasses.replace(config.data, dataset_type="synthetic")
  return build_dataset(data, config.batch.max_target_length).train


class Saving(NamedTuple):
  """What it is worth to keep one of a layer's tensors for the backward pass."""

  name: str
  flops: float
  """Of a microbatch's matrix products, on all devices, that are not computed again."""
  bytes: int
  """Of the tensor in one layer, on all devices."""


def remat_savings(config: Config, plan: BatchPlan, devices: Sequence[Device]) -> list[Saving]:
  """Returns the tensors of a layer that are worth keeping, the best by FLOPs per byte first.

  Args:
    config: with any remat_policy; its step is only traced, in about a second for each tensor.
  """
  # One body for all layers: what a tensor is worth does not depend on how they are compiled.
  model = dataclasses.replace(config.model, scan_layers=True)

  def traced(kept: Sequence[str]) -> tuple[float, dict[str, int]]:
    run = dataclasses.replace(config, model=with_kept(model, kept))
    trainer = build_trainer(run, plan, devices)
    rows = step_rows(plan, trainer, placeholder_rows(run), plan.micro_batch_to_train)
    jaxpr = traced_step(trainer, rows).jaxpr
    return step_flops(jaxpr).total, named_bytes(jaxpr.jaxpr)

  all_flops, sizes = traced(())
  saved = [(name, all_flops - traced([name])[0]) for name in NAMED[1:] if name in sizes]
  results = [Saving(name, flops, sizes[name]) for name, flops in saved]
  worth = [one for one in results if one.flops > _LEAST_SAVING * all_flops]
  return sorted(worth, key=lambda one: -one.flops / one.bytes)


def check_fits(config: Config, plan: BatchPlan, reports: Sequence[CompileReport]) -> None:
  """Refuses a run whose step compiles but needs more memory than a device has, once reported.

  Raises:
    UserError: with suggested fixes.
  """
  for report in reports:
    if not report.fits:
      needed = report.peak
      capacity, samples = report.capacity_bytes, report.sampling is not None
      raise _too_large(config, plan, report.micro_batch, needed, capacity, with_sampler=samples)


def check_device_memory(
  config: Config, plan: BatchPlan, step: jax.stages.Compiled, micro_batch: int, platform: str
) -> None:
  """Holds a run to device_memory_gb, where that is set.

  Raises:
    UserError: its compiled step needs more.
  """
  limit = int(config.compile.device_memory_gb * GIB)
  if limit and (needed := memory_of(step, platform).peak) > limit:
    raise _too_large(config, plan, micro_batch, needed, limit)


def _too_large(
  config: Config,
  plan: BatchPlan,
  micro_batch: int,
  needed_bytes: int,
  capacity: int,
  *,
  with_sampler: bool = False,
) -> UserError:
  size, what = f"per_device_batch_size={text(plan.per_device(micro_batch))}", "the step needs"
  if with_sampler:
    size, what = f"micro_batch_size={micro_batch}", "step and rollout need"
  # Who ran out of memory while running does not say how much was missing.
  needed = gib(needed_bytes) if needed_bytes > capacity else "more memory"
  return UserError(
    f"{size}: {what} {needed} a device, which has {gib(capacity)}; micro_batch_size=auto finds the "
    f"largest that fits; {memory_suggestions(config)}"
  )


def try_report(
  config: Config,
  plan: BatchPlan,
  trainer: Trainer,
  devices: Sequence[Device],
  micro_batch: int,
  sampler: Sampler | None = None,
) -> CompileReport:
  """Compiles, reads, and times what can be timed.

  Raises:
    DoesNotFitError: the compiler refuses, or the step runs out of memory while it is timed.
  """
  program = compile_program(config, plan, trainer, placeholder_rows(config), micro_batch)
  capacity = capacity_bytes(devices, config.compile.device_memory_gb)
  sampled, timed = sampler.compiled(config, trainer) if sampler else (None, lambda: None)
  state = state_bytes(trainer.abstract).total
  needed = sampled.largest(program.memory, state) if sampled else program.memory.peak
  count = plan.largest_phase(micro_batch).num_microbatches
  measured = _measured(
    config,
    needed <= capacity,
    lambda: measure_step(
      trainer, program.step, program.rows, streamed=program.streamed, num_microbatches=count
    ),
  )
  sampled = timed() if measured else sampled
  title = _title(config, plan, trainer)
  network = config.compile.compile_topology_network_gbps
  shown = measured, title, sampled
  return make_report(plan, trainer, program, micro_batch, capacity, *shown, network_gbps=network)


def eval_report(config: Config, devices: Sequence[Device], layout: Topology) -> CompileReport:
  """Compiles the evaluation of one batch; measures or estimates it if it fits.

  Returns:
    The report of an evaluation as of a step, whose microbatches are its batches.

  Raises:
    DoesNotFitError: the compiler refuses, or it runs out of memory while it is timed.
    UserError: a device's memory is not known.
  """
  plan = plan_batches(config.batch, config.run, layout, config.optimizer)
  trainer = build_trainer(config, plan, devices)
  program = compile_eval_program(config, plan, trainer, placeholder_rows(config))
  capacity = capacity_bytes(devices, config.compile.device_memory_gb)
  fits = program.memory.peak <= capacity
  measured = _measured(
    config, fits, lambda: measure_evaluation(trainer, program.step, program.rows)
  )
  whole = eval_plan(config.batch, config.run, layout, plan.per_device(plan.eval_batch))
  title = _title(config, plan, trainer).replace("Compile report", "Compile report of evaluation", 1)
  # An evaluation's timetable is its own, and is not in the estimate of one.
  alone = dataclasses.replace(trainer, pipeline=None)
  report = make_report(whole, alone, program, plan.eval_batch, capacity, measured, title)
  return dataclasses.replace(
    report, model_flops_per_token=report.model_flops_per_token / _PASSES_OF_TRAINING
  )


def _measured(config: Config, fits: bool, measure: Callable[[], Timing]) -> Timing | None:
  """Returns the time where the program fits and its devices are here.

  Raises:
    DoesNotFitError: it runs out of memory.
  """
  # All processes measure or none does: each waits for the others in the step's reductions.
  if not broadcast_one_to_all(fits) or config.compile.compile_topology:
    return None
  try:
    return measure()
  except jax.errors.JaxRuntimeError as error:
    # The compiler counts one program; others, or fragments, may hold what it needs.
    refuse_if_too_large(error)
    raise


def _title(config: Config, plan: BatchPlan, trainer: Trainer) -> str:
  devices, flags = list(trainer.mesh.devices.flat), trainer.compiler_flags
  where = config.compile.compile_topology or "the devices present"
  slices = config.compile.compile_topology_num_slices
  where = f"{slices} × {where}" if config.compile.compile_topology and slices > 1 else where
  return (
    f"Compile report: {config.model.model_name}, rows of {plan.max_target_length:,} tokens, "
    f"remat_policy {config.model.remat_policy}, on {where}\n"
    f"  {len(devices):,} × {devices[0].device_kind}: {plan.topology}"
    + (f"\n  {trainer.pipeline}" if trainer.pipeline else "")
    + (f"\n  {trainer.formats}" if trainer.formats else "")
    + (f"\n  compiler flags: {flags}{flags.note}" if flags.flags else "")
  )
