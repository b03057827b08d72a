"""Runs a timetable tick by tick on counters instead of arrays, and stops at its first fault.

It knows nothing of schedules: it moves inputs and gradients from stage to stage as the timetable
says, so any table can be held to the rules, whoever wrote it:
  - every microbatch passes every stage in every repeat once forward and once backward;
  - nothing is used before it is there;
  - nothing is written over what is still needed;
  - no stage holds more than it may.
"""

import dataclasses

from maxbatch.pipeline_parallel.schedule import BufferLimits
from maxbatch.pipeline_parallel.timetable import Backward, Forward, ModelChunk, Timetable

Work = tuple[ModelChunk, int]
"""A microbatch at its place."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a timetable went.

  Attributes:
    fault: the first one, in words; None if there is none.
    inputs: by stage, the most inputs that were held at once.
    gradients: the same of gradients.
    input_slots: by stage, the slots that were used; 0 where the table has none.
    gradient_slots: the same for gradients.
  """

  fault: str | None
  inputs: tuple[int, ...]
  gradients: tuple[int, ...]
  input_slots: tuple[int, ...]
  gradient_slots: tuple[int, ...]


def run(table: Timetable, limits: BufferLimits | None = None) -> Outcome:
  """Runs the timetable to its end or to its first fault, the earliest tick first.

  Args:
    table: any timetable; slots are held to the rules where it has them.
    limits: what a stage may hold; None: anything.
  """
  machine = _Machine(table, limits)
  try:
    machine.run()
    fault = None
  except _FaultError as error:
    fault = str(error)
  inputs, gradients = machine.inputs, machine.gradients
  return Outcome(
    fault,
    tuple(buffer.peak for buffer in inputs),
    tuple(buffer.peak for buffer in gradients),
    tuple(buffer.slots for buffer in inputs),
    tuple(buffer.slots for buffer in gradients),
  )


class _FaultError(Exception):
  """The first fault of a timetable."""


class _Buffer:
  """What a stage holds of one kind."""

  def __init__(self, kind: str, most: int | None):
    self.kind, self.most = kind, most
    self.held: dict[Work, int | None] = {}
    self.owners: dict[int, Work] = {}
    self.peak = self.slots = 0

  def put(self, work: Work, slot: int | None, tick: int) -> Work | None:
    """Takes something in; returns what it would be written over, if anything."""
    if slot is not None:
      if slot in self.owners:
        return self.owners[slot]
      self.owners[slot] = work
      self.slots = max(self.slots, slot + 1)
    self.held[work] = slot
    self.peak = max(self.peak, len(self.held))
    self._check_capacity(work, slot, tick)
    return None

  def take(self, work: Work) -> int | None:
    """Gives something out, and its slot with it."""
    slot = self.held.pop(work)
    if slot is not None:
      del self.owners[slot]
    return slot

  def _check_capacity(self, work: Work, slot: int | None, tick: int) -> None:
    if self.most is None:
      return
    if len(self.held) > self.most:
      raise _FaultError(
        f"stage {work[0].stage} holds {len(self.held)} {self.kind}s at tick {tick}, more than the "
        f"{self.most} that the schedule allows"
      )
    if slot is not None and slot >= self.most:
      raise _FaultError(
        f"{self.kind} of {_name(work)} at tick {tick} in slot {slot}, but the schedule has slots 0 "
        f"to {self.most - 1}"
      )


class _Machine:
  def __init__(self, table: Timetable, limits: BufferLimits | None):
    self.shape, self.ticks = table.shape, table.ticks
    self.forwards: dict[Work, tuple[int, Forward]] = {}
    self.backwards: dict[Work, tuple[int, Backward]] = {}
    for tick, place, entry in table.forwards():
      self.forwards.setdefault((place, entry.microbatch), (tick, entry))
    for tick, place, entry in table.backwards():
      self.backwards.setdefault((place, entry.microbatch), (tick, entry))
    stages = range(self.shape.stages)
    most = limits or BufferLimits(0, 0)
    self.inputs = [_Buffer("input", most.inputs if limits else None) for _ in stages]
    self.gradients = [_Buffer("gradient", most.gradients if limits else None) for _ in stages]
    self.arriving: dict[int, list[tuple[_Buffer, Work, int | None]]] = {}
    self.forward_done: dict[Work, int] = {}
    self.backward_done: dict[Work, int] = {}

  def run(self) -> None:
    for tick, row in enumerate(self.ticks):
      for buffer, work, slot in self.arriving.pop(tick, ()):
        self._put(buffer, work, slot, tick, "arrives")
      for stage, cell in enumerate(row):
        if cell.forward is not None:
          self._forward(tick, stage, cell.forward)
      for stage, cell in enumerate(row):
        if cell.backward is not None:
          self._backward(tick, stage, cell.backward)
    self._check_all_done()

  def _forward(self, tick: int, stage: int, entry: Forward) -> None:
    work = self._checked("forward", tick, stage, entry, self.forward_done)
    place, microbatch = work
    above, below = self.shape.before(place), self.shape.after(place)
    inputs = self.inputs[stage]
    if above is None:
      self._put(inputs, work, entry.slot, tick, "is written")
    elif work not in inputs.held:
      raise _FaultError(self._too_early("forward", "input", work, tick, above))
    self.forward_done[work] = tick
    if below is None:
      self._put(self.gradients[stage], work, self._gradient_slot(work), tick, "is written")
    else:
      target = (below, microbatch)
      slot = self.forwards[target][1].slot if target in self.forwards else None
      self._send(tick, self.inputs[below.stage], target, slot)

  def _backward(self, tick: int, stage: int, entry: Backward) -> None:
    work = self._checked("backward", tick, stage, entry, self.backward_done)
    place, microbatch = work
    above, below = self.shape.before(place), self.shape.after(place)
    if work not in self.forward_done:
      raise _FaultError(self._before_forward(work, tick))
    if below is not None and work not in self.gradients[stage].held:
      raise _FaultError(self._too_early("backward", "gradient", work, tick, below))
    self.backward_done[work] = tick
    self.gradients[stage].take(work)
    held = self.inputs[stage].take(work)
    if held != entry.slot:
      raise _FaultError(
        f"backward of {_name(work)} at tick {tick} reads slot {entry.slot}, but its input is in "
        f"slot {held}"
      )
    if above is not None:
      target = (above, microbatch)
      self._send(tick, self.gradients[above.stage], target, self._gradient_slot(target))

  def _checked(
    self, what: str, tick: int, stage: int, entry: Forward | Backward, done: dict[Work, int]
  ) -> Work:
    """The work that is meant, if there is such and it is new."""
    work = (ModelChunk(entry.repeat, stage), entry.microbatch)
    given = f"{what} of {_name(work)} at tick {tick}"
    sizes = {"repeat": self.shape.repeats, "microbatch": self.shape.microbatches}
    for name, number in (("repeat", entry.repeat), ("microbatch", entry.microbatch)):
      if not 0 <= number < sizes[name]:
        raise _FaultError(f"{given}, but the {name} must be 0 to {sizes[name] - 1}")
    if work in done:
      raise _FaultError(f"{given} for a second time, after tick {done[work]}")
    return work

  def _put(self, buffer: _Buffer, work: Work, slot: int | None, tick: int, verb: str) -> None:
    over = buffer.put(work, slot, tick)
    if over is None:
      return
    needed = self.backwards.get(over)
    until = f"until tick {needed[0]}" if needed else "for its backward"
    raise _FaultError(
      f"{buffer.kind} of {_name(work)} {verb} at tick {tick} in slot {slot}, which that of "
      f"{_name(over)} needs {until}"
    )

  def _send(self, tick: int, buffer: _Buffer, work: Work, slot: int | None) -> None:
    self.arriving.setdefault(tick + self.shape.hop, []).append((buffer, work, slot))

  def _gradient_slot(self, work: Work) -> int | None:
    return self.backwards[work][1].gradient_slot if work in self.backwards else None

  def _before_forward(self, work: Work, tick: int) -> str:
    given = f"backward of {_name(work)} at tick {tick}"
    found = self.forwards.get(work)
    return f"{given} before its forward at tick {found[0]}" if found else f"{given} has no forward"

  def _too_early(self, what: str, thing: str, work: Work, tick: int, source: ModelChunk) -> str:
    given, maker = f"{what} of {_name(work)} at tick {tick}", (source, work[1])
    made = self.forwards if what == "forward" else self.backwards
    if maker not in made:
      return f"{given}, but its {thing} never arrives: no {what} of {_name(maker)}"
    return f"{given} before its {thing} arrives at tick {made[maker][0] + self.shape.hop}"

  def _check_all_done(self) -> None:
    unfinished = [
      (place, number) for number in range(self.shape.microbatches) for place in self.shape.chunks()
    ]
    for what, done in (("forward", self.forward_done), ("backward", self.backward_done)):
      for work in unfinished:
        if work not in done:
          raise _FaultError(f"{what} of {_name(work)} is missing")


def _name(work: Work) -> str:
  """`stage 1, microbatch 2`, and the repeat unless it is the first."""
  place, microbatch = work
  repeat = f", repeat {place.repeat}" if place.repeat else ""
  return f"stage {place.stage}{repeat}, microbatch {microbatch}"
