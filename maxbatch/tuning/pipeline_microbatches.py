"""num_pipeline_microbatches=-1: from a Config that leaves it open to one that has it chosen.

All processes compile together, and every number that decides is process 0's, as for the microbatch
size (microbatch_size.py).
"""

import dataclasses
import pathlib

from maxbatch.batch.from_config import plan_batches
from maxbatch.compile.compile_step import report_or_refusal
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_file import made_from
from maxbatch.compile.step_identity import CONFIGURATION
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan
from maxbatch.hardware.devices import Target
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.training.build import streams
from maxbatch.tuning.microbatch_size import what_it_depends_on
from maxbatch.tuning.pipeline_ranking import KEY, Probe, RankedStep, rank
from maxbatch.tuning.remembered import Made, RememberedChoice
from maxbatch.tuning.search import CompilingProber, Say, agreed


class PipelineMicrobatchProber(CompilingProber[int]):
  """Finds what one number of microbatches needs and takes in the largest step."""

  def _with(self, size: int) -> Config:
    return with_num_pipeline_microbatches(self._config, size)

  def _compiled(self, config: Config) -> CompileReport:
    phase = largest_phase(plan_batches(config.batch, config.run, self._layout, config.optimizer))
    return report_or_refusal(config, self._devices, self._layout, phase.micro_batch)


def choose_num_pipeline_microbatches(
  config: Config,
  place: Target,
  probe: Probe,
  folder: pathlib.Path,
  *,
  retune: bool = False,
  say: Say = print,
  plan: BatchPlan | None = None,
) -> Config:
  """Returns the configuration with num_pipeline_microbatches chosen, if it was open.

  Args:
    config: a micro_batch_size that was to be chosen has been chosen.
    probe: what one number needs and takes; called in all processes in the same order.
    say: prints the table and the choice; called in process 0 only.
    plan: the run's, where it is known already.

  Raises:
    UserError: layers or samples do not divide as the schedule asks; or compiled_step cannot be read.
  """
  if config.pipeline.pipeline_schedule == "none":
    return config
  plan = plan or plan_batches(config.batch, config.run, place.layout, config.optimizer)
  pipeline = pipeline_of(config, place.layout, plan)
  if not pipeline.is_open:
    return config
  if config.compile.compiled_step:
    # The number that the run's program was compiled for; a file for another run says so later.
    number = made_from(config.compile.compiled_step)[CONFIGURATION].get(KEY)
    return with_num_pipeline_microbatches(config, number) if number in pipeline.choices else config
  phase = largest_phase(plan)
  steps = RankedStep(
    pipeline.for_phase(plan, phase), phase.num_microbatches, streamed=streams(config)
  )
  # All that the size of a microbatch depends on, and the steps that are ranked for.
  depends_on = what_it_depends_on(config, place, ()) | steps.as_dict()

  def make() -> Made:
    ranking = rank(steps, agreed(probe))
    heading = f"{_heading(steps)}\n{ranking}\n"
    return Made(ranking.chosen, ranking.why(), ranking.as_dict()["choices"], heading)

  memory = RememberedChoice(folder, KEY, "-1", depends_on)
  number = memory.recalled_or_made(
    pipeline.choices,
    make,
    lambda number, why: f"{KEY} -1: {number:,} ({why})",
    retune=retune,
    say=say,
  )
  return with_num_pipeline_microbatches(config, number)


def with_num_pipeline_microbatches(config: Config, num_pipeline_microbatches: int) -> Config:
  """Returns the configuration with num_pipeline_microbatches chosen."""
  keys = dataclasses.replace(config.pipeline, num_pipeline_microbatches=num_pipeline_microbatches)
  return dataclasses.replace(config, pipeline=keys)


def largest_phase(plan: BatchPlan) -> Phase:
  """Returns the phase that a run is ranked for: as a rule most of its time is spent in it."""
  return max(plan.phases, key=lambda phase: phase.batch)


def _heading(steps: RankedStep) -> str:
  num_microbatches = counted(steps.num_microbatches, "microbatch", "microbatches")
  apart = (
    ", each with a timetable of its own" if steps.streamed and steps.num_microbatches > 1 else ""
  )
  return (
    f"Pipeline microbatches of {steps.pipeline.schedule} on {steps.pipeline.stages} stages, for steps of "
    f"{num_microbatches}{apart}"
  )
