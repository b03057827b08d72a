"""A timetable as arrays [ticks, stages], which the compiled program reads.

Every buffer of a stage has one slot more than the schedule needs, the last one, for values that are
not used: idle stages read and write there, so that all stages run the same program.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from maxbatch.pipeline_parallel.schedule import (
  BufferLimits,
  ModelChunk,
  Timetable,
  forward_only_timetable,
  schedule_named,
  timetable,
)
from maxbatch.pipeline_parallel.sizes import Pipeline


class PassArrays(NamedTuple):
  """The forward, or the backward, of every tick and stage: arrays [ticks, stages]."""

  is_active: Any
  """bool: whether there is one; if not, the other values are not used."""
  repeat: Any
  microbatch: Any
  slot: Any
  """The slot of its input."""


class StageArrays(NamedTuple):
  """What differs between stages: arrays [ticks, stages], int32 except `is_active`."""

  forward: PassArrays
  backward: PassArrays
  gradient_slot: Any
  """The slot of the output's gradient, which the backward reads."""
  loss_slot: Any
  """The slot in which the loss of this tick's forward writes its gradient."""
  input_arrival_slot: Any
  """The slot for the input that arrives at the beginning of the tick."""
  gradient_arrival_slot: Any
  """The slot for the gradient that arrives at the beginning of the tick."""


class TickArrays(NamedTuple):
  """What is the same for all stages: arrays [ticks], bool except `loss_microbatch`."""

  forward: Any
  """Whether any stage has a forward in the tick."""
  embedding: Any
  """Whether the first stage's forward computes the embedding."""
  loss: Any
  """Whether the last stage's forward is followed by the loss."""
  loss_microbatch: Any
  backward: Any
  embedding_backward: Any
  """Whether the first stage's backward continues through the embedding."""


class TimetableArrays(NamedTuple):
  """A timetable as arrays, which may be longer than `num_ticks`: the rest is padding."""

  num_ticks: Any
  """int32 scalar."""
  stages: StageArrays
  all_stages: TickArrays


def buffer_capacity(pipeline: Pipeline) -> BufferLimits:
  """Returns the slots of a stage's buffers that the largest step of the run needs."""
  return schedule_named(pipeline.schedule).limits(pipeline.shape_of(pipeline.max_num_microbatches))


@functools.lru_cache(maxsize=32)
def step_arrays(pipeline: Pipeline, num_microbatches: int) -> TimetableArrays:
  """Returns the timetable of a step, padded to the length that all steps of the run share.

  0 microbatches give a timetable without ticks, with which the rest of a step is timed alone.
  """
  if num_microbatches == 0:
    return step_arrays(pipeline, pipeline.max_num_microbatches)._replace(num_ticks=np.int32(0))
  table = timetable(pipeline.schedule, pipeline.shape_of(num_microbatches))
  length = len(table.ticks)
  if num_microbatches < pipeline.max_num_microbatches:
    length = len(step_arrays(pipeline, pipeline.max_num_microbatches).all_stages.forward)
  return timetable_arrays(table, buffer_capacity(pipeline), length)


def forward_only_arrays(pipeline: Pipeline, microbatches: int) -> TimetableArrays:
  """Returns the timetable of an evaluation of so many microbatches, at least 1."""
  shape = dataclasses.replace(pipeline.shape, microbatches=microbatches)
  table = forward_only_timetable(shape)
  return timetable_arrays(table, BufferLimits(1, 1), len(table.ticks))


def timetable_arrays(table: Timetable, capacity: BufferLimits, length: int) -> TimetableArrays:
  """Returns the arrays, of `length` ticks or more than the timetable has, of one with slots and no faults.

  `capacity`: slots of every stage's buffers, without the last one for unused values.
  """
  arrays = _idle_arrays((length, table.shape.stages), capacity)
  _set_forwards(table, arrays)
  _set_backwards(table, arrays)
  return TimetableArrays(np.int32(len(table.ticks)), arrays, _tick_arrays(table, arrays))


def _idle_arrays(grid: tuple[int, int], capacity: BufferLimits) -> StageArrays:
  def filled(value: int) -> np.ndarray:
    return np.full(grid, value, np.int32)

  def idle_passes() -> PassArrays:
    return PassArrays(np.zeros(grid, np.bool_), filled(0), filled(0), filled(capacity.inputs))

  return StageArrays(
    forward=idle_passes(),
    backward=idle_passes(),
    gradient_slot=filled(capacity.gradients),
    loss_slot=filled(capacity.gradients),
    input_arrival_slot=filled(capacity.inputs),
    gradient_arrival_slot=filled(capacity.gradients),
  )


def _set_pass(
  arrays: PassArrays, tick: int, chunk: ModelChunk, microbatch: int, slot: int | None
) -> None:
  at = tick, chunk.stage
  arrays.is_active[at], arrays.repeat[at] = True, chunk.repeat
  arrays.microbatch[at], arrays.slot[at] = microbatch, slot


def _set_forwards(table: Timetable, arrays: StageArrays) -> None:
  shape = table.shape
  input_slots = {(chunk, entry.microbatch): entry.slot for _, chunk, entry in table.forwards()}
  gradient_slots = {
    (chunk, entry.microbatch): entry.gradient_slot for _, chunk, entry in table.backwards()
  }
  for tick, chunk, entry in table.forwards():
    _set_pass(arrays.forward, tick, chunk, entry.microbatch, entry.slot)
    next_chunk = shape.next_chunk(chunk)
    if next_chunk is not None:
      arrival = tick + shape.forwarding_delay, next_chunk.stage
      arrays.input_arrival_slot[arrival] = input_slots[next_chunk, entry.microbatch]
    elif (chunk, entry.microbatch) in gradient_slots:
      arrays.loss_slot[tick, chunk.stage] = gradient_slots[chunk, entry.microbatch]


def _set_backwards(table: Timetable, arrays: StageArrays) -> None:
  shape = table.shape
  gradient_slots = {
    (chunk, entry.microbatch): entry.gradient_slot for _, chunk, entry in table.backwards()
  }
  for tick, chunk, entry in table.backwards():
    _set_pass(arrays.backward, tick, chunk, entry.microbatch, entry.slot)
    arrays.gradient_slot[tick, chunk.stage] = entry.gradient_slot
    previous_chunk = shape.previous_chunk(chunk)
    if previous_chunk is not None:
      arrival = tick + shape.forwarding_delay, previous_chunk.stage
      arrays.gradient_arrival_slot[arrival] = gradient_slots[previous_chunk, entry.microbatch]


def _tick_arrays(table: Timetable, arrays: StageArrays) -> TickArrays:
  forward, backward = arrays.forward, arrays.backward
  last = table.shape.repeats - 1
  return TickArrays(
    forward=forward.is_active.any(1),
    embedding=forward.is_active[:, 0] & (forward.repeat[:, 0] == 0),
    loss=forward.is_active[:, -1] & (forward.repeat[:, -1] == last),
    loss_microbatch=forward.microbatch[:, -1].copy(),
    backward=backward.is_active.any(1),
    embedding_backward=backward.is_active[:, 0] & (backward.repeat[:, 0] == 0),
  )
