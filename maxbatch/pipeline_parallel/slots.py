"""Assigns slots of a stage's buffers to inputs and gradients, as few as possible.

An input occupies its slot from the tick in which it arrives to the tick of its backward; the input
from the embedding is there when its forward runs. A gradient does so from its arrival to its
backward; the gradient from the loss is there when the forward runs. Intervals that overlap get
different slots. Going through them by their first tick and taking the lowest free slot needs only
as many slots as intervals overlap at once (interval partitioning).
"""

import dataclasses
import heapq
from collections.abc import Iterable

from maxbatch.pipeline_parallel.timetable import Cell, Timetable

Task = tuple[int, int]
"""Repeat and microbatch, on a given stage."""
Interval = tuple[int, int, Task]
"""First tick, last tick, and the task that the slot is for."""


def assign_slots(table: Timetable) -> Timetable:
  """The same timetable with every slot assigned. The timetable must have no fault."""
  shape = table.shape
  forward = {(chunk, entry.microbatch): tick for tick, chunk, entry in table.forwards()}
  backward = {(chunk, entry.microbatch): tick for tick, chunk, entry in table.backwards()}
  inputs: list[list[Interval]] = [[] for _ in range(shape.stages)]
  gradients: list[list[Interval]] = [[] for _ in range(shape.stages)]
  for (chunk, microbatch), last in backward.items():
    task, delay = (chunk.repeat, microbatch), shape.forwarding_delay
    own = forward[chunk, microbatch]
    before, after = shape.previous_chunk(chunk), shape.next_chunk(chunk)
    arrival = own if before is None else forward[before, microbatch] + delay
    inputs[chunk.stage].append((arrival, last, task))
    arrival = own if after is None else backward[after, microbatch] + delay
    gradients[chunk.stage].append((arrival, last, task))
  input_slots = list(map(_lowest_free_slots, inputs))
  gradient_slots = list(map(_lowest_free_slots, gradients))
  ticks = tuple(
    tuple(_cell_with_slots(cell, input_slots[s], gradient_slots[s]) for s, cell in enumerate(row))
    for row in table.ticks
  )
  return Timetable(shape, ticks)


def _lowest_free_slots(intervals: Iterable[Interval]) -> dict[Task, int]:
  """A slot for every interval."""
  slots: dict[Task, int] = {}
  busy: list[tuple[int, int]] = []
  free: list[int] = []
  for first, last, task in sorted(intervals):
    while busy and busy[0][0] < first:
      heapq.heappush(free, heapq.heappop(busy)[1])
    slot = heapq.heappop(free) if free else len(busy)
    slots[task] = slot
    heapq.heappush(busy, (last, slot))
  return slots


def _cell_with_slots(
  cell: Cell, input_slots: dict[Task, int], gradient_slots: dict[Task, int]
) -> Cell:
  forward, backward = cell.forward, cell.backward
  if forward is not None:
    forward = dataclasses.replace(forward, slot=input_slots[forward.repeat, forward.microbatch])
  if backward is not None:
    task = (backward.repeat, backward.microbatch)
    backward = dataclasses.replace(
      backward, slot=input_slots[task], gradient_slot=gradient_slots[task]
    )
  return Cell(forward, backward)
