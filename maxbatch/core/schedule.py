"""The global batch size over a run: constant, ramp-up, or any other schedule.

A schedule is a list of phases (at, batch): the first step that begins at or after `at` takes
`batch` samples, and so do the steps after it until the next phase begins. `at` counts steps,
samples or tokens (batch_schedule_unit). The batch is a pure function of the progress, so a run that
is resumed, also on other devices, continues the same schedule.

    keys                                            phases
    batch_schedule=[[0, 32], [10000, 64]]           as listed
    batch_schedule_type=linear                      (i · length / n, start + i · increment) for
                                                    i = 0 … n, n = (B − start) / increment
    batch_schedule_type=doubling                    (i · length / n, start · 2^i) for
                                                    i = 0 … n, n = log2(B / start)
    batch_schedule_type=seesaw                      start · 2^i from where the learning rate's schedule
                                                    is at 2^-i of its peak
    enable_rampup_batch_size=true                   linear in per_device_batch_size, over
                                                    global_rampup_samples, as in MaxText
    batch_schedule=gns                              from B on, as the gradient noise scale allows
    batch_schedule=file                             as another run recorded it

B is the run's batch, global_batch_to_train: the last phase of a ramp, but the first of gns and
file. batch/from_config.py makes these two and seesaw. Every phase must be a multiple of the data-parallel groups. A
phase keeps the run's microbatch where that divides its batch, and changes only the number of gradient
accumulation steps, so a ramp compiles nothing new; else it takes the largest smaller microbatch that
does.

Example: batch_size=512, batch_schedule_type=linear, batch_size_start=128, batch_size_increment=128
and batch_schedule_length=30000 give n = (512 − 128) / 128 = 3 increments of 30000 / 3 = 10000
samples: phases (0, 128), (10000, 256), (20000, 384), (30000, 512). With a microbatch of 128 they
take 1, 2, 3 and 4 gradient accumulation steps. The first phase has ceil(10000 / 128) = 79 steps and
ends at sample 10112. Starts are absolute, so the second phase is 112 samples shorter for it.

enable_rampup_batch_size, per_device_batch_size_start, per_device_batch_size_increment and
global_rampup_samples are MaxText's names. To add a schedule, write a function from ScheduleInputs
to PhaseStarts and register it in SCHEDULES.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

from maxbatch.core.keys import BatchKeys, Number, Pairs, exact, pair_text, text, whole
from maxbatch.core.phases import BatchSchedule, SchedulePoint, check_increments
from maxbatch.core.solve import (
  MOST_SAMPLES,
  Sizes,
  describe_groups,
  fitting_micro_batch,
  nearest_multiples,
)
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

PhaseStarts = list[tuple[Fraction, Fraction]]
"""(at, samples per step) of every phase, the first at 0."""


@dataclasses.dataclass(frozen=True)
class ScheduleInputs:
  """What a schedule is computed from: the keys, the run's sizes, and the devices."""

  keys: BatchKeys
  sizes: Sizes
  topology: Topology


@dataclasses.dataclass(frozen=True, init=False)
class RampupBatchManager:
  """A ramp-up in equal increments of the batch, each in force for equally many samples.

  Sizes are per device and microbatch, and may be fractions. A step takes `samples_per_size` times
  as many: devices × gradient accumulation steps, or 1 where the sizes are those of a step. Phase i
  begins when i · samples_per_increment samples are consumed, independent of the devices, steps and
  restarts before.
  """

  per_device_batch_size_start: Fraction
  per_device_batch_size_increment: Fraction
  per_device_batch_size: Fraction
  global_rampup_samples: Fraction
  samples_per_size: int

  def __init__(
    self,
    per_device_batch_size_start: Number,
    per_device_batch_size_increment: Number,
    per_device_batch_size: Number,
    global_rampup_samples: Number,
    samples_per_size: int = 1,
  ):
    """Makes the numbers exact; raises UserError unless whole increments lead to the last size."""
    sizes = {
      "per_device_batch_size_start": per_device_batch_size_start,
      "per_device_batch_size_increment": per_device_batch_size_increment,
      "per_device_batch_size": per_device_batch_size,
      "global_rampup_samples": global_rampup_samples,
    }
    for key, value in sizes.items():
      object.__setattr__(self, key, exact(key, value))
    object.__setattr__(self, "samples_per_size", whole("samples_per_size", samples_per_size))
    start, step = self.per_device_batch_size_start, self.per_device_batch_size_increment
    keys = ("per_device_batch_size_start", "per_device_batch_size_increment")
    if min(start, step, self.samples_per_size, self.global_rampup_samples) <= 0:
      raise UserError(
        f"{keys[0]}={text(start)}, {keys[1]}={text(step)}, "
        f"global_rampup_samples={text(self.global_rampup_samples)} and "
        f"samples_per_size={self.samples_per_size} must all be above 0; for example 1"
      )
    rise = self.per_device_batch_size - start
    if rise <= 0 or rise % step:
      count = max(1, round(rise / step))
      raise UserError(
        f"{keys[1]}={text(step)} must lead from {keys[0]}={text(start)} to per_device_batch_size="
        f"{text(self.per_device_batch_size)} in whole increments; for example "
        f"per_device_batch_size={text(start + count * step)}"
      )

  @property
  def num_increments(self) -> int:
    """(target − start) / increment."""
    rise = self.per_device_batch_size - self.per_device_batch_size_start
    return int(rise / self.per_device_batch_size_increment)

  @property
  def samples_per_increment(self) -> Fraction:
    """global_rampup_samples / num_increments."""
    return self.global_rampup_samples / self.num_increments

  def phase_at(self, samples: int) -> int:
    """Returns the phase (from 0) of the step that begins when `samples` are consumed."""
    return min(self.num_increments, math.floor(samples / self.samples_per_increment))

  def batch_of(self, phase: int) -> Fraction:
    """Returns the samples per step in a phase."""
    size = self.per_device_batch_size_start + phase * self.per_device_batch_size_increment
    return size * self.samples_per_size

  def batch_at(self, samples: int) -> Fraction:
    """Returns the samples of the step that begins when `samples` are consumed."""
    return self.batch_of(self.phase_at(samples))

  def phase_starts(self) -> PhaseStarts:
    """Returns where each phase begins, in samples, and its batch."""
    phases = range(self.num_increments + 1)
    return [(phase * self.samples_per_increment, self.batch_of(phase)) for phase in phases]


def constant(inputs: ScheduleInputs) -> PhaseStarts:
  """Keeps the run's batch throughout."""
  return [(Fraction(0), Fraction(inputs.sizes.batch))]


def rampup(inputs: ScheduleInputs) -> PhaseStarts:
  """Ramps up as MaxText does: per_device_batch_size_start, …_increment and global_rampup_samples."""
  given, sizes = inputs.keys, inputs.sizes
  per_size = inputs.topology.num_devices * sizes.num_microbatches
  start = Fraction(given.per_device_batch_size_start)
  increment = Fraction(given.per_device_batch_size_increment)
  target = Fraction(sizes.batch, per_size)
  keys = ("per_device_batch_size_start", "per_device_batch_size_increment")
  unit = Fraction(inputs.topology.num_batch_groups, per_size)
  check_increments(keys, (start, increment, target), unit, "per_device_batch_size")
  samples = Fraction(given.global_rampup_samples)
  return RampupBatchManager(start, increment, target, samples, per_size).phase_starts()


def linear(inputs: ScheduleInputs) -> PhaseStarts:
  """Ramps up from batch_size_start to the run's batch in equal increments, over batch_schedule_length."""
  length, start, target = _length(inputs), _start(inputs), Fraction(inputs.sizes.batch)
  given = inputs.keys.batch_size_increment
  increment = start if given == -1 else Fraction(given)
  unit = Fraction(1 if inputs.keys.pad_batch else inputs.topology.num_batch_groups)
  keys = ("batch_size_start", "batch_size_increment")
  check_increments(keys, (start, increment, target), unit, "batch_size")
  return RampupBatchManager(start, increment, target, length, 1).phase_starts()


def doubling(inputs: ScheduleInputs) -> PhaseStarts:
  """Doubles from batch_size_start to the run's batch; all phases but the last are equally long."""
  whole, batches = _length(inputs), doublings(inputs)
  length = whole / (len(batches) - 1)
  return [(number * length, batch) for number, batch in enumerate(batches)]


def doublings(inputs: ScheduleInputs) -> list[Fraction]:
  """Returns the batches from batch_size_start to the run's, each twice the one before.

  Raises:
    UserError: doubling does not lead there.
  """
  start, target = _start(inputs), inputs.sizes.batch
  count = (target / start).numerator.bit_length() - 1
  if start * 2**count != target or count == 0:
    halves = [target >> n for n in range(1, target.bit_length()) if target % (1 << n) == 0]
    fitting = [h for h in halves if h % inputs.topology.num_batch_groups == 0]
    near = sorted(fitting, key=lambda half: abs(half - start))[:2]
    offers = " or ".join(f"batch_size_start={half}" for half in near)
    raise UserError(
      f"batch_size_start={text(start)} does not reach batch_size={target} by doubling; "
      + (
        f"nearest: {offers}"
        if near
        else "an odd multiple of the data-parallel groups cannot be halved; use "
        "batch_schedule_type=linear"
      )
    )
  return [start * 2**number for number in range(count + 1)]


def listed(inputs: ScheduleInputs) -> PhaseStarts:
  """Takes the phases as listed: batch_schedule=[[at, batch], …]."""
  pairs = inputs.keys.batch_schedule
  example = "for example batch_schedule=[[0, 32], [10000, 64]]"
  if not pairs or isinstance(pairs, str) or any(len(pair) != 2 for pair in pairs):
    raise UserError(f"batch_schedule={_shown(pairs)} must be pairs [at, batch]; {example}")
  if pairs[0][0] != 0:
    raise UserError(f"batch_schedule={_shown(pairs)} must begin with a pair at 0; {example}")
  for number, (before, after) in enumerate(itertools.pairwise(pairs), 2):
    if before[0] >= after[0]:
      raise UserError(
        f"batch_schedule: phase {number}, {pair_text(after)}, must begin after {text(before[0])}, where "
        f"the phase before it begins; for example {pair_text((before[0] + 1, after[1]))}"
      )
  return [(Fraction(at), Fraction(batch)) for at, batch in pairs]


Build = Callable[[ScheduleInputs], PhaseStarts]
SEESAW = "seesaw"
"""The schedule that follows the learning rate's (batch/learning_rate.py), in samples."""
SCHEDULES: dict[str, Build] = {
  "constant": constant,
  "rampup": rampup,
  "list": listed,
  "linear": linear,
  "doubling": doubling,
}


def make_schedule(inputs: ScheduleInputs, build: Build | None = None) -> BatchSchedule:
  """Returns the run's schedule. Every phase is checked, also those that the budget does not reach.

  Args:
    build: makes the phases; None: the schedule of SCHEDULES that the keys name.

  Raises:
    UserError: a phase does not divide over these devices, or keys contradict each other.
  """
  name = schedule_name(inputs.keys)
  if not build and name not in SCHEDULES:
    raise UserError(
      f"batch_schedule_type={name}: there is no such batch_schedule_type; "
      f"known: {', '.join(SCHEDULES)}"
    )
  starts = (build or SCHEDULES[name])(inputs)
  is_in_samples = name in ("rampup", SEESAW) or isinstance(inputs.keys.batch_schedule, str)
  unit = "samples" if is_in_samples else inputs.keys.batch_schedule_unit
  scale = inputs.keys.max_target_length if unit == "tokens" else 1
  points = [_point(inputs, number, *start) for number, start in enumerate(starts, 1)]
  return BatchSchedule(
    unit="steps" if unit == "steps" else "samples",
    points=tuple(dataclasses.replace(point, at=point.at / scale) for point in points),
    may_pad=inputs.keys.pad_batch,
  )


def schedule_name(keys: BatchKeys) -> str:
  """Returns the name of the one schedule that the keys select.

  Raises:
    UserError: they select several.
  """
  pairs = keys.batch_schedule
  asked = {
    f"batch_schedule_type={keys.batch_schedule_type}": keys.batch_schedule_type,
    "enable_rampup_batch_size=true": "rampup" if keys.enable_rampup_batch_size else "constant",
    f"batch_schedule={_shown(pairs)}": pairs
    if isinstance(pairs, str)
    else ("list" if pairs else "constant"),
  }
  wanted = {key: name for key, name in asked.items() if name != "constant"}
  if len(set(wanted.values())) > 1:
    raise UserError(
      f"{' and '.join(wanted)} are different schedules; keep one of them, for example "
      "enable_rampup_batch_size=false batch_schedule=[]"
    )
  return next(iter(wanted.values()), "constant")


def _point(inputs: ScheduleInputs, number: int, at: Fraction, batch: Fraction) -> SchedulePoint:
  """Returns a phase with its microbatch: the run's, or the largest smaller one that divides the batch."""
  groups = inputs.topology.num_batch_groups
  rows = batch / groups
  is_padded = inputs.keys.pad_batch and batch.denominator == 1
  if (rows.denominator != 1 and not is_padded) or rows <= 0:
    nearest = " or ".join(f"[{text(at)}, {near}]" for near in nearest_multiples(groups, batch))
    raise UserError(
      f"batch_schedule: phase {number}, [{text(at)}, {text(batch)}], has {text(batch)} samples, "
      f"which must be a positive multiple of {describe_groups(inputs.topology)}; nearest: {nearest}"
    )
  if batch > MOST_SAMPLES:
    raise UserError(
      f"batch_schedule: phase {number}, [{text(at)}, {text(batch)}], has more than the "
      f"{MOST_SAMPLES:,} samples that a step can have; for example "
      f"[{text(at)}, {inputs.sizes.batch}]"
    )
  micro = fitting_micro_batch(inputs.sizes.micro_batch, int(batch), inputs.topology)
  return SchedulePoint(at, int(batch), micro)


def _start(inputs: ScheduleInputs) -> Fraction:
  """Returns batch_size_start, which must be given.

  A default such as the microbatch would depend on the devices and their memory, and a run that is
  resumed on other devices would continue another ramp.
  """
  if inputs.keys.batch_size_start != -1:
    return Fraction(inputs.keys.batch_size_start)
  kind, target = inputs.keys.batch_schedule_type, inputs.sizes.batch
  groups = inputs.topology.num_batch_groups
  halved = next((n for n in (8, 4, 2) if target % (n * groups) == 0), None)
  if kind in ("doubling", SEESAW) and halved is None:
    offer = (
      f"but half of batch_size={target} is no multiple of {describe_groups(inputs.topology)}; use "
      "batch_schedule_type=linear"
    )
  elif target == groups:
    offer = (
      f"but batch_size={target} is the smallest batch on {describe_groups(inputs.topology)}; "
      "raise batch_size"
    )
  else:
    offer = f"for example batch_size_start={target // halved if halved else groups}"
  raise UserError(
    f"batch_schedule_type={kind} needs batch_size_start, the samples per step of its first phase; "
    f"{offer}"
  )


def _length(inputs: ScheduleInputs) -> Fraction:
  if inputs.keys.batch_schedule_length == -1:
    raise UserError(
      f"batch_schedule_type={inputs.keys.batch_schedule_type} needs the length of its ramp in "
      f"{inputs.keys.batch_schedule_unit}; for example batch_schedule_length=10000"
    )
  return Fraction(inputs.keys.batch_schedule_length)


def _shown(pairs: Pairs | str) -> str:
  """Returns the list for a message; the middle of a long one is left out."""
  if isinstance(pairs, str):
    return pairs
  shown = list(map(pair_text, pairs))
  return f"[{', '.join(shown if len(shown) < 5 else [*shown[:2], '…', shown[-1]])}]"
