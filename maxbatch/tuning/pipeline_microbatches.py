"""num_pipeline_microbatches=-1: from a Config that leaves it open to one that has it chosen.

All processes compile together, and every number that decides is process 0's, as for the microbatch
size (microbatch_size.py).
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from maxbatch.batch.from_config import plan_batches
from maxbatch.compile.compile_step import report_or_refusal
from maxbatch.compile.program import DoesNotFitError, capacity_bytes
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_file import made_from
from maxbatch.compile.step_identity import CONFIGURATION
from maxbatch.config.schema import Config
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.hardware.devices import Device, Target
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.training.build import streams
from maxbatch.tuning.microbatch_size import what_it_depends_on
from maxbatch.tuning.pipeline_ranking import KEY, CompiledChoice, Probe, RankedStep, rank
from maxbatch.tuning.processes import Say, agreed, in_process_0
from maxbatch.tuning.remembered import RememberedChoice


class PipelineMicrobatchProber:
  """What one number of microbatches needs and takes in the largest step, found by compiling."""

  def __init__(self, config: Config, devices: Sequence[Device], layout: Topology):
    self._config, self._devices, self._layout = config, devices, layout

  def __call__(self, num_pipeline_microbatches: int) -> CompiledChoice:
    """Compiles this number; measures or estimates it if it fits.

    Raises:
      UserError: a device's memory is not known.
    """
    config, devices = (
      with_num_pipeline_microbatches(self._config, num_pipeline_microbatches),
      self._devices,
    )
    phase = largest_phase(plan_batches(config.batch, config.run, self._layout))
    try:
      report = report_or_refusal(config, devices, self._layout, phase.micro_batch)
    except DoesNotFitError as error:
      capacity = capacity_bytes(devices, config.compile.device_memory_gb)
      return CompiledChoice(max(error.needed_bytes, capacity + 1), capacity, fits=False)
    return _compiled(report)


def choose_num_pipeline_microbatches(
  config: Config,
  place: Target,
  probe: Probe,
  folder: pathlib.Path,
  *,
  forget: bool = False,
  say: Say = print,
) -> Config:
  """The configuration with num_pipeline_microbatches chosen, if it was open and there is a choice.

  Args:
    config: a micro_batch_size that was to be chosen has been chosen.
    place: the devices.
    probe: what one number needs and takes; called in all processes in the same order.
    folder: where choices are remembered.
    forget: measure anew, whatever is remembered.
    say: prints the table and the choice; called in process 0 only.

  Raises:
    UserError: layers or samples do not divide as the schedule asks; or compiled_step cannot be read.
  """
  if config.pipeline.pipeline_schedule == "none":
    return config
  plan = plan_batches(config.batch, config.run, place.layout)
  pipeline = pipeline_of(config, place.layout, plan)
  if not pipeline.is_open:
    return config
  if config.compile.compiled_step:
    return _as_compiled(config, pipeline)
  phase = largest_phase(plan)
  steps = RankedStep(
    pipeline.for_phase(plan, phase), phase.num_microbatches, streamed=streams(config)
  )
  memory, say = _memory(config, place, steps, folder), in_process_0(say)
  remembered = memory.agreed(pipeline.choices, forget=forget, say=say)
  if remembered:
    say(_line(remembered[KEY], str(remembered.get("why"))) + memory.origin)
    return with_num_pipeline_microbatches(config, remembered[KEY])
  ranking = rank(steps, agreed(probe))
  content = {KEY: ranking.chosen, "why": ranking.why()}
  kept = memory.remember(content, ranking.as_dict()["choices"])
  say(f"{_heading(steps)}\n{ranking}\n{_line(ranking.chosen, ranking.why())}{kept}\n")
  return with_num_pipeline_microbatches(config, ranking.chosen)


def with_num_pipeline_microbatches(config: Config, num_pipeline_microbatches: int) -> Config:
  """The configuration with num_pipeline_microbatches chosen."""
  keys = dataclasses.replace(config.pipeline, num_pipeline_microbatches=num_pipeline_microbatches)
  return dataclasses.replace(config, pipeline=keys)


def largest_phase(plan: BatchPlan) -> Phase:
  """The phase whose steps a run is ranked for: as a rule most of its time is spent in such."""
  return max(plan.phases, key=lambda phase: phase.batch)


def _as_compiled(config: Config, pipeline: Pipeline) -> Config:
  """The number that the run's program was compiled for; a file for another run says so later."""
  num_pipeline_microbatches = made_from(config.compile.compiled_step)[CONFIGURATION].get(KEY)
  return (
    with_num_pipeline_microbatches(config, num_pipeline_microbatches)
    if num_pipeline_microbatches in pipeline.choices
    else config
  )


def _compiled(report: CompileReport) -> CompiledChoice:
  time = report.time
  return CompiledChoice(
    peak_bytes=report.program.memory.peak,
    capacity_bytes=report.capacity_bytes,
    fits=report.fits,
    step_seconds=report.step_seconds,
    other_seconds=time.other_of(report.num_microbatches) if time else 0.0,
    how="measured" if time and time.how == "measured" else "estimated",
  )


def _memory(
  config: Config, place: Target, steps: RankedStep, folder: pathlib.Path
) -> RememberedChoice:
  """All that the size of a microbatch depends on, and the steps that are ranked for."""
  depends_on = what_it_depends_on(config, place, ()) | {
    "choices": list(steps.pipeline.choices),
    "samples": steps.pipeline.rows,
    "microbatches": steps.num_microbatches,
    "max_microbatches": steps.pipeline.max_num_microbatches,
  }
  return RememberedChoice(folder, KEY, "-1", depends_on)


def _heading(steps: RankedStep) -> str:
  num_microbatches = (
    f"{steps.num_microbatches:,} microbatches" if steps.num_microbatches > 1 else "1 microbatch"
  )
  apart = (
    ", each with a timetable of its own" if steps.streamed and steps.num_microbatches > 1 else ""
  )
  return (
    f"Pipeline microbatches of {steps.pipeline.schedule} on {steps.pipeline.stages} stages, for steps of "
    f"{num_microbatches}{apart}"
  )


def _line(num_pipeline_microbatches: int, why: str) -> str:
  return f"{KEY} -1: {num_pipeline_microbatches:,} ({why})"
