"""BatchPlan: every batch size of a run, derived exactly and printed line by line.

solve.py gives the sizes of one step, schedule.py how they change, phases.py which steps have which.
The plan holds the results, and every other part of the program reads its sizes from it: the batch
at a position, its microbatches, where the next step begins and where the run ends.

    global_batch_to_load = global_batch_to_train · expansion_factor_real_data
    tokens_per_step      = global_batch_to_train · max_target_length
    total_samples        = sum of batch · steps over the phases

Sizes are fractions until they count samples: 0.29 on each of 100 devices are 29; none is truncated.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from maxbatch.core.keys import Unit, counted, text
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
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

_MIN_MICROBATCH_CAPACITY = 16
"""Microbatches that the fused step is compiled for at least; unused ones cost a few KiB each."""


class PlannedStep(NamedTuple):
  """One step of a plan: where it begins, and how many samples it takes in which microbatches."""

  position: Position
  batch: int
  num_microbatches: int
  micro_batch: int

  @property
  def samples(self) -> range:
    """The places of its samples in the run's stream."""
    return range(self.position.samples, self.position.samples + self.batch)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
  """The sizes of a run. A sample is a row of `max_target_length` tokens.

  Sizes without a position are those of the run's batch, a ramp-up's last. Its items are the steps:

    for position, batch, num_microbatches, micro_batch in plan:
      ...
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
  rate_is_of_first_batch: bool = False
  """Whether learning_rate is that of the schedule's first batch; for a ramp-up it is the last's."""

  @property
  def num_microbatches(self) -> int:
    """Microbatches of a step: gradient_accumulation_steps."""
    return self.gradient_accumulation_steps

  @property
  def padding_rows(self) -> int:
    """Rows of the last microbatch of a step that hold no sample, and weigh nothing (pad_batch)."""
    return self.micro_batch_to_train * self.num_microbatches - self.global_batch_to_train

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

    It covers every phase, and is a power of two, so that fewer accumulation steps compile nothing.
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
    """Returns the tokens in `samples` samples."""
    return samples * self.max_target_length

  def per_device(self, micro_batch: int) -> Fraction:
    """Returns the samples of a microbatch on one device."""
    return Fraction(micro_batch, self.topology.num_devices)

  def device_tokens(self, micro_batch: int) -> Fraction:
    """Returns the tokens of a microbatch on one device."""
    return self.per_device(micro_batch) * self.max_target_length

  def dispatched_tokens(self, streamed: bool) -> Fraction:
    """Returns the tokens on one device of the largest dispatch: one microbatch, or a step's most."""
    tokens = self.device_tokens(max(self.micro_batches))
    return tokens if streamed else self.microbatch_capacity * tokens

  def largest_phase(self, micro_batch: int) -> Phase | SchedulePoint:
    """Returns the phase with the most microbatches per step of those with this microbatch.

    Where the run ends before any of them, of those that its schedule has.
    """
    reached = [phase for phase in self.phases if phase.micro_batch == micro_batch]
    scheduled = [point for point in self.schedule.points if point.micro_batch == micro_batch]
    return max(reached or scheduled, key=lambda phase: phase.num_microbatches)

  def phase_at(self, samples: int) -> Phase:
    """Returns the phase of the step that begins when `samples` are consumed."""
    return phase_at_sample(self.phases, samples)

  def batch_at(self, samples: int) -> int:
    """Returns the samples of the step that begins when `samples` are consumed."""
    return self.phase_at(samples).batch

  def share_of_batch(self, position: Position) -> Fraction:
    """Returns the batch at `position` over the batch that learning_rate is given for."""
    first, last = self.schedule.points[0].batch, self.global_batch_to_train
    return Fraction(self.batch_at(position.samples), first if self.rate_is_of_first_batch else last)

  def samples_at(self, step: int) -> int:
    """Returns the samples consumed before `step` (0-based)."""
    phase = phase_at_step(self.phases, step)
    return phase.after(step - phase.first.step).samples

  def advance(self, position: Position) -> Position:
    """Returns the position one step further."""
    return Position(position.step + 1, position.samples + self.batch_at(position.samples))

  def measure(self, position: Position, unit: Unit) -> int:
    """Returns a position counted in steps, samples or tokens."""
    if unit == "steps":
      return position.step
    return position.samples if unit == "samples" else self.tokens(position.samples)

  def is_due(self, before: Position, after: Position, period: int, unit: Unit) -> bool:
    """Returns whether a multiple of `period` lies in (before, after], both counted in `unit`.

    So intervals in any unit stay exact while the batch changes; a period of -1 is never due.
    """
    if period == -1:
      return False
    return self.measure(after, unit) // period > self.measure(before, unit) // period

  def end(self) -> Position:
    """Returns the position at which the run is complete.

    Raises:
      UserError: the plan was made without a budget and has no end.
    """
    if self.budget.is_endless:
      raise UserError(
        "this plan has no end: it was made without steps, total_samples and total_tokens; give one of "
        "them, for example steps=1000"
      )
    return self.phases[-1].end

  def __iter__(self) -> Iterator[PlannedStep]:
    """Returns every step from the plan's start to its end, of which there may be none.

    `plan.starting_at(position)` begins elsewhere.
    """
    for phase in self.phases:
      for number in range(phase.num_steps):
        yield PlannedStep(
          phase.after(number), phase.batch, phase.num_microbatches, phase.micro_batch
        )

  def starting_at(self, position: Position) -> "BatchPlan":
    """Returns the plan from `position` on, for a run that is resumed there.

    If this plan made the steps before, its later steps stay the same. If another did, the schedule
    takes effect at exactly the samples consumed, and a budget in samples or tokens ends where it
    would have.

    Raises:
      UserError: the budget ends inside a microbatch.
    """
    phases = phases_of(self.schedule, self.budget, position)
    return dataclasses.replace(self, phases=phases)

  def with_batch_from(self, position: Position, batch: int) -> "BatchPlan":
    """Returns the plan with `batch` samples per step from `position` on, as batch_schedule=gns decided.

    Args:
      position: where a step begins.
      batch: a multiple of the microbatch.

    Raises:
      UserError: the budget ends inside a microbatch.
    """
    before = [(int(p.at), p.batch) for p in self.schedule.points if p.at < position.samples]
    return self.with_schedule([*before, (position.samples, batch)]).starting_at(position)

  def with_schedule(self, changes: Sequence[tuple[int, int]]) -> "BatchPlan":
    """Returns the plan with another schedule: `changes` are pairs (samples consumed, samples per step)."""
    micro = self.micro_batch_to_train
    points = tuple(SchedulePoint(Fraction(samples), batch, micro) for samples, batch in changes)
    plan = dataclasses.replace(self, schedule=BatchSchedule("samples", points))
    return plan.starting_at(Position(0, 0))

  def as_dict(self) -> dict[str, object]:
    """Returns the derived sizes, for the run's config.yml and its checkpoints."""
    names = ("micro_batch_to_train", "global_batch_to_train", "global_batch_to_load", "eval_batch")
    sizes: dict[str, object] = {name: getattr(self, name) for name in names}
    sizes |= {
      "num_devices": self.topology.num_devices,
      "per_device_batch_size": text(self.per_device_batch_size),
      "gradient_accumulation_steps": self.gradient_accumulation_steps,
      "tokens_per_step": self.tokens_per_step,
      **({"padding_rows": self.padding_rows} if self.padding_rows else {}),
      **({} if self.budget.is_endless else self._totals()),
      "batch_schedule": [[text(point.at), point.batch] for point in self.schedule.points],
    }
    if len(self.phases) > 1:
      rows = [[phase.first.samples, phase.batch, phase.num_microbatches] for phase in self.phases]
      sizes["batch_phases"] = rows
    return sizes

  def _totals(self) -> dict[str, int]:
    return {
      "steps": self.steps,
      "total_samples": self.total_samples,
      "total_tokens": self.total_tokens,
    }

  def __str__(self) -> str:
    return "\n".join([self.derivation(), *self._phase_lines()])

  def derivation(self) -> str:
    """Returns every size with its formula, one line each."""
    rows = self._derivation()
    width = max(len(f"{size:,}") for _, size, _, _ in rows)
    lines = [f"  {name:<21} {size:>{width},} {unit:<7} = {how}" for name, size, unit, how in rows]
    return "\n".join(["Batch plan", *lines])

  def _phase_lines(self) -> list[str]:
    """Returns one line per phase, if there are several."""
    missed = [
      f"  phase {number} of the batch schedule has no step: the run ends before it or starts after it"
      for number in self.phases_not_reached
    ]
    if len(self.phases) == 1:
      return missed
    lengths = [f"{phase.num_steps:,} steps" for phase in self.phases]
    if self.budget.is_endless:
      lengths[-1] = "without end"
    return missed + [
      f"  from sample {phase.first.samples:>13,}: {phase.batch:,} samples per step, "
      f"{phase.num_microbatches:,} × {phase.micro_batch:,}, {length}"
      for phase, length in zip(self.phases, lengths, strict=True)
    ]

  def _derivation(self) -> list[tuple[str, int, str, str]]:
    """Returns (name, size, unit, formula) of every size; a formula uses only sizes above it."""
    devices = self.topology.num_devices
    micro, batch = self.micro_batch_to_train, self.global_batch_to_train
    per_device, factor = text(self.per_device_batch_size), text(self.expansion_factor_real_data)
    per_device_eval = text(self.per_device(self.eval_batch))
    accumulation, length = f"{self.gradient_accumulation_steps:,}", f"{self.max_target_length:,}"
    if self.padding_rows:
      accumulation += f" − {counted(self.padding_rows, 'row')} of padding without weight"
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
    rows = [
      ("num_devices", devices, "devices", str(self.topology)),
      *[(name, size, "samples", how) for name, (size, how) in samples.items()],
      (
        "tokens_per_step",
        self.tokens_per_step,
        "tokens",
        f"{batch:,} × max_target_length {length}",
      ),
    ]
    if self.budget.is_endless:
      return rows
    total = self.total_samples
    return [
      *rows,
      ("total_samples", total, "samples", self._summed()),
      ("total_tokens", self.total_tokens, "tokens", f"{total:,} × {length}"),
    ]

  def _summed(self) -> str:
    """Says what total_samples is the sum of: for a resumed run, what it has consumed and what is left."""
    phase, several = self.phases[0], len(self.phases) > 1
    start = phase.first
    before = f"{start.samples:,} in {start.step:,} steps + " if start.step else ""
    if several:
      return f"{before}sum of the phases, steps {self.steps:,}"
    return f"{before}{phase.batch:,} × {'' if before else 'steps '}{phase.num_steps:,}"
