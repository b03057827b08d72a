"""Pipeline schedules as data: what every stage computes in every tick, and in which order by each schedule.

One program runs on all stages in lockstep. A tick is one slot of the lockstep schedule: at most one
forward and one backward on each stage, then the exchange, in which outputs go to the next stage and
gradients to the previous one. The last stage computes the loss right after its forward of the last
repeat, so the backward of that microbatch may be in the same tick.

A stage runs its k-th forward h ticks after the previous stage, and its k-th backward h ticks after
the next stage. A schedule says which repeat and microbatch the k-th is, and when backwards begin.
Symbols: p stages, m microbatches, v repeats (a stage's chunks), h forwarding delay in ticks.

- gpipe: Huang et al. 2019, arXiv:1811.06965. All forwards, then all backwards.
- circular: gpipe with repeats, as in praxis and MaxText.
- 1f1b: PipeDream-Flush (Narayanan et al. 2020, arXiv:2006.09503), the 1F1B of Megatron-LM
  (Narayanan et al. 2021, arXiv:2104.04473). There a stage runs a forward or a backward at a time.
  In lockstep a tick takes as long as its slowest stage, so here a stage runs both in one tick.
- interleaved_1f1b: 1f1b with several model chunks per stage (Narayanan et al. 2021, section 2.2).
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType

from maxbatch.config.registry import registered
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelChunk:
  """The layers that `stage` computes in repeat `repeat`: a virtual stage of Megatron-LM."""

  repeat: int
  stage: int


@dataclasses.dataclass(frozen=True)
class TimetableShape:
  """The sizes of a timetable.

  Attributes:
    stages: pipeline stages, the groups of devices that each hold some of the layers.
    microbatches: parts of the batch that go through the stages one after another.
    repeats: times a microbatch goes through all stages, and model chunks of a stage.
    forwarding_delay: ticks until the next stage uses a result: 1, or 2 if overlapped with a tick.
  """

  stages: int
  microbatches: int
  repeats: int = 1
  forwarding_delay: int = 1

  @property
  def forwards_per_stage(self) -> int:
    """Forwards of one stage; it has as many backwards."""
    m, v = self.microbatches, self.repeats
    return m * v

  @property
  def warmup_ticks(self) -> int:
    """Ticks of the warm-up: from the first stage's first forward to the last stage's."""
    return self.forwarding_delay * (self.stages - 1)

  def model_chunks(self) -> Iterator[ModelChunk]:
    """Yields all model chunks, in the order in which a microbatch goes through them."""
    for repeat in range(self.repeats):
      for stage in range(self.stages):
        yield ModelChunk(repeat, stage)

  def previous_chunk(self, chunk: ModelChunk) -> ModelChunk | None:
    """Returns the chunk that computes this chunk's input; None where that is the embedding."""
    if chunk.stage > 0:
      return ModelChunk(chunk.repeat, chunk.stage - 1)
    return ModelChunk(chunk.repeat - 1, self.stages - 1) if chunk.repeat > 0 else None

  def next_chunk(self, chunk: ModelChunk) -> ModelChunk | None:
    """Returns the chunk that uses this chunk's output; None where that is the loss."""
    if chunk.stage < self.stages - 1:
      return ModelChunk(chunk.repeat, chunk.stage + 1)
    return ModelChunk(chunk.repeat + 1, 0) if chunk.repeat < self.repeats - 1 else None


@dataclasses.dataclass(frozen=True)
class Forward:
  """A forward. Its input stays in `slot` of the stage's input buffer until its backward."""

  repeat: int
  microbatch: int
  slot: int | None = None


@dataclasses.dataclass(frozen=True)
class Backward:
  """A backward. It reads the forward's input from `slot` and its gradient from `gradient_slot`."""

  repeat: int
  microbatch: int
  slot: int | None = None
  gradient_slot: int | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
  """What one stage computes in one tick; None where it is idle."""

  forward: Forward | None = None
  backward: Backward | None = None


@dataclasses.dataclass(frozen=True)
class Timetable:
  """`ticks[t][s]` is the cell of stage s in tick t. Not checked: simulator.py does that."""

  shape: TimetableShape
  ticks: tuple[tuple[Cell, ...], ...]

  def forwards(self) -> Iterator[tuple[int, ModelChunk, Forward]]:
    """Yields every forward with its tick and model chunk, tick by tick."""
    for tick, row in enumerate(self.ticks):
      for stage, cell in enumerate(row):
        if cell.forward is not None:
          yield tick, ModelChunk(cell.forward.repeat, stage), cell.forward

  def backwards(self) -> Iterator[tuple[int, ModelChunk, Backward]]:
    """Yields every backward with its tick and model chunk, tick by tick."""
    for tick, row in enumerate(self.ticks):
      for stage, cell in enumerate(row):
        if cell.backward is not None:
          yield tick, ModelChunk(cell.backward.repeat, stage), cell.backward

  @property
  def has_slots(self) -> bool:
    """Whether every forward and backward has its slots assigned."""
    entries = [
      *(entry.slot for _, _, entry in self.forwards()),
      *(entry.slot for _, _, entry in self.backwards()),
      *(entry.gradient_slot for _, _, entry in self.backwards()),
    ]
    return None not in entries


Task = tuple[int, int]
"""Repeat and microbatch, on a given stage."""
Interval = tuple[int, int, Task]
"""First tick, last tick, and the task that the slot is for."""

WITH_REPEATS = {"gpipe": "circular", "1f1b": "interleaved_1f1b"}
"""By schedules without repeats, the same with them."""


def assign_slots(table: Timetable) -> Timetable:
  """Assigns slots for inputs and gradients, as few as possible, to a faultless timetable.

  An input occupies its slot from the tick in which it arrives to the tick of its backward; the input
  from the embedding is there when its forward runs. A gradient does so from its arrival to its
  backward; the gradient from the loss is there when the forward runs. Intervals that overlap get
  different slots. Going through them by their first tick and taking the lowest free slot needs only
  as many slots as intervals overlap at once (interval partitioning).
  """
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
    slots = {"slot": input_slots[task], "gradient_slot": gradient_slots[task]}
    backward = dataclasses.replace(backward, **slots)
  return Cell(forward, backward)


@dataclasses.dataclass(frozen=True)
class BufferLimits:
  """The most a stage holds at once: inputs until their backward, and gradients of outputs."""

  inputs: int
  gradients: int


@dataclasses.dataclass(frozen=True)
class Schedule:
  """What defines a schedule.

  Attributes:
    order: repeat and microbatch of a stage's k-th forward. Its k-th backward has the same
      microbatch, and the repeats in reverse order.
    first_backward: the tick of the last stage's first backward.
    limits: the most that a stage holds at once.
    allows_repeats: whether a microbatch may go through the stages more than once.
    microbatch_multiple: with repeats, the number of microbatches must be a multiple of this.
    min_microbatches: with repeats, the smallest number of microbatches.
  """

  order: Callable[[int, TimetableShape], tuple[int, int]]
  first_backward: Callable[[TimetableShape], int]
  limits: Callable[[TimetableShape], BufferLimits]
  allows_repeats: bool
  microbatch_multiple: Callable[[TimetableShape], int] = lambda shape: 1
  min_microbatches: Callable[[TimetableShape], int] = lambda shape: 1


def schedule_named(name: str) -> Schedule:
  """Returns the schedule of `pipeline_schedule=name`.

  Raises:
    UserError: no schedule has that name.
  """
  return registered("pipeline_schedule", name, SCHEDULES)


def timetable(name: str, shape: TimetableShape) -> Timetable:
  """Returns the timetable of a schedule, with slots for inputs and gradients.

  Raises:
    UserError: no schedule has that name, or it does not support this shape.
  """
  schedule = schedule_named(name)
  _check(name, schedule, shape)
  warmup_ticks = shape.warmup_ticks
  first_backward = schedule.first_backward(shape)
  count = first_backward + shape.forwards_per_stage + warmup_ticks
  ticks = [[Cell() for _ in range(shape.stages)] for _ in range(count)]
  last = shape.repeats - 1
  for stage in range(shape.stages):
    stage_delay = shape.forwarding_delay * stage
    for k in range(shape.forwards_per_stage):
      repeat, microbatch = schedule.order(k, shape)
      forward_tick, backward_tick = k + stage_delay, first_backward + warmup_ticks - stage_delay + k
      entry = Forward(repeat, microbatch)
      ticks[forward_tick][stage] = dataclasses.replace(ticks[forward_tick][stage], forward=entry)
      ticks[backward_tick][stage] = dataclasses.replace(
        ticks[backward_tick][stage], backward=Backward(last - repeat, microbatch)
      )
  return assign_slots(Timetable(shape, tuple(map(tuple, ticks))))


def forward_only_timetable(shape: TimetableShape) -> Timetable:
  """Returns the timetable of an evaluation: every forward of every microbatch, no backwards.

  Forwards run depth first, so that a stage uses each input in the tick in which it arrives: in slot 0.
  If the number of microbatches is no multiple of h·p, the stages are idle where the last group of
  h·p lacks microbatches.
  """
  group = _round_trip_ticks(shape) if shape.repeats > 1 else 1
  whole = -(-shape.microbatches // group) * group * shape.repeats
  order = enumerate(_depth_first(k, shape) for k in range(whole))
  passes = {k: entry for k, entry in order if entry[1] < shape.microbatches}
  count = max(passes) + shape.warmup_ticks + 1
  ticks = [[Cell() for _ in range(shape.stages)] for _ in range(count)]
  for k, (repeat, microbatch) in passes.items():
    for stage in range(shape.stages):
      ticks[k + shape.forwarding_delay * stage][stage] = Cell(Forward(repeat, microbatch, slot=0))
  return Timetable(shape, tuple(map(tuple, ticks)))


def _check(name: str, schedule: Schedule, shape: TimetableShape) -> None:
  """Refuses shapes that the schedule does not support."""
  v, m = shape.repeats, shape.microbatches
  if v > 1 and not schedule.allows_repeats:
    raise UserError(
      f"pipeline_schedule={name} has no repeats, but num_pipeline_repeats={v}; for example "
      f"pipeline_schedule={WITH_REPEATS[name]} or num_pipeline_repeats=1"
    )
  least, group = schedule.min_microbatches(shape), schedule.microbatch_multiple(shape)
  if v > 1 and (m < least or m % group):
    near = max(least, -(-m // group) * group)
    rule = f"a multiple of {group}" if group > 1 else f"at least {least}"
    raise UserError(
      f"pipeline_schedule={name} with {shape.stages} stages and num_pipeline_repeats={v} needs a "
      f"number of microbatches that is {rule}, not {m}; for example num_pipeline_microbatches={near}"
    )


def _breadth_first(k: int, shape: TimetableShape) -> tuple[int, int]:
  """Lets all microbatches go through one repeat, then all through the next."""
  return divmod(k, shape.microbatches)


def _depth_first(k: int, shape: TimetableShape) -> tuple[int, int]:
  """Counts in groups: h·p microbatches go through all repeats, then the next h·p."""
  if shape.repeats == 1:
    return 0, k
  size = shape.forwarding_delay * shape.stages
  group, rest = divmod(k, size * shape.repeats)
  repeat, number = divmod(rest, size)
  return repeat, group * size + number


def _after_all_forwards(shape: TimetableShape) -> int:
  return shape.forwards_per_stage + shape.warmup_ticks


def _after_first_forward(shape: TimetableShape) -> int:
  """Returns the tick of the last stage's first forward of the last repeat."""
  p, v, h = shape.stages, shape.repeats, shape.forwarding_delay
  return (v - 1) * h * p + shape.warmup_ticks


def _all_microbatches(shape: TimetableShape) -> BufferLimits:
  return BufferLimits(shape.forwards_per_stage, shape.microbatches)


def _in_flight(shape: TimetableShape) -> BufferLimits:
  """Returns 1F1B's in-flight microbatches: from a stage's first forward to its first backward.

  Their number does not depend on the number of microbatches.
  """
  forwards = _after_first_forward(shape) + shape.warmup_ticks + 1
  return BufferLimits(min(shape.forwards_per_stage, forwards), 1)


def _round_trip_ticks(shape: TimetableShape) -> int:
  """Returns the ticks until a result has gone through all stages and is at the first one again."""
  p, h = shape.stages, shape.forwarding_delay
  return h * p


SCHEDULES = MappingProxyType(
  {
    "gpipe": Schedule(_breadth_first, _after_all_forwards, _all_microbatches, allows_repeats=False),
    "circular": Schedule(
      _breadth_first,
      _after_all_forwards,
      _all_microbatches,
      allows_repeats=True,
      min_microbatches=_round_trip_ticks,
    ),
    "1f1b": Schedule(_depth_first, _after_first_forward, _in_flight, allows_repeats=False),
    "interleaved_1f1b": Schedule(
      _depth_first,
      _after_first_forward,
      _in_flight,
      allows_repeats=True,
      microbatch_multiple=_round_trip_ticks,
    ),
  }
)
