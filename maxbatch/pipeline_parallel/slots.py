"""Which slot of a stage's buffers an input or a gradient waits in: as few slots as possible.

An input takes its slot when it arrives (the first one, which comes from the embedding, when its
forward runs) and leaves it with its backward; a gradient from its arrival (the last one, from the
loss, from its forward) to its backward. Intervals that overlap get different slots; taking them by
their beginnings, the lowest free slot first, needs no more slots than overlap at once.
"""

import dataclasses
import heapq
from collections.abc import Iterable

from maxbatch.pipeline_parallel.timetable import Cell, Timetable

Work = tuple[int, int]
"""Repeat and microbatch."""
Interval = tuple[int, int, Work]
"""First tick, last tick, whose."""


def with_slots(table: Timetable) -> Timetable:
  """The same timetable with every slot assigned. The table must be free of faults."""
  shape = table.shape
  forward = {(place, entry.microbatch): tick for tick, place, entry in table.forwards()}
  backward = {(place, entry.microbatch): tick for tick, place, entry in table.backwards()}
  inputs: list[list[Interval]] = [[] for _ in range(shape.stages)]
  gradients: list[list[Interval]] = [[] for _ in range(shape.stages)]
  for (place, microbatch), done in backward.items():
    work = (place.repeat, microbatch)
    own = forward[place, microbatch]
    above, below = shape.before(place), shape.after(place)
    arrival = own if above is None else forward[above, microbatch] + shape.hop
    inputs[place.stage].append((arrival, done, work))
    arrival = own if below is None else backward[below, microbatch] + shape.hop
    gradients[place.stage].append((arrival, done, work))
  stashes, cotangents = list(map(_assigned, inputs)), list(map(_assigned, gradients))
  ticks = tuple(
    tuple(_slotted(cell, stashes[s], cotangents[s]) for s, cell in enumerate(row))
    for row in table.ticks
  )
  return Timetable(shape, ticks)


def _assigned(intervals: Iterable[Interval]) -> dict[Work, int]:
  """A slot for every interval."""
  slots: dict[Work, int] = {}
  busy: list[tuple[int, int]] = []
  free: list[int] = []
  for first, last, work in sorted(intervals):
    while busy and busy[0][0] < first:
      heapq.heappush(free, heapq.heappop(busy)[1])
    slot = heapq.heappop(free) if free else len(busy)
    slots[work] = slot
    heapq.heappush(busy, (last, slot))
  return slots


def _slotted(cell: Cell, stash: dict[Work, int], cotangents: dict[Work, int]) -> Cell:
  forward, backward = cell.forward, cell.backward
  if forward is not None:
    forward = dataclasses.replace(forward, slot=stash[forward.repeat, forward.microbatch])
  if backward is not None:
    work = (backward.repeat, backward.microbatch)
    backward = dataclasses.replace(backward, slot=stash[work], gradient_slot=cotangents[work])
  return Cell(forward, backward)
