"""The pipeline of a run as numbers: stages, repeats, layers and microbatches.

Each microbatch of gradient accumulation is divided into num_pipeline_microbatches. All of a step run
in one timetable, so that the stages fill and empty once per step. accumulation=streamed, one dispatch
per microbatch, has a timetable for each.
"""

import dataclasses
from typing import NamedTuple

from maxbatch.core.keys import counted
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan
from maxbatch.core.solve import samples_per_group
from maxbatch.pipeline_parallel.cost import percent, predicted_bubble
from maxbatch.pipeline_parallel.timetable import TimetableShape


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """The pipeline of a run.

  Attributes:
    schedule: its name.
    stages: devices along the axis `stage`.
    repeats: rounds of a microbatch through them.
    layers: layers of one stage in one repeat.
    num_pipeline_microbatches: pieces of one microbatch of gradient accumulation.
    num_microbatches: microbatches of gradient accumulation in one timetable: all of a step, or 1
      where they are streamed.
    max_num_microbatches: the same for the largest step of the batch schedule.
    timetables: timetables of a step: 1, or its microbatches where they are streamed.
    rows: samples of one pipeline microbatch in each data-parallel group.
    choices: what num_pipeline_microbatches could be instead, this one included.
    forwarding_delay: ticks from computing a result to using it on the next stage, 1 or 2.
    stash: what a stage keeps of a microbatch until its backward: input or residuals.
    is_open: whether num_pipeline_microbatches is still to be chosen from `choices`, by time; until
      then it is the fewest.
  """

  schedule: str
  stages: int
  repeats: int
  layers: int
  num_pipeline_microbatches: int
  num_microbatches: int
  max_num_microbatches: int
  timetables: int
  rows: int
  choices: tuple[int, ...]
  forwarding_delay: int
  stash: str = "input"
  is_open: bool = False

  @property
  def shape(self) -> TimetableShape:
    """The shape of a timetable at the run's batch."""
    return self.shape_of(self.num_microbatches)

  @property
  def shape_of_one_microbatch(self) -> TimetableShape:
    """The shape of one microbatch of gradient accumulation alone."""
    return self.shape_of(1)

  def shape_of(self, num_microbatches: int) -> TimetableShape:
    """Returns the shape of a timetable of so many microbatches of gradient accumulation."""
    return TimetableShape(
      self.stages,
      self.num_pipeline_microbatches * num_microbatches,
      self.repeats,
      self.forwarding_delay,
    )

  def with_num_pipeline_microbatches(self, num_pipeline_microbatches: int) -> "Pipeline":
    """Returns the same with another choice of num_pipeline_microbatches."""
    rows = self.num_pipeline_microbatches * self.rows // num_pipeline_microbatches
    return dataclasses.replace(
      self, num_pipeline_microbatches=num_pipeline_microbatches, rows=rows, is_open=False
    )

  def for_phase(self, plan: BatchPlan, phase: Phase) -> "Pipeline":
    """Returns the same for the microbatch of one stage of the batch schedule."""
    rows = samples_per_group(phase.micro_batch, plan.topology, self.num_pipeline_microbatches)
    return dataclasses.replace(self, rows=rows)

  @property
  def choice(self) -> str:
    """A sentence on what is still to be chosen; empty if there is nothing."""
    if not self.is_open:
      return ""
    listed = ", ".join(map(str, self.choices))
    return (
      f"num_pipeline_microbatches=-1: a run or compile_only=true takes the fastest of {listed}, "
      f"compiling and timing some; shown is {self.num_pipeline_microbatches}, the fewest, which "
      f"num_pipeline_microbatches={self.num_pipeline_microbatches} takes at once"
    )

  def as_dict(self) -> dict[str, object]:
    """Returns the sizes under their keys, for programs."""
    return {
      "pipeline_schedule": self.schedule,
      "stages": self.stages,
      "num_pipeline_repeats": self.repeats,
      "num_layers_per_pipeline_stage": self.layers,
      "num_pipeline_microbatches": self.num_pipeline_microbatches,
      "microbatches_in_a_timetable": self.shape.microbatches,
      "samples_per_microbatch_and_group": self.rows,
      "pipeline_stash": self.stash,
      "bubble": float(predicted_bubble(self.shape)),
      "choice": self.choice,
      "choices": list(self.choices),
    }

  def __str__(self) -> str:
    sizes = [
      f"{self.stages} stages",
      counted(self.repeats, "repeat"),
      counted(self.layers, "layer"),
    ]
    return (
      f"{self.schedule}: {' × '.join(sizes)}; {self.shape.microbatches:,} microbatches in a "
      f"timetable, each of {counted(self.rows, 'sample')} per group of devices; bubble "
      f"{percent(predicted_bubble(self.shape))}; pipeline_stash={self.stash}"
    )


class EvalMicrobatches(NamedTuple):
  """The microbatches of an evaluation's batch, which need not divide as the training batch must: the
  last one is padded with rows of weight zero."""

  microbatches: int
  rows: int
  """Rows of each, in one group of devices."""

  @property
  def capacity(self) -> int:
    """Rows of all microbatches in one data-parallel group, padding included."""
    return self.microbatches * self.rows


def eval_microbatches(pipeline: Pipeline, rows: int) -> EvalMicrobatches:
  """Returns microbatches as large as in training, or smaller if there were too few to fill the stages.

  `rows` are the samples of the batch in each group of devices with the same samples, at least 1.
  """
  min_microbatches = pipeline.forwarding_delay * pipeline.stages
  count = max(-(-rows // pipeline.rows), min(rows, min_microbatches))
  # For this number of microbatches, equal sizes need the least padding.
  rows_each = -(-rows // count)
  return EvalMicrobatches(-(-rows // rows_each), rows_each)
