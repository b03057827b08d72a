"""BatchPlan: every batch size of a run, derived exactly and printed line by line.

solve.py gives the sizes of one step, schedule.py how they change, phases.py which steps have which.
The plan holds the results, and every other part of the program reads its sizes from it: the batch
at a position, its microbatches, where the next step begins and where the run ends.

    global_batch_to_load = global_batch_to_train · expansion_factor_real_data
    tokens_per_step      = global_batch_to_train · max_target_length
    total_samples        = sum of batch · steps over the phases

Sizes are fractions until they count samples: 0.29 samples on each of 100 devices are 29 samples.
Nothing is ever truncated.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.core.keys import BatchKeys, GivenSize, Unit, text
from maxbatch.core.phases import (
  BatchSchedule,
  Budget,
  Phase,
  Position,
  SchedulePoint,
  phase_at_sample,
  phase_at_step,
  phases_of,
)
from maxbatch.core.schedule import Build, ScheduleInputs, batch_schedule
from maxbatch.core.solve import solve, whole_micro_batch
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

_MIN_MICROBATCH_CAPACITY = 16
"""Microbatches that the fused step is compiled for at least; unused ones cost a few KiB each."""


@dataclasses.dataclass(frozen=True)
class BatchPlan:
  """The sizes of a run. A sample is a row of `max_target_length` tokens.

  Sizes without a position are those of the run's batch, the last one of a ramp-up.
  """

  topology: Topology
  max_target_length: int
  per_device_batch_size: Fraction
  gradient_accumulation_steps: int
  expansion_factor_real_data: Fraction
  micro_batch_to_train: int
  global_batch_to_train: int
  global_batch_to_load: int
  eval_batch: int
  schedule: BatchSchedule
  budget: Budget
  phases: tuple[Phase, ...]
  """From the plan's start to its end; at least one phase."""
  max_batch: int = 0
  """The largest batch that batch_schedule=gns may reach; 0 for any other schedule."""
  loading_hosts: tuple[int, ...] = ()
  """The hosts that load for all, as the key names them; empty where it names none."""
  begins_with_batch_size: bool = False
  """Whether the run's batch is the schedule's first; for a ramp-up it is the last."""

  @property
  def tokens_per_step(self) -> int:
    """Tokens in one optimizer update, padding included."""
    return self.tokens(self.global_batch_to_train)

  @property
  def steps(self) -> int:
    """Optimizer steps done when the run ends."""
    return self.end().step

  @property
  def total_samples(self) -> int:
    """Samples consumed when the run ends."""
    return self.end().samples

  @property
  def total_tokens(self) -> int:
    """Tokens consumed when the run ends."""
    return self.tokens(self.total_samples)

  @property
  def microbatch_capacity(self) -> int:
    """The largest number of microbatches per step that the fused step is compiled for.

    It covers every phase, and is a power of two, so that another gradient_accumulation_steps up to
    it needs no new compilation.
    """
    scheduled = max(point.num_microbatches for point in self.schedule.points)
    decided = self.max_batch // self.micro_batch_to_train
    needed = max(_MIN_MICROBATCH_CAPACITY, scheduled, decided)
    return 1 << (needed - 1).bit_length()

  @property
  def micro_batches(self) -> tuple[int, ...]:
    """The distinct microbatches of the phases in order of appearance; each is one compilation."""
    return tuple(dict.fromkeys(phase.micro_batch for phase in self.phases))

  @property
  def phases_not_reached(self) -> tuple[int, ...]:
    """Numbers of the schedule's phases that have no step between the plan's start and its end."""
    reached = {phase.number for phase in self.phases}
    first = self.phases[0].number
    return tuple(n for n in range(first, len(self.schedule.points) + 1) if n not in reached)

  def tokens(self, samples: int) -> int:
    """Tokens in `samples` samples."""
    return samples * self.max_target_length

  def per_device(self, micro_batch: int) -> Fraction:
    """Samples of a microbatch on one device."""
    return Fraction(micro_batch, self.topology.num_devices)

  def device_tokens(self, micro_batch: int) -> Fraction:
    """Tokens of a microbatch on one device."""
    return self.per_device(micro_batch) * self.max_target_length

  def dispatched_tokens(self, streamed: bool) -> Fraction:
    """Tokens on one device of the largest dispatch: a microbatch, or as many as a step may have."""
    tokens = self.device_tokens(max(self.micro_batches))
    return tokens if streamed else self.microbatch_capacity * tokens

  def largest_phase(self, micro_batch: int) -> Phase | SchedulePoint:
    """Of the phases with this microbatch, the one with the most microbatches per step.

    Where the run ends before any of them, of those that its schedule has.
    """
    reached = [phase for phase in self.phases if phase.micro_batch == micro_batch]
    scheduled = [point for point in self.schedule.points if point.micro_batch == micro_batch]
    return max(reached or scheduled, key=lambda phase: phase.num_microbatches)

  def phase_at(self, samples: int) -> Phase:
    """The phase of the step that begins when `samples` are consumed."""
    return phase_at_sample(self.phases, samples)

  def batch_at(self, samples: int) -> int:
    """Samples of the step that begins when `samples` are consumed."""
    return self.phase_at(samples).batch

  def share_of_batch(self, position: Position) -> Fraction:
    """The batch at `position` as a fraction of the run's batch."""
    return Fraction(self.batch_at(position.samples), self.global_batch_to_train)

  def samples_at(self, step: int) -> int:
    """Samples consumed before `step` (0-based)."""
    phase = phase_at_step(self.phases, step)
    return phase.after(step - phase.first.step).samples

  def advance(self, position: Position) -> Position:
    """The position one step further."""
    return Position(position.step + 1, position.samples + self.batch_at(position.samples))

  def measure(self, position: Position, unit: Unit) -> int:
    """A position counted in steps, samples or tokens."""
    if unit == "steps":
      return position.step
    return position.samples if unit == "samples" else self.tokens(position.samples)

  def is_due(self, before: Position, after: Position, period: int, unit: Unit) -> bool:
    """Returns whether a multiple of `period` lies in (before, after], both counted in `unit`.

    So intervals in steps, samples or tokens stay exact while the batch changes; a period of -1 is
    never due.
    """
    if period == -1:
      return False
    return self.measure(after, unit) // period > self.measure(before, unit) // period

  def end(self) -> Position:
    """The position at which the run is complete."""
    return self.phases[-1].end

  def starting_at(self, position: Position) -> "BatchPlan":
    """The plan from `position` on, for a run that is resumed there.

    If this plan made the steps before, its later steps stay the same. If another did, the schedule
    takes effect at exactly the samples consumed, and a budget in samples or tokens ends where it
    would have.

    Raises:
      UserError: the budget ends inside a microbatch.
    """
    phases = phases_of(self.schedule, self.budget, position)
    return dataclasses.replace(self, phases=phases)

  def with_batch_from(self, position: Position, batch: int) -> "BatchPlan":
    """The plan with `batch` samples per step from `position` on, as batch_schedule=gns decided.

    Args:
      position: where a step begins.
      batch: a multiple of the microbatch.

    Raises:
      UserError: the budget ends inside a microbatch.
    """
    before = [(int(p.at), p.batch) for p in self.schedule.points if p.at < position.samples]
    return self.with_schedule([*before, (position.samples, batch)]).starting_at(position)

  def with_schedule(self, changes: Sequence[tuple[int, int]]) -> "BatchPlan":
    """The plan with another schedule: `changes` are pairs (samples consumed, samples per step)."""
    micro = self.micro_batch_to_train
    points = tuple(SchedulePoint(Fraction(samples), batch, micro) for samples, batch in changes)
    plan = dataclasses.replace(self, schedule=BatchSchedule("samples", points))
    return plan.starting_at(Position(0, 0))

  def as_dict(self) -> dict[str, object]:
    """The derived sizes, for the run's config.yml and its checkpoints."""
    names = ("micro_batch_to_train", "global_batch_to_train", "global_batch_to_load", "eval_batch")
    sizes: dict[str, object] = {name: getattr(self, name) for name in names}
    sizes |= {
      "num_devices": self.topology.num_devices,
      "per_device_batch_size": text(self.per_device_batch_size),
      "gradient_accumulation_steps": self.gradient_accumulation_steps,
      "tokens_per_step": self.tokens_per_step,
      "steps": self.steps,
      "total_samples": self.total_samples,
      "total_tokens": self.total_tokens,
      "batch_schedule": [[text(point.at), point.batch] for point in self.schedule.points],
    }
    if len(self.phases) > 1:
      rows = [[phase.first.samples, phase.batch, phase.num_microbatches] for phase in self.phases]
      sizes["batch_phases"] = rows
    return sizes

  def __str__(self) -> str:
    return "\n".join([self.derivation(), *self._phase_lines()])

  def derivation(self) -> str:
    """Every size with its formula, one line each."""
    rows = self._derivation()
    width = max(len(f"{size:,}") for _, size, _, _ in rows)
    lines = [f"  {name:<21} {size:>{width},} {unit:<7} = {how}" for name, size, unit, how in rows]
    return "\n".join(["Batch plan", *lines])

  def _phase_lines(self) -> list[str]:
    """One line per phase, if there are several."""
    missed = [
      f"  phase {number} of the batch schedule has no step: the run ends or goes on before it"
      for number in self.phases_not_reached
    ]
    if len(self.phases) == 1:
      return missed
    return missed + [
      f"  from sample {phase.first.samples:>13,}: {phase.batch:,} samples per step, "
      f"{phase.num_microbatches:,} × {phase.micro_batch:,}, {phase.num_steps:,} steps"
      for phase in self.phases
    ]

  def _derivation(self) -> list[tuple[str, int, str, str]]:
    """(name, size, unit, formula) of every size; a formula uses only sizes above it."""
    devices = self.topology.num_devices
    micro, batch = self.micro_batch_to_train, self.global_batch_to_train
    per_device, factor = text(self.per_device_batch_size), text(self.expansion_factor_real_data)
    per_device_eval = text(self.per_device(self.eval_batch))
    accumulation, length = f"{self.gradient_accumulation_steps:,}", f"{self.max_target_length:,}"
    samples = {
      "micro_batch_to_train": (micro, f"{devices:,} × per_device_batch_size {per_device}"),
      "global_batch_to_train": (batch, f"{micro:,} × gradient_accumulation_steps {accumulation}"),
      "global_batch_to_load": (
        self.global_batch_to_load,
        f"{batch:,} × expansion_factor_real_data {factor}",
      ),
      "eval_batch": (
        self.eval_batch,
        f"{devices:,} × eval_per_device_batch_size {per_device_eval}",
      ),
    }
    total = self.total_samples
    return [
      ("num_devices", devices, "devices", str(self.topology)),
      *[(name, size, "samples", how) for name, (size, how) in samples.items()],
      (
        "tokens_per_step",
        self.tokens_per_step,
        "tokens",
        f"{batch:,} × max_target_length {length}",
      ),
      ("total_samples", total, "samples", self._summed()),
      ("total_tokens", self.total_tokens, "tokens", f"{total:,} × {length}"),
    ]

  def _summed(self) -> str:
    """What total_samples is the sum of: for a resumed run, what it has consumed and what is left."""
    phase, several = self.phases[0], len(self.phases) > 1
    start = phase.first
    before = f"{start.samples:,} in {start.step:,} steps + " if start.step else ""
    if several:
      return f"{before}sum of the phases, steps {self.steps:,}"
    return f"{before}{phase.batch:,} × {'' if before else 'steps '}{phase.num_steps:,}"


def derive(keys: BatchKeys, topology: Topology, build: Build | None = None) -> BatchPlan:
  """Derives every size from the keys and the devices, and checks every phase.

  Args:
    keys: the sizes, the schedule and the budget as they are given.
    topology: the devices.
    build: makes the phases of a schedule that SCHEDULES does not have.

  Raises:
    UserError: sizes contradict each other or are not whole; the message suggests sizes that work.
  """
  sizes = solve(keys.given_sizes(), topology)
  schedule = batch_schedule(ScheduleInputs(keys, sizes, topology), build)
  factor = max(Fraction(keys.expansion_factor_real_data), Fraction(0)) or Fraction(1)
  _check_loads(schedule, factor)
  budget = _budget(keys)
  return BatchPlan(
    topology=topology,
    max_target_length=keys.max_target_length,
    per_device_batch_size=Fraction(sizes.micro_batch, topology.num_devices),
    gradient_accumulation_steps=sizes.gradient_accumulation_steps,
    expansion_factor_real_data=factor,
    micro_batch_to_train=sizes.micro_batch,
    global_batch_to_train=sizes.batch,
    global_batch_to_load=int(sizes.batch * factor),
    eval_batch=_eval_batch(Fraction(keys.eval_per_device_batch_size), sizes.micro_batch, topology),
    schedule=schedule,
    budget=budget,
    phases=phases_of(schedule, budget, Position(0, 0)),
    begins_with_batch_size=isinstance(keys.batch_schedule, str),
  )


def _eval_batch(per_device: Fraction, micro_batch: int, topology: Topology) -> int:
  """Samples of one evaluation batch: by eval_per_device_batch_size, or training's microbatch."""
  if per_device == 0:
    return micro_batch
  return whole_micro_batch(GivenSize("eval_per_device_batch_size", per_device), topology)


def _check_loads(schedule: BatchSchedule, factor: Fraction) -> None:
  """Checks that global_batch_to_load is a whole number of samples in every phase."""
  batches = [point.batch for point in schedule.points]
  for number, batch in enumerate(batches, 1):
    loaded = batch * factor
    if loaded.denominator == 1:
      continue
    # A suggested factor must work for all phases, so it is a fraction over their common divisor.
    common = math.gcd(*batches)
    counts = (math.floor(common * factor), math.floor(common * factor) + 1)
    offers = [text(Fraction(count, common)) for count in counts if count > 0]
    phase = f" of phase {number}" if len(batches) > 1 else ""
    raise UserError(
      f"expansion_factor_real_data={text(factor)} × global_batch_to_train={batch}{phase} is "
      f"{text(loaded)}, but global_batch_to_load must be a whole number of samples; "
      f"nearest: {' or '.join(f'expansion_factor_real_data={offer}' for offer in offers)}"
    )


def _budget(keys: BatchKeys) -> Budget:
  """Returns the budget, from the one of the three keys that is set."""
  sizes = {
    "steps": keys.steps,
    "total_samples": keys.total_samples,
    "total_tokens": keys.total_tokens,
  }
  given = [key for key, size in sizes.items() if size != -1]
  if len(given) != 1:
    # The example keeps the last of several: steps has a default in base.yml, the others have none.
    unset = " ".join(f"{key}=-1" for key in given[:-1]) or "steps=1000"
    values = ", ".join(f"{key}={size}" for key, size in sizes.items())
    raise UserError(f"{values}: exactly one must be set, the others -1; for example {unset}")
  if keys.total_tokens != -1:
    length = keys.max_target_length
    return Budget("total_tokens", Fraction(keys.total_tokens, length), length)
  if keys.total_samples != -1:
    return Budget("total_samples", Fraction(keys.total_samples))
  return Budget("steps", Fraction(keys.steps))
