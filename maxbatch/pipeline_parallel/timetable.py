"""The timetable of a pipeline as data: what every stage computes in every tick.

One program runs on all stages in lockstep. A tick of it is, in this order: a slot for one forward,
a slot for one backward, and the exchange, in which outputs go to the next stage and gradients to
the one before. The last stage's forward of the last repeat is followed by the loss at once, so its
own backward may be in the same tick.

Here and in the modules around: p stages, m microbatches, v repeats, h ticks to hand a result on.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class ModelChunk:
  """A part of the layers: the one that `stage` computes in round `repeat` through the stages."""

  repeat: int
  stage: int


@dataclasses.dataclass(frozen=True)
class TimetableShape:
  """The sizes of a timetable.

  Attributes:
    stages: parts of the devices that each hold a share of the layers.
    microbatches: pieces of the batch that pass through the stages one after another.
    repeats: rounds of a microbatch through the stages, each through other layers.
    hop: ticks from computing a result to using it on the next stage: 1, or 2 when the exchange has
      a tick of its own to hide in.
  """

  stages: int
  microbatches: int
  repeats: int = 1
  hop: int = 1

  @property
  def work(self) -> int:
    """Forwards of one stage, and as many backwards."""
    m, v = self.microbatches, self.repeats
    return m * v

  @property
  def delay(self) -> int:
    """Ticks from the first stage's first forward to the last stage's."""
    return self.hop * (self.stages - 1)

  def chunks(self) -> Iterator[ModelChunk]:
    """All parts of the layers, in the order in which a microbatch passes through them."""
    for repeat in range(self.repeats):
      for stage in range(self.stages):
        yield ModelChunk(repeat, stage)

  def before(self, chunk: ModelChunk) -> ModelChunk | None:
    """Where this part's input is computed; None where that is the embedding."""
    if chunk.stage > 0:
      return ModelChunk(chunk.repeat, chunk.stage - 1)
    return ModelChunk(chunk.repeat - 1, self.stages - 1) if chunk.repeat > 0 else None

  def after(self, chunk: ModelChunk) -> ModelChunk | None:
    """Where this part's output is used; None where that is the loss."""
    if chunk.stage < self.stages - 1:
      return ModelChunk(chunk.repeat, chunk.stage + 1)
    return ModelChunk(chunk.repeat + 1, 0) if chunk.repeat < self.repeats - 1 else None


@dataclasses.dataclass(frozen=True)
class Forward:
  """A forward: its input waits in `slot` of the stage's inputs from arrival to its backward."""

  repeat: int
  microbatch: int
  slot: int | None = None


@dataclasses.dataclass(frozen=True)
class Backward:
  """A backward: reads the forward's `slot`, and its gradient from `gradient_slot`."""

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
  """`ticks[t][s]` is the cell of stage s in tick t. Nothing says yet that it can be run."""

  shape: TimetableShape
  ticks: tuple[tuple[Cell, ...], ...]

  def forwards(self) -> Iterator[tuple[int, ModelChunk, Forward]]:
    """Every forward with its tick and place, tick by tick."""
    for tick, row in enumerate(self.ticks):
      for stage, cell in enumerate(row):
        if cell.forward is not None:
          yield tick, ModelChunk(cell.forward.repeat, stage), cell.forward

  def backwards(self) -> Iterator[tuple[int, ModelChunk, Backward]]:
    """Every backward with its tick and place, tick by tick."""
    for tick, row in enumerate(self.ticks):
      for stage, cell in enumerate(row):
        if cell.backward is not None:
          yield tick, ModelChunk(cell.backward.repeat, stage), cell.backward

  @property
  def has_slots(self) -> bool:
    """Whether every entry says where its input and its gradient lie."""
    entries = [
      *(entry.slot for _, _, entry in self.forwards()),
      *(entry.slot for _, _, entry in self.backwards()),
      *(entry.gradient_slot for _, _, entry in self.backwards()),
    ]
    return None not in entries
