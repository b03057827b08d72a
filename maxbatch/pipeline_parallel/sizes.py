"""The pipeline of a run as numbers: stages, repeats, layers and microbatches.

Each microbatch of gradient accumulation is divided into num_pipeline_microbatches. All of a step run
in one timetable, so that the stages fill and empty once per step. accumulation=streamed, one dispatch
per microbatch, has a timetable for each.

The cost of a timetable in lockstep: how long each tick takes, and the bubble.

A tick takes the time of a forward if any stage has a forward in it, plus that of a backward if any
stage has a backward. The other stages are idle: their program computes on data that nothing uses.
The program skips what no stage needs in a tick: so there are fewer losses than forwards when there are
repeats, and ticks with only a forward or only a backward during warm-up and cool-down.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from maxbatch.core.keys import counted
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan
from maxbatch.core.solve import samples_per_group
from maxbatch.pipeline_parallel.schedule import Timetable, TimetableShape, schedule_named

EVERY_TICK = ""
"""What runs in every tick, in no operation's scope: the exchange and the buffers."""
OPERATIONS = ("forward", "embedding", "loss", "backward", "embedding_backward")
ONCE_PER_MICROBATCH = ("embedding", "loss", "embedding_backward")
"""Operations that run once per microbatch, however long the warm-up is."""
_SCOPE = "tick_"


@dataclasses.dataclass(frozen=True)
class PassCosts:
  """Time of one forward and one backward of one model chunk, in any unit.

  A backward has two products for each of the forward; the schedules' bubble does not depend on it.
  """

  forward: int = 1
  backward: int = 2


BACKWARD_TWICE_FORWARD = PassCosts()


@dataclasses.dataclass(frozen=True)
class TickTimes:
  """When the forward and the backward of a tick begin, and when the tick ends."""

  forward_start: int
  backward_start: int
  end: int


def tick_times(table: Timetable, costs: PassCosts = BACKWARD_TWICE_FORWARD) -> list[TickTimes]:
  """Returns the times of all ticks, the first of which begins at 0."""
  times, now = [], 0
  for row in table.ticks:
    backward = now + (costs.forward if any(cell.forward for cell in row) else 0)
    end = backward + (costs.backward if any(cell.backward for cell in row) else 0)
    times.append(TickTimes(now, backward, end))
    now = end
  return times


def bubble(table: Timetable, costs: PassCosts = BACKWARD_TWICE_FORWARD) -> Fraction:
  """Returns the idle share of the time of all stages, counted cell by cell."""
  times = tick_times(table, costs)
  total = (times[-1].end if times else 0) * table.shape.stages
  busy = sum(
    bool(cell.forward) * costs.forward + bool(cell.backward) * costs.backward
    for row in table.ticks
    for cell in row
  )
  return Fraction(total - busy, total) if total else Fraction(0)


def predicted_bubble(shape: TimetableShape) -> Fraction:
  """Returns the bubble by formula: h(p−1) / (v·m + h(p−1)).

  Without delayed forwarding (h = 1) and repeats (v = 1) this is (p−1) / (m + p−1) of GPipe (Huang et
  al. 2019); dividing the bubble by v is from Narayanan et al. 2021. It holds for the four schedules
  in lockstep with v·m ≥ h, not for any timetable; the tests compare it with `bubble`.
  """
  return Fraction(shape.warmup_ticks, shape.forwards_per_stage + shape.warmup_ticks)


def imbalance(loads: Sequence[int | Fraction]) -> Fraction:
  """Returns by how much the busiest stage exceeds the mean: 0 when all stages compute the same."""
  return max(loads) * Fraction(len(loads)) / sum(loads) - 1


def percent(share: Fraction) -> str:
  """Returns a share as text: 3/35 is 8.6%."""
  return f"{float(share):.1%}"


def scope_name(operation: str) -> str:
  """Returns the jax.named_scope of an operation, by which reports find it in the program."""
  return _SCOPE + operation


def operation_in_path(path: str) -> str:
  """Returns the innermost operation in a path of scope names; EVERY_TICK if there is none."""
  names = [word for word in re.findall(rf"\b{_SCOPE}(\w+)", path) if word in OPERATIONS]
  return names[-1] if names else EVERY_TICK


def ticks_by_operation(schedule: str, shape: TimetableShape) -> Mapping[str, int]:
  """Returns, for each operation, the ticks in which any stage has it; all ticks under EVERY_TICK.

  Every stage runs its v·m forwards in consecutive ticks, h ticks after the previous stage. So
  v·m + h(p−1) ticks have a forward (if v·m ≥ h), and as many a backward.
  """
  busy = shape.forwards_per_stage + shape.warmup_ticks
  ticks = {EVERY_TICK: schedule_named(schedule).first_backward(shape) + busy}
  return ticks | {
    work: shape.microbatches if work in ONCE_PER_MICROBATCH else busy for work in OPERATIONS
  }


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """The pipeline of a run.

  Attributes:
    schedule: its name.
    stages: devices along the axis `stage`.
    repeats: rounds of a microbatch through them.
    layers: layers of one stage in one repeat.
    num_pipeline_microbatches: pieces of one microbatch of gradient accumulation.
    num_microbatches: of gradient accumulation in a timetable: all of a step, or 1 if streamed.
    max_num_microbatches: the same for the largest step of the batch schedule.
    timetables: timetables of a step: 1, or its microbatches where they are streamed, or the halves of these
      where they are compared.
    rows: samples of one pipeline microbatch in each data-parallel group.
    choices: what num_pipeline_microbatches could be instead, this one included.
    forwarding_delay: ticks from computing a result to using it on the next stage, 1 or 2.
    stash: what a stage keeps of a microbatch until its backward: input or residuals.
    is_open: whether num_pipeline_microbatches is still to be chosen from `choices`, by time; until
      then it is the fewest.
    stash_is_open: whether it is still to be chosen; until then it is input.
    repeats_choices: of pipeline_schedule=auto, the repeats to choose from, by time; until then they are the
      most.
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
  stash_is_open: bool = False
  repeats_choices: tuple[int, ...] = ()

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
  def open_choices(self) -> list[str]:
    """A sentence on each key that is still to be chosen."""
    sentences = []
    if len(self.repeats_choices) > 1:
      sentences.append(
        f"pipeline_schedule=auto: a run or compile_only=true compiles {self.schedule} with num_pipeline_repeats="
        f"{_listed(self.repeats_choices)} (1 is 1f1b), and takes the fastest that fits; shown is {self.repeats}"
      )
    if self.stash_is_open:
      sentences.append(
        "pipeline_saved_activations=auto: a run or compile_only=true takes residuals where they fit and are faster; "
        "shown is input"
      )
    if self.is_open:
      sentences.append(
        f"num_pipeline_microbatches=-1: a run or compile_only=true takes the fastest of {_listed(self.choices)}, "
        f"compiling and timing some; shown is {self.num_pipeline_microbatches}, the fewest, which "
        f"num_pipeline_microbatches={self.num_pipeline_microbatches} takes at once"
      )
    return sentences

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
      "pipeline_saved_activations": self.stash,
      "bubble": float(predicted_bubble(self.shape)),
      "choice": "; ".join(self.open_choices),
      "choices": list(self.choices),
    }

  def __str__(self) -> str:
    parts = (self.repeats, "repeat"), (self.layers, "layer")
    sizes = [f"{self.stages} stages", *(counted(*part) for part in parts)]
    return (
      f"{self.schedule}: {' × '.join(sizes)}; {self.shape.microbatches:,} microbatches in a "
      f"timetable, each of {counted(self.rows, 'sample')} per group of devices; bubble "
      f"{percent(predicted_bubble(self.shape))}; pipeline_saved_activations={self.stash}"
    )


def _listed(numbers: Sequence[int]) -> str:
  return ", ".join(map(str, numbers))


class EvalMicrobatches(NamedTuple):
  """The microbatches of an evaluation's batch; the last is padded with rows of weight zero."""

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
