"""The arrays of a timetable move every input and gradient to where the timetable needs it."""

from typing import Any

import numpy as np
import pytest

from maxbatch.pipeline_parallel.schedule import (
  ModelChunk,
  Timetable,
  TimetableShape,
  schedule_named,
  timetable,
)
from maxbatch.pipeline_parallel.timetable_arrays import (
  PassArrays,
  TimetableArrays,
  timetable_arrays,
)

SHAPES = [
  ("gpipe", TimetableShape(3, 5)),
  ("circular", TimetableShape(2, 4, 3)),
  ("1f1b", TimetableShape(4, 2)),
  ("1f1b", TimetableShape(3, 7, 1, 2)),
  ("interleaved_1f1b", TimetableShape(2, 4, 3)),
  ("interleaved_1f1b", TimetableShape(2, 4, 2, 2)),
]


def made(name: str, shape: TimetableShape, more: int = 0) -> tuple[Timetable, TimetableArrays]:
  table = timetable(name, shape)
  capacity = schedule_named(name).limits(shape)
  return table, timetable_arrays(table, capacity, len(table.ticks) + more)


class Replay:
  """Runs the arrays on names in chunk of tensors, as the compiled program runs them."""

  def __init__(self, name: str, shape: TimetableShape):
    self.shape, self.ticks = shape, made(name, shape)[1]
    capacity = schedule_named(name).limits(shape)
    self.inputs: list[list[Any]] = [[None] * (capacity.inputs + 1) for _ in range(shape.stages)]
    self.gradients: list[list[Any]] = [
      [None] * (capacity.gradients + 1) for _ in range(shape.stages)
    ]
    self.sent: list[list[tuple[Any, Any]]] = [
      [(None, None)] * shape.stages
    ] * shape.forwarding_delay
    self.seen: list[tuple[Any, Any]] = []

  def run(self) -> list[tuple[Any, Any]]:
    """Input and gradient that every backward was given, in names."""
    for tick in range(int(self.ticks.num_ticks)):
      self.receive(tick, self.sent.pop(0))
      made = [self.forward(tick, stage) for stage in range(self.shape.stages)]
      self.loss(tick, made)
      back = [self.backward(tick, stage) for stage in range(self.shape.stages)]
      self.sent.append(list(zip(made, back, strict=True)))
    return self.seen

  def work(self, passes: PassArrays, tick: int, stage: int) -> tuple[ModelChunk, int, int] | None:
    at = tick, stage
    chunk = ModelChunk(int(passes.repeat[at]), stage)
    return (
      (chunk, int(passes.microbatch[at]), int(passes.slot[at])) if passes.is_active[at] else None
    )

  def forward(self, tick: int, stage: int) -> Any:
    assert (
      self.ticks.all_stages.forward[tick] or not self.ticks.stages.forward.is_active[tick, stage]
    )
    result = self.work(self.ticks.stages.forward, tick, stage)
    if result is None:
      return "garbage"
    chunk, microbatch, slot = result
    if self.shape.previous_chunk(chunk) is None:
      assert self.ticks.all_stages.embedding[tick]
      self.inputs[stage][slot] = ("embedded", microbatch)
    return ("output", chunk, self.inputs[stage][slot])

  def loss(self, tick: int, made: list[Any]) -> None:
    if self.ticks.all_stages.loss[tick]:
      number = int(self.ticks.all_stages.loss_microbatch[tick])
      for stage in range(self.shape.stages):
        slot = self.ticks.stages.loss_slot[tick, stage]
        self.gradients[stage][slot] = ("loss", number, made[-1])

  def backward(self, tick: int, stage: int) -> Any:
    result = self.work(self.ticks.stages.backward, tick, stage)
    if result is None:
      return "garbage"
    assert self.ticks.all_stages.backward[tick]
    chunk, microbatch, slot = result
    given = self.gradients[stage][self.ticks.stages.gradient_slot[tick, stage]]
    self.seen.append(((chunk, microbatch), (self.inputs[stage][slot], given)))
    assert (
      self.ticks.all_stages.embedding_backward[tick] or self.shape.previous_chunk(chunk) is not None
    )
    return ("gradient", chunk, given)

  def receive(self, tick: int, sent: list[tuple[Any, Any]]) -> None:
    stages, rows = self.shape.stages, self.ticks.stages
    for stage in range(stages):
      self.inputs[stage][rows.input_arrival_slot[tick, stage]] = sent[stage - 1][0]
      behind = sent[(stage + 1) % stages][1]
      self.gradients[stage][rows.gradient_arrival_slot[tick, stage]] = behind


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_backward_gets_its_own_input_and_gradient(name, shape):
  expected = {}
  for number in range(shape.microbatches):
    value, inputs = ("embedded", number), {}
    for chunk in shape.model_chunks():
      inputs[chunk], value = value, ("output", chunk, value)
    value = ("loss", number, value)
    for chunk in reversed(list(shape.model_chunks())):
      expected[chunk, number] = (inputs[chunk], value)
      value = ("gradient", chunk, value)
  seen = Replay(name, shape).run()
  assert len(seen) == len(expected)
  assert dict(seen) == expected


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_the_arrays_hold_exactly_the_entries_of_the_timetable(name, shape):
  table, ticks = made(name, shape, more=3)
  assert ticks.num_ticks == len(table.ticks)
  assert (
    ticks.stages.forward.is_active.sum()
    == ticks.stages.backward.is_active.sum()
    == shape.stages * shape.forwards_per_stage
  )
  assert not np.any(ticks.all_stages.forward[ticks.num_ticks :])
  assert not np.any(ticks.stages.backward.is_active[ticks.num_ticks :])


def test_what_nobody_uses_lies_behind_the_slots_of_the_schedule():
  shape = TimetableShape(3, 7)
  rows = made("1f1b", shape)[1].stages
  capacity = schedule_named("1f1b").limits(shape)
  assert set(rows.forward.slot[~rows.forward.is_active]) == {capacity.inputs}
  assert set(rows.backward.slot[~rows.backward.is_active]) == {capacity.inputs}
  assert set(rows.loss_slot[:, :-1].flat) == {capacity.gradients}
  assert (
    rows.input_arrival_slot[:, 0].min() == capacity.inputs
  )  # the first stage has its own inputs
