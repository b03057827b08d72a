"""BatchPlan: every batch size of a run, derived exactly and explained line by line.

Sizes are rational numbers until they count samples, so that 0.29 samples on each of 100 devices
are 29 samples, and nothing is ever truncated. Whoever needs a size asks the plan: which batch is in
force at a position, how many passes it takes, where the next step begins, where the run ends.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from maxbatch.batch.phases import (
  BatchSchedule,
  Budget,
  Phase,
  Position,
  SchedulePoint,
  phase_at_sample,
  phase_at_step,
  phases_of,
)
from maxbatch.batch.schedule import (
  ScheduleInputs,
  batch_schedule,
  begins_with_batch_size,
  largest_decided,
)
from maxbatch.batch.solve import GivenSize, given_sizes, solve, text, whole_micro_batch
from maxbatch.batch.topology import Topology
from maxbatch.config.schema import BatchConfig, RunConfig
from maxbatch.errors import UserError

Unit = Literal["steps", "samples", "tokens"]

_SMALLEST_MICROBATCH_CAPACITY = 16
"""Microbatches the fused step has room for at least; unused room is a few KiB of token ids."""


@dataclasses.dataclass(frozen=True)
class BatchPlan:
  """The sizes of a run. Samples are rows of `max_target_length` tokens.

  Sizes without a position are those of the run's batch, at which a ramp arrives.
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
  """What lies between the plan's start and its end, at least one phase."""
  largest_batch: int = 0
  """Up to which the run may decide to go; 0 if it decides nothing."""
  begins_with_batch_size: bool = False
  """Whether the run's batch is the first of the schedule, not the last."""

  @property
  def tokens_per_step(self) -> int:
    """Tokens in one optimizer update, padding included."""
    return self.tokens(self.global_batch_to_train)

  @property
  def steps(self) -> int:
    """Updates made when the run ends."""
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
    """Microbatches the compiled fused step has room for, in every phase.

    A power of two, so that changing gradient_accumulation_steps within it compiles nothing new.
    """
    scheduled = max(point.num_microbatches for point in self.schedule.points)
    decided = self.largest_batch // self.micro_batch_to_train
    needed = max(_SMALLEST_MICROBATCH_CAPACITY, scheduled, decided)
    return 1 << (needed - 1).bit_length()

  @property
  def micro_batches(self) -> tuple[int, ...]:
    """The different microbatches of the phases, each one shape to compile, as they first occur."""
    return tuple(dict.fromkeys(phase.micro_batch for phase in self.phases))

  def tokens(self, samples: int) -> int:
    """Tokens in `samples` samples."""
    return samples * self.max_target_length

  def per_device(self, micro_batch: int) -> Fraction:
    """Samples of a microbatch on one device."""
    return Fraction(micro_batch, self.topology.num_devices)

  def device_tokens(self, micro_batch: int) -> Fraction:
    """Tokens of a microbatch on one device."""
    return self.per_device(micro_batch) * self.max_target_length

  def largest_phase(self, micro_batch: int) -> Phase:
    """The phase with the most passes of this microbatch."""
    phases = [phase for phase in self.phases if phase.micro_batch == micro_batch]
    return max(phases, key=lambda phase: phase.num_microbatches)

  def phase_at(self, samples: int) -> Phase:
    """The phase of the step that begins when `samples` are consumed."""
    return phase_at_sample(self.phases, samples)

  def batch_at(self, samples: int) -> int:
    """Samples of the step that begins when `samples` are consumed."""
    return self.phase_at(samples).batch

  def num_microbatches_at(self, position: Position) -> int:
    """Passes of the step that begins at `position`."""
    return self.phase_at(position.samples).num_microbatches

  def share_of_batch(self, position: Position) -> Fraction:
    """The batch at `position` over the run's batch."""
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

  def end(self) -> Position:
    """The position at which the run is complete."""
    return self.phases[-1].end

  def starting_at(self, position: Position) -> "BatchPlan":
    """The plan from `position` on: a resumed run, whose steps until there another plan made.

    On this plan's own way it changes nothing. Elsewhere the schedule takes effect from exactly the
    samples that are consumed, and a budget in samples or tokens ends where it did.

    Raises:
      UserError: the budget ends inside a microbatch.
    """
    phases = phases_of(self.schedule, self.budget, position)
    return dataclasses.replace(self, phases=phases)

  def changed_at(self, position: Position, batch: int) -> "BatchPlan":
    """The plan of a run that takes `batch` samples per step from `position` on, as it decided.

    Args:
      position: where a step begins.
      batch: a multiple of the microbatch.

    Raises:
      UserError: the budget ends inside a microbatch.
    """
    before = [(int(p.at), p.batch) for p in self.schedule.points if p.at < position.samples]
    return self.following([*before, (position.samples, batch)]).starting_at(position)

  def following(self, changes: Sequence[tuple[int, int]]) -> "BatchPlan":
    """The plan with another schedule: from so many samples on, a step takes so many samples."""
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
    """Every size with how it comes about, a line each."""
    rows = self._derivation()
    how_width = max(len(how) for _, how, _, _ in rows)
    size_width = max(len(f"{size:,}") for _, _, size, _ in rows)
    lines = [
      f"  {name:<21}  {how:<{how_width}} = {size:>{size_width},} {unit}"
      for name, how, size, unit in rows
    ]
    return "\n".join(["Batch plan", *lines])

  def _phase_lines(self) -> list[str]:
    """A line per phase, if there are several."""
    if len(self.phases) == 1:
      return []
    return [
      f"  from sample {phase.first.samples:>13,}: {phase.batch:,} samples per step, "
      f"{phase.num_microbatches:,} × {phase.micro_batch:,}, {phase.num_steps:,} steps"
      for phase in self.phases
    ]

  def _derivation(self) -> list[tuple[str, str, int, str]]:
    """Name, derivation, size and unit of every size, each derived from those above it."""
    devices = self.topology.num_devices
    micro, batch = self.micro_batch_to_train, self.global_batch_to_train
    per_device, factor = text(self.per_device_batch_size), text(self.expansion_factor_real_data)
    per_device_eval = text(self.per_device(self.eval_batch))
    times = f"{devices:,} devices ×"
    accumulation, length = f"{self.gradient_accumulation_steps:,}", f"{self.max_target_length:,}"
    constant = len(self.phases) == 1
    summed = f"{batch:,} × steps {self.steps:,}"
    summed = summed if constant else f"sum of the phases, steps {self.steps:,}"
    return [
      ("num_devices", str(self.topology), devices, "devices"),
      (
        "micro_batch_to_train",
        f"{times} per_device_batch_size {per_device}",
        micro,
        "samples per pass",
      ),
      (
        "global_batch_to_train",
        f"{micro:,} × gradient_accumulation_steps {accumulation}",
        batch,
        "samples per step",
      ),
      (
        "global_batch_to_load",
        f"{batch:,} × expansion_factor_real_data {factor}",
        self.global_batch_to_load,
        "samples per load",
      ),
      (
        "eval_batch",
        f"{times} eval_per_device_batch_size {per_device_eval}",
        self.eval_batch,
        "samples per pass",
      ),
      (
        "tokens_per_step",
        f"{batch:,} × max_target_length {length}",
        self.tokens_per_step,
        "tokens",
      ),
      ("total_samples", summed, self.total_samples, "samples"),
      ("total_tokens", f"{self.total_samples:,} × {length}", self.total_tokens, "tokens"),
    ]


def plan_batches(batch: BatchConfig, run: RunConfig, topology: Topology) -> BatchPlan:
  """Derives every size from the configuration and the devices, and checks every phase.

  Raises:
    UserError: sizes contradict each other or are not whole; the message offers what is.
  """
  sizes = solve(given_sizes(batch), topology)
  request = ScheduleInputs(batch, sizes, topology)
  schedule = batch_schedule(request)
  factor = batch.expansion_factor_real_data
  factor = factor if factor > 0 else Fraction(1)
  _check_loads(schedule, factor)
  budget = _budget(run, batch.max_target_length)
  return BatchPlan(
    topology=topology,
    max_target_length=batch.max_target_length,
    per_device_batch_size=Fraction(sizes.micro_batch, topology.num_devices),
    gradient_accumulation_steps=sizes.gradient_accumulation_steps,
    expansion_factor_real_data=factor,
    micro_batch_to_train=sizes.micro_batch,
    global_batch_to_train=sizes.batch,
    global_batch_to_load=int(sizes.batch * factor),
    eval_batch=_eval_batch(batch.eval_per_device_batch_size, sizes.micro_batch, topology),
    schedule=schedule,
    budget=budget,
    phases=phases_of(schedule, budget, Position(0, 0)),
    largest_batch=largest_decided(request),
    begins_with_batch_size=begins_with_batch_size(batch),
  )


def _eval_batch(per_device: Fraction, micro_batch: int, topology: Topology) -> int:
  """Samples of one evaluation pass: by its own key, or as in training."""
  if per_device == 0:
    return micro_batch
  return whole_micro_batch(GivenSize("eval_per_device_batch_size", per_device), topology)


def _check_loads(schedule: BatchSchedule, factor: Fraction) -> None:
  """batch × factor must be whole in every phase."""
  batches = [point.batch for point in schedule.points]
  for number, batch in enumerate(batches, 1):
    loaded = batch * factor
    if loaded.denominator == 1:
      continue
    # The factor must make all phases whole.
    common = math.gcd(*batches)
    counts = (math.floor(common * factor), math.floor(common * factor) + 1)
    offers = [text(Fraction(count, common)) for count in counts if count > 0]
    phase = f" of phase {number}" if len(batches) > 1 else ""
    raise UserError(
      f"expansion_factor_real_data={text(factor)} × global_batch_to_train={batch}{phase} is "
      f"{text(loaded)}, but global_batch_to_load counts whole samples; "
      f"nearest: {' or '.join(f'expansion_factor_real_data={offer}' for offer in offers)}"
    )


def _budget(run: RunConfig, max_target_length: int) -> Budget:
  """The budget; exactly one of the three keys gives it."""
  sizes = {"steps": run.steps, "total_samples": run.total_samples, "total_tokens": run.total_tokens}
  given = [key for key, size in sizes.items() if size != -1]
  if len(given) != 1:
    # Of several the last is kept: steps comes from base.yml, the others from a person.
    unset = " ".join(f"{key}=-1" for key in given[:-1]) or "steps=1000"
    values = ", ".join(f"{key}={size}" for key, size in sizes.items())
    raise UserError(f"{values}: exactly one must be set, the others -1; for example {unset}")
  if given[0] == "total_tokens":
    return Budget("total_tokens", Fraction(run.total_tokens, max_target_length), max_target_length)
  if given[0] == "total_samples":
    return Budget("total_samples", Fraction(run.total_samples))
  return Budget("steps", Fraction(run.steps))
