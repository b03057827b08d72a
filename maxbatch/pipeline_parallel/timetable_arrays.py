"""A timetable as arrays that a compiled program reads: what each stage does in each tick.

Ticks down, stages across. Every buffer of a stage has one slot more than the schedule needs, the
last one, for what nobody will use: a stage that is idle, or receives nothing, reads and writes
there, so that all stages run the same program.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from maxbatch.pipeline_parallel.schedule import BufferLimits, schedule_named, timetable
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable import ModelChunk, Timetable


class WorkArrays(NamedTuple):
  """One forward or backward of every tick and stage: arrays [ticks, stages]."""

  on: Any
  """bool: whether there is one; where not, the rest means nothing."""
  repeat: Any
  microbatch: Any
  slot: Any
  """Where its input lies."""


class StageArrays(NamedTuple):
  """What differs from stage to stage: arrays [ticks, stages], int32 but for `on`."""

  forward: WorkArrays
  backward: WorkArrays
  gradient_slot: Any
  """Where the gradient lies that the backward begins with."""
  loss_slot: Any
  """Where the gradient is put that the loss gives to this tick's forward."""
  input_arrives: Any
  """Where the input is put that is there when the tick begins."""
  gradient_arrives: Any
  """The same of gradients."""


class TickArrays(NamedTuple):
  """What all stages must agree on: arrays [ticks], bool but for `loss_microbatch`."""

  forward: Any
  """Whether any stage has a forward; the same for the other works."""
  embedding: Any
  """Of those, whether one begins at the embedding."""
  loss: Any
  """Whether one ends in the loss."""
  loss_microbatch: Any
  backward: Any
  unembedding: Any
  """Of those, whether one ends at the embedding."""


class TimetableArrays(NamedTuple):
  """A timetable, and how many of its ticks there are: the rest is padding."""

  count: Any
  """int32 scalar."""
  stages: StageArrays
  together: TickArrays


def buffer_capacity(pipeline: Pipeline) -> BufferLimits:
  """The slots of a stage's buffers, for the largest step of the run."""
  return schedule_named(pipeline.schedule).limits(pipeline.shape_of(pipeline.max_num_microbatches))


@functools.lru_cache(maxsize=32)
def step_arrays(pipeline: Pipeline, num_microbatches: int) -> TimetableArrays:
  """The timetable of a step of so many passes, as the program for all steps of the run reads it.

  Of none: an empty one, by which a clock tells ticks from the rest of a step.
  """
  if num_microbatches == 0:
    return step_arrays(pipeline, pipeline.max_num_microbatches)._replace(count=np.int32(0))
  table = timetable(pipeline.schedule, pipeline.shape_of(num_microbatches))
  length = len(table.ticks)
  if num_microbatches < pipeline.max_num_microbatches:
    length = len(step_arrays(pipeline, pipeline.max_num_microbatches).together.forward)
  return timetable_arrays(table, buffer_capacity(pipeline), length)


def timetable_arrays(table: Timetable, capacity: BufferLimits, length: int) -> TimetableArrays:
  """The arrays of a timetable with slots.

  Args:
    table: a timetable without faults.
    room: slots of every stage's buffers, those for what nobody uses aside.
    length: ticks of the arrays, at least those of the table.
  """
  rows = _idle((length, table.shape.stages), capacity)
  _fill_forwards(table, rows)
  _fill_backwards(table, rows)
  return TimetableArrays(np.int32(len(table.ticks)), rows, _together(table, rows))


def _idle(grid: tuple[int, int], capacity: BufferLimits) -> StageArrays:
  def filled(value: int) -> np.ndarray:
    return np.full(grid, value, np.int32)

  def no_work() -> WorkArrays:
    return WorkArrays(np.zeros(grid, np.bool_), filled(0), filled(0), filled(capacity.inputs))

  return StageArrays(
    forward=no_work(),
    backward=no_work(),
    gradient_slot=filled(capacity.gradients),
    loss_slot=filled(capacity.gradients),
    input_arrives=filled(capacity.inputs),
    gradient_arrives=filled(capacity.gradients),
  )


def _enter(
  work_arrays: WorkArrays, tick: int, place: ModelChunk, microbatch: int, slot: int | None
) -> None:
  at = tick, place.stage
  work_arrays.on[at] = True
  work_arrays.repeat[at], work_arrays.microbatch[at], work_arrays.slot[at] = (
    place.repeat,
    microbatch,
    slot,
  )


def _fill_forwards(table: Timetable, rows: StageArrays) -> None:
  shape = table.shape
  slots = {(place, entry.microbatch): entry.slot for _, place, entry in table.forwards()}
  own = {(place, entry.microbatch): entry.gradient_slot for _, place, entry in table.backwards()}
  for tick, place, entry in table.forwards():
    _enter(rows.forward, tick, place, entry.microbatch, entry.slot)
    after = shape.after(place)
    if after is not None:
      arrival = tick + shape.hop, after.stage
      rows.input_arrives[arrival] = slots[after, entry.microbatch]
    elif (place, entry.microbatch) in own:
      rows.loss_slot[tick, place.stage] = own[place, entry.microbatch]


def _fill_backwards(table: Timetable, rows: StageArrays) -> None:
  shape = table.shape
  slots = {(place, entry.microbatch): entry.gradient_slot for _, place, entry in table.backwards()}
  for tick, place, entry in table.backwards():
    _enter(rows.backward, tick, place, entry.microbatch, entry.slot)
    rows.gradient_slot[tick, place.stage] = entry.gradient_slot
    before = shape.before(place)
    if before is not None:
      arrival = tick + shape.hop, before.stage
      rows.gradient_arrives[arrival] = slots[before, entry.microbatch]


def _together(table: Timetable, rows: StageArrays) -> TickArrays:
  forward, backward = rows.forward, rows.backward
  last = table.shape.repeats - 1
  return TickArrays(
    forward=forward.on.any(1),
    embedding=forward.on[:, 0] & (forward.repeat[:, 0] == 0),
    loss=forward.on[:, -1] & (forward.repeat[:, -1] == last),
    loss_microbatch=forward.microbatch[:, -1].copy(),
    backward=backward.on.any(1),
    unembedding=backward.on[:, 0] & (backward.repeat[:, 0] == 0),
  )
