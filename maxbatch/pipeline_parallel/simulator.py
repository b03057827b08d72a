"""Checks a timetable by simulating it tick by tick, and stops at the first fault.

The simulator knows nothing about schedules: it moves inputs and gradients from stage to stage as
the timetable says. So it can check any timetable, one edited by hand too, for these rules:
  - every microbatch has exactly one forward and one backward on every stage in every repeat;
  - nothing is used before it has arrived;
  - no slot is overwritten while its contents are still needed;
  - no stage holds more than its limits.
"""

import dataclasses

from maxbatch.pipeline_parallel.schedule import (
  Backward,
  BufferLimits,
  Forward,
  ModelChunk,
  Timetable,
)

Task = tuple[ModelChunk, int]
"""A model chunk and a microbatch: what Megatron-LM calls a virtual microbatch of a stage."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of simulating a timetable.

  Attributes:
    fault: the first fault in words; None if there is none.
    inputs: for each stage, the most inputs that it held at once.
    gradients: for each stage, the most gradients that it held at once.
    input_slots: for each stage, the slots used for inputs; 0 if the timetable has no slots.
    gradient_slots: for each stage, the slots used for gradients.
  """

  fault: str | None
  inputs: tuple[int, ...]
  gradients: tuple[int, ...]
  input_slots: tuple[int, ...]
  gradient_slots: tuple[int, ...]


def run(table: Timetable, limits: BufferLimits | None = None) -> Outcome:
  """Simulates any timetable, with its slots if it has them, to its end or to its first fault.

  A stage may hold `limits` at once; None: any number.
  """
  simulator = _Simulator(table, limits)
  try:
    simulator.run()
    fault = None
  except _FaultError as error:
    fault = str(error)
  inputs, gradients = simulator.inputs, simulator.gradients
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
  """The inputs, or the gradients, that a stage holds."""

  def __init__(self, kind: str, capacity: int | None):
    self.kind, self.limit = kind, capacity
    self.contents: dict[Task, int | None] = {}
    self.owners: dict[int, Task] = {}
    self.peak = self.slots = 0

  def put(self, task: Task, slot: int | None, tick: int) -> Task | None:
    """Adds the array of a task; returns the task whose array it would overwrite, if any."""
    if slot is not None:
      if slot in self.owners:
        return self.owners[slot]
      self.owners[slot] = task
      self.slots = max(self.slots, slot + 1)
    self.contents[task] = slot
    self.peak = max(self.peak, len(self.contents))
    self._check_capacity(task, slot, tick)
    return None

  def take(self, task: Task) -> int | None:
    """Removes the array of a task and returns the slot that it was in."""
    slot = self.contents.pop(task)
    if slot is not None:
      del self.owners[slot]
    return slot

  def _check_capacity(self, task: Task, slot: int | None, tick: int) -> None:
    if self.limit is None:
      return
    if len(self.contents) > self.limit:
      raise _FaultError(
        f"stage {task[0].stage} holds {len(self.contents)} {self.kind}s at tick {tick}, more than the "
        f"{self.limit} that the schedule allows"
      )
    if slot is not None and slot >= self.limit:
      raise _FaultError(
        f"{self.kind} of {_name(task)} at tick {tick} in slot {slot}, but the schedule has slots 0 "
        f"to {self.limit - 1}"
      )


class _Simulator:
  def __init__(self, table: Timetable, limits: BufferLimits | None):
    self.shape, self.ticks = table.shape, table.ticks
    self.forwards: dict[Task, tuple[int, Forward]] = {}
    self.backwards: dict[Task, tuple[int, Backward]] = {}
    for tick, chunk, entry in table.forwards():
      self.forwards.setdefault((chunk, entry.microbatch), (tick, entry))
    for tick, chunk, entry in table.backwards():
      self.backwards.setdefault((chunk, entry.microbatch), (tick, entry))
    stages = range(self.shape.stages)
    most = limits or BufferLimits(0, 0)
    self.inputs = [_Buffer("input", most.inputs if limits else None) for _ in stages]
    self.gradients = [_Buffer("gradient", most.gradients if limits else None) for _ in stages]
    self.arriving: dict[int, list[tuple[_Buffer, Task, int | None]]] = {}
    self.forward_done: dict[Task, int] = {}
    self.backward_done: dict[Task, int] = {}

  def run(self) -> None:
    for tick, row in enumerate(self.ticks):
      for buffer, task, slot in self.arriving.pop(tick, ()):
        self._put(buffer, task, slot, tick, "arrives")
      for stage, cell in enumerate(row):
        if cell.forward is not None:
          self._forward(tick, stage, cell.forward)
      for stage, cell in enumerate(row):
        if cell.backward is not None:
          self._backward(tick, stage, cell.backward)
    self._check_all_done()

  def _forward(self, tick: int, stage: int, entry: Forward) -> None:
    task = self._check_task("forward", tick, stage, entry, self.forward_done)
    chunk, microbatch = task
    previous_chunk, next_chunk = self.shape.previous_chunk(chunk), self.shape.next_chunk(chunk)
    inputs = self.inputs[stage]
    if previous_chunk is None:
      self._put(inputs, task, entry.slot, tick, "is written")
    elif task not in inputs.contents:
      raise _FaultError(self._too_early("forward", "input", task, tick, previous_chunk))
    self.forward_done[task] = tick
    if next_chunk is None:
      self._put(self.gradients[stage], task, self._gradient_slot(task), tick, "is written")
    else:
      target = (next_chunk, microbatch)
      slot = self.forwards[target][1].slot if target in self.forwards else None
      self._send(tick, self.inputs[next_chunk.stage], target, slot)

  def _backward(self, tick: int, stage: int, entry: Backward) -> None:
    task = self._check_task("backward", tick, stage, entry, self.backward_done)
    chunk, microbatch = task
    previous_chunk, next_chunk = self.shape.previous_chunk(chunk), self.shape.next_chunk(chunk)
    if task not in self.forward_done:
      raise _FaultError(self._before_forward(task, tick))
    if next_chunk is not None and task not in self.gradients[stage].contents:
      raise _FaultError(self._too_early("backward", "gradient", task, tick, next_chunk))
    self.backward_done[task] = tick
    self.gradients[stage].take(task)
    slot = self.inputs[stage].take(task)
    if slot != entry.slot:
      raise _FaultError(
        f"backward of {_name(task)} at tick {tick} reads slot {entry.slot}, but its input is in "
        f"slot {slot}"
      )
    if previous_chunk is not None:
      target = (previous_chunk, microbatch)
      self._send(tick, self.gradients[previous_chunk.stage], target, self._gradient_slot(target))

  def _check_task(
    self, what: str, tick: int, stage: int, entry: Forward | Backward, done: dict[Task, int]
  ) -> Task:
    """Returns the task of an entry; a fault if it does not exist or was done before."""
    task = (ModelChunk(entry.repeat, stage), entry.microbatch)
    given = f"{what} of {_name(task)} at tick {tick}"
    sizes = {"repeat": self.shape.repeats, "microbatch": self.shape.microbatches}
    for name, number in (("repeat", entry.repeat), ("microbatch", entry.microbatch)):
      if not 0 <= number < sizes[name]:
        raise _FaultError(f"{given}, but the {name} must be 0 to {sizes[name] - 1}")
    if task in done:
      raise _FaultError(f"{given} for a second time, after tick {done[task]}")
    return task

  def _put(self, buffer: _Buffer, task: Task, slot: int | None, tick: int, verb: str) -> None:
    overwritten = buffer.put(task, slot, tick)
    if overwritten is None:
      return
    needed = self.backwards.get(overwritten)
    until = f"until tick {needed[0]}" if needed else "for its backward"
    raise _FaultError(
      f"{buffer.kind} of {_name(task)} {verb} at tick {tick} in slot {slot}, which that of "
      f"{_name(overwritten)} needs {until}"
    )

  def _send(self, tick: int, buffer: _Buffer, task: Task, slot: int | None) -> None:
    self.arriving.setdefault(tick + self.shape.forwarding_delay, []).append((buffer, task, slot))

  def _gradient_slot(self, task: Task) -> int | None:
    return self.backwards[task][1].gradient_slot if task in self.backwards else None

  def _before_forward(self, task: Task, tick: int) -> str:
    given = f"backward of {_name(task)} at tick {tick}"
    result = self.forwards.get(task)
    return (
      f"{given} before its forward at tick {result[0]}" if result else f"{given} has no forward"
    )

  def _too_early(self, what: str, thing: str, task: Task, tick: int, source: ModelChunk) -> str:
    given, producer = f"{what} of {_name(task)} at tick {tick}", (source, task[1])
    passes = self.forwards if what == "forward" else self.backwards
    if producer not in passes:
      return f"{given}, but its {thing} never arrives: no {what} of {_name(producer)}"
    arrival = passes[producer][0] + self.shape.forwarding_delay
    return f"{given} before its {thing} arrives at tick {arrival}"

  def _check_all_done(self) -> None:
    unfinished = [
      (chunk, number)
      for number in range(self.shape.microbatches)
      for chunk in self.shape.model_chunks()
    ]
    for what, done in (("forward", self.forward_done), ("backward", self.backward_done)):
      for task in unfinished:
        if task not in done:
          raise _FaultError(f"{what} of {_name(task)} is missing")


def _name(task: Task) -> str:
  """Names a task: `stage 1, microbatch 2`, and the repeat unless it is the first."""
  chunk, microbatch = task
  repeat = f", repeat {chunk.repeat}" if chunk.repeat else ""
  return f"stage {chunk.stage}{repeat}, microbatch {microbatch}"
