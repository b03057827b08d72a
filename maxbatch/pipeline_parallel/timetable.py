"""The timetable of a pipeline as data: what every stage computes in every tick.

One program runs on all stages in lockstep. A tick is one slot of the lockstep schedule: at most one
forward and one backward on each stage, then the exchange, in which outputs go to the next stage and
gradients to the previous one. The last stage computes the loss right after its forward of the last
repeat, so the backward of that microbatch may be in the same tick.

Symbols here: p stages, m microbatches, v repeats (a stage's chunks), h forwarding delay in ticks.
"""

import dataclasses
from collections.abc import Iterator


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
