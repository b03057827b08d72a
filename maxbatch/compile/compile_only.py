"""Compiling without training: the step's programs with their reports, and one size's probe."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from maxbatch.batch.candidates import Candidate, with_size
from maxbatch.batch.plan import BatchPlan, plan_batches
from maxbatch.batch.search import Probe, ProbeSize
from maxbatch.batch.solve import text
from maxbatch.compile.program import (
  DoesNotFitError,
  Program,
  capacity_bytes,
  compile_program,
)
from maxbatch.compile.report import CompileReport, make_report
from maxbatch.config.schema import Config
from maxbatch.data import synthetic
from maxbatch.devices import Device
from maxbatch.errors import UserError
from maxbatch.measure import Timing, measure_step
from maxbatch.prepare import build_trainer, streams
from maxbatch.step import Trainer
from maxbatch.topology import Topology

_GIB = 2**30
REPORT_TEXT, REPORT_JSON = "compile_report.txt", "compile_report.json"


def compile_reports(
  config: Config, plan: BatchPlan, devices: Sequence[Device]
) -> list[CompileReport]:
  """Compiles the step for every microbatch of the run and reports on each.

  On devices that are here the step is timed if it fits; for others the time is estimated.

  Raises:
    UserError: the compiler finds no way to run a step in a device's memory.
  """
  trainer = build_trainer(config, plan, devices)
  return [_report(config, plan, trainer, devices, each) for each in plan.micro_batches]


def make_probe(config: Config, devices: Sequence[Device], layout: Topology) -> ProbeSize:
  """What one microbatch size needs and takes, found by compiling, never by running out of memory."""

  def probe(candidate: Candidate) -> Probe:
    sized = _sized(config, candidate)
    plan = plan_batches(sized.batch, sized.run, layout)
    capacity = capacity_bytes(devices, config.compile.device_memory_gb)
    trainer = build_trainer(sized, plan, devices)
    try:
      report = _try_report(sized, plan, trainer, devices, plan.micro_batch_to_train)
    except DoesNotFitError as error:
      return Probe(candidate.per_device, error.needed_bytes, capacity, fits=False)
    return _as_probe(candidate, report)

  return probe


def _sized(config: Config, candidate: Candidate) -> Config:
  model = config.model
  if candidate.remat_policy:
    model = dataclasses.replace(model, remat_policy=candidate.remat_policy)
  return dataclasses.replace(
    config, batch=with_size(config.batch, candidate.per_device), model=model
  )


def write_reports(reports: Sequence[CompileReport], folder: pathlib.Path) -> None:
  """compile_report.txt and .json in `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / REPORT_TEXT).write_text("\n\n\n".join(map(str, reports)) + "\n", encoding="utf-8")
  content = [report.as_dict() for report in reports]
  (folder / REPORT_JSON).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _report(
  config: Config, plan: BatchPlan, trainer: Trainer, devices: Sequence[Device], micro_batch: int
) -> CompileReport:
  try:
    return _try_report(config, plan, trainer, devices, micro_batch)
  except DoesNotFitError as error:
    size = text(plan.per_device(micro_batch))
    capacity = capacity_bytes(devices, config.compile.device_memory_gb)
    raise UserError(
      f"per_device_batch_size={size}: the step needs {error.needed_bytes / _GIB:.2f} GiB a device, "
      f"which has {capacity / _GIB:.2f}; micro_batch_size=auto finds the largest that fits, "
      "remat_policy=full and a larger ici_fsdp_parallelism make room"
    ) from error


def _try_report(
  config: Config, plan: BatchPlan, trainer: Trainer, devices: Sequence[Device], micro_batch: int
) -> CompileReport:
  """Compiles, reads, and times what can be timed.

  Raises:
    DoesNotFitError: the compiler refuses.
  """
  # The rows' shapes follow from the configuration alone, so the data need not be here.
  source = synthetic.build(config.data, config.batch.max_target_length).train
  program = compile_program(config, plan, trainer, source, micro_batch)
  capacity = capacity_bytes(devices, config.compile.device_memory_gb)
  measured = None
  if not config.compile.compile_topology and program.memory.peak <= capacity:
    measured = _measured(config, plan, trainer, program, micro_batch)
  return make_report(
    plan, trainer, program, micro_batch, capacity, measured, _title(config, plan, devices)
  )


def _measured(
  config: Config, plan: BatchPlan, trainer: Trainer, program: Program, micro_batch: int
) -> Timing:
  return measure_step(
    trainer,
    program.step,
    program.rows,
    streamed=streams(config),
    passes=max(stage.trips for stage in plan.stages if stage.micro_batch == micro_batch),
  )


def _title(config: Config, plan: BatchPlan, devices: Sequence[Device]) -> str:
  where = config.compile.compile_topology or "the devices present"
  slices = config.compile.compile_topology_num_slices
  where = f"{slices} × {where}" if config.compile.compile_topology and slices > 1 else where
  return (
    f"Compile report: {config.model.model_name}, rows of {plan.max_target_length:,} tokens, "
    f"remat_policy {config.model.remat_policy}, on {where}\n"
    f"  {len(devices):,} × {devices[0].device_kind}: {plan.topology}"
  )


def _as_probe(candidate: Candidate, report: CompileReport) -> Probe:
  time = report.time
  measured = time is not None and time.how == "measured"
  return Probe(
    per_device=candidate.per_device,
    peak_bytes=report.program.memory.peak,
    capacity_bytes=report.capacity_bytes,
    fits=report.fits,
    seconds_per_pass=time.per_pass if time else None,
    seconds_rest=time.rest if time else 0.0,
    spread=(time.spread or 0.0) if time else 0.0,
    how="measured" if measured else "estimated",
    coverage=1.0 if measured else min(1.0, report.work.coverage),
    utilisation=report.utilisation,
  )
