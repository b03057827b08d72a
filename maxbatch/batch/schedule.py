"""The batch size as a pure function of progress: ramp-up and any other schedule.

A schedule is a list of (at, batch): from `at` on, a step takes `batch` samples. The last batch is
the run's. Add a schedule by writing a function and registering it in SCHEDULES.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from fractions import Fraction

from maxbatch.batch.phases import BatchSchedule, SchedulePoint
from maxbatch.batch.schedule_file import read_changes
from maxbatch.batch.solve import Sizes, groups_of, nearest_divisors, nearest_multiples, text
from maxbatch.batch.topology import Topology
from maxbatch.config.registry import registered
from maxbatch.config.schema import BatchConfig
from maxbatch.errors import UserError

_MOST_GROWTH = 16
"""Times the first batch that batch_schedule=gns may reach by default."""

Steps = list[tuple[Fraction, Fraction]]
"""(at, samples per step) of every phase, the first at 0."""


@dataclasses.dataclass(frozen=True)
class ScheduleInputs:
  """What a schedule is made from: the keys, the sizes they solved to, and the devices."""

  config: BatchConfig
  sizes: Sizes
  topology: Topology


@dataclasses.dataclass(frozen=True)
class RampupBatchManager:
  """Equal increments of the batch, each in force for equally many samples.

  Sizes are per device and pass, and may be fractions; `samples_per_size` of them are one step.
  Stage i begins when i · samples_per_increment samples are consumed, however many devices, steps
  or restarts it took to get there.
  """

  per_device_batch_size_start: Fraction
  per_device_batch_size_increment: Fraction
  per_device_batch_size: Fraction
  global_rampup_samples: Fraction
  samples_per_size: int

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
    """The phase (from 0) of the step that begins when `samples` are consumed."""
    return min(self.num_increments, math.floor(samples / self.samples_per_increment))

  def batch_of(self, phase: int) -> Fraction:
    """Samples per step in a phase."""
    size = self.per_device_batch_size_start + phase * self.per_device_batch_size_increment
    return size * self.samples_per_size

  def batch_at(self, samples: int) -> Fraction:
    """Samples of the step that begins when `samples` are consumed."""
    return self.batch_of(self.phase_at(samples))

  def steps(self) -> Steps:
    """Every phase: the samples at which it begins, and its batch."""
    return [
      (phase * self.samples_per_increment, self.batch_of(phase))
      for phase in range(self.num_increments + 1)
    ]


def constant(request: ScheduleInputs) -> Steps:
  """The run's batch throughout."""
  return [(Fraction(0), Fraction(request.sizes.batch))]


def rampup(request: ScheduleInputs) -> Steps:
  """MaxText's ramp: per_device_batch_size_start, …_increment and global_rampup_samples."""
  config, sizes = request.config, request.sizes
  per_size = request.topology.num_devices * sizes.gradient_accumulation_steps
  start, increment = config.per_device_batch_size_start, config.per_device_batch_size_increment
  target = Fraction(sizes.batch, per_size)
  keys = ("per_device_batch_size_start", "per_device_batch_size_increment")
  unit = Fraction(request.topology.num_batch_groups, per_size)
  _check_increments(keys, (start, increment, target), unit, "per_device_batch_size")
  samples = Fraction(config.global_rampup_samples)
  return RampupBatchManager(start, increment, target, samples, per_size).steps()


def linear(request: ScheduleInputs) -> Steps:
  """From batch_size_start by batch_size_increment, over batch_schedule_length."""
  length, start, target = _length(request), _start(request), Fraction(request.sizes.batch)
  given = request.config.batch_size_increment
  increment = start if given == -1 else Fraction(given)
  unit = Fraction(request.topology.num_batch_groups)
  keys = ("batch_size_start", "batch_size_increment")
  _check_increments(keys, (start, increment, target), unit, "batch_size")
  return RampupBatchManager(start, increment, target, length, 1).steps()


def doubling(request: ScheduleInputs) -> Steps:
  """From batch_size_start to the run's batch by doubling, all batches for equally long."""
  whole, start, target = _length(request), _start(request), request.sizes.batch
  doublings = (target / start).numerator.bit_length() - 1
  if start * 2**doublings != target or doublings == 0:
    halves = [target >> n for n in range(1, target.bit_length()) if target % (1 << n) == 0]
    fitting = [h for h in halves if h % request.topology.num_batch_groups == 0]
    near = sorted(fitting, key=lambda half: abs(half - start))[:2]
    offers = " or ".join(f"batch_size_start={half}" for half in near)
    raise UserError(
      f"batch_size_start={text(start)} does not reach batch_size={target} by doubling; "
      + (f"nearest: {offers}" if near else "an odd multiple of the groups has no half: use linear")
    )
  length = whole / doublings
  return [(phase * length, start * 2**phase) for phase in range(doublings + 1)]


def listed(request: ScheduleInputs) -> Steps:
  """batch_schedule: [[at, batch], …], as it stands."""
  pairs = request.config.batch_schedule
  assert isinstance(pairs, tuple)
  example = "for example batch_schedule=[[0, 32], [10000, 64]]"
  if not pairs or any(len(pair) != 2 for pair in pairs):
    raise UserError(f"batch_schedule={_shown(pairs)} must be pairs [at, batch]; {example}")
  if pairs[0][0] != 0:
    raise UserError(f"batch_schedule={_shown(pairs)} must begin with a pair at 0; {example}")
  for number, (before, after) in enumerate(itertools.pairwise(pairs), 2):
    if before[0] >= after[0]:
      raise UserError(
        f"batch_schedule: phase {number}, {list(after)}, must begin after {before[0]}, where the "
        f"phase before it begins; for example {[before[0] + 1, after[1]]}"
      )
  return [(Fraction(at), Fraction(batch)) for at, batch in pairs]


def decided(request: ScheduleInputs) -> Steps:
  """The first batch; what follows is decided in the run (noise/controller.py).

  Raises:
    UserError: gns_max_batch_size leaves no room above it.
  """
  batch, most = request.sizes.batch, request.config.gns_max_batch_size
  if most != -1 and most < batch:
    raise UserError(
      f"gns_max_batch_size={most} must be at least batch_size={batch}, with which "
      f"batch_schedule=gns begins; for example gns_max_batch_size={16 * batch}"
    )
  return constant(request)


def recorded(request: ScheduleInputs) -> Steps:
  """What batch_schedule_file says: the decisions of another run, or anyone's.

  Raises:
    UserError: there is no such schedule, or it begins with another batch than the run's.
  """
  file, batch = request.config.batch_schedule_file, request.sizes.batch
  if not file:
    raise UserError(
      "batch_schedule=file needs batch_schedule_file, the schedule that a steered run wrote; for "
      "example batch_schedule_file=runs/steered/batch_schedule.yml"
    )
  changes = read_changes(pathlib.Path(file))
  if changes[0].batch != batch:
    raise UserError(
      f"batch_schedule_file={file} begins with {changes[0].batch} samples and batch_size is "
      f"{batch}; to follow the file, batch_size={changes[0].batch}"
    )
  return [(Fraction(change.samples), Fraction(change.batch)) for change in changes]


Build = Callable[[ScheduleInputs], Steps]
SCHEDULES: dict[str, Build] = {
  "constant": constant,
  "rampup": rampup,
  "list": listed,
  "linear": linear,
  "doubling": doubling,
}
_FROM_RUNS: dict[str, Build] = {"gns": decided, "file": recorded}
"""By the word in batch_schedule; batch_size is their first batch, not their last."""


def largest_decided(request: ScheduleInputs) -> int:
  """The batch up to which a schedule that is decided in the run may grow; 0 for any other."""
  if _chosen(request.config) != "gns":
    return 0
  most = request.config.gns_max_batch_size
  return _MOST_GROWTH * request.sizes.batch if most == -1 else most


def is_decided(config: BatchConfig) -> bool:
  """Whether the noise scale decides on the batch in the run itself."""
  return _chosen(config) == "gns"


def begins_with_batch_size(config: BatchConfig) -> bool:
  """Whether batch_size is the first batch of the schedule and not, as in all others, the last."""
  return _chosen(config) in _FROM_RUNS


def batch_schedule(request: ScheduleInputs) -> BatchSchedule:
  """The run's schedule, every phase of it checked, reached or not.

  Raises:
    UserError: a phase does not work on these devices, or keys contradict each other.
  """
  name = _chosen(request.config)
  build = _FROM_RUNS.get(name) or registered("batch_schedule_type", name, SCHEDULES)
  steps = build(request)
  unit = "samples" if name in ("rampup", *_FROM_RUNS) else request.config.batch_schedule_unit
  scale = request.config.max_target_length if unit == "tokens" else 1
  points = [_point(request, number, *step) for number, step in enumerate(steps, 1)]
  return BatchSchedule(
    unit="steps" if unit == "steps" else "samples",
    points=tuple(dataclasses.replace(point, at=point.at / scale) for point in points),
  )


def _chosen(config: BatchConfig) -> str:
  """The one schedule that the keys ask for."""
  asked = {
    f"batch_schedule_type={config.batch_schedule_type}": config.batch_schedule_type,
    "enable_rampup_batch_size=true": "rampup" if config.enable_rampup_batch_size else "constant",
    f"batch_schedule={_shown(config.batch_schedule)}": _of_key(config.batch_schedule),
  }
  wanted = {key: name for key, name in asked.items() if name != "constant"}
  if len(set(wanted.values())) > 1:
    raise UserError(
      f"{' and '.join(wanted)} are different schedules; keep one of them, for example "
      "enable_rampup_batch_size=false batch_schedule=[]"
    )
  return next(iter(wanted.values()), "constant")


def _of_key(value: tuple[tuple[int, ...], ...] | str) -> str:
  if isinstance(value, str):
    return value
  return "list" if value else "constant"


def _point(request: ScheduleInputs, number: int, at: Fraction, batch: Fraction) -> SchedulePoint:
  """One phase with its microbatch: the run's where it fits, else the largest that is smaller."""
  groups, micro = request.topology.num_batch_groups, request.sizes.micro_batch
  rows = batch / groups
  if rows.denominator != 1 or rows <= 0:
    nearest = " or ".join(f"[{text(at)}, {near}]" for near in nearest_multiples(groups, batch))
    raise UserError(
      f"batch_schedule: phase {number}, [{text(at)}, {text(batch)}], has {text(batch)} samples, "
      f"which must be a positive multiple of {groups_of(request.topology)}; nearest: {nearest}"
    )
  if batch % micro:
    micro = groups * _largest_divisor(int(rows), micro // groups)
  return SchedulePoint(at, int(batch), micro)


def _largest_divisor(number: int, at_most: int) -> int:
  if number % at_most == 0:
    return at_most
  return nearest_divisors(number, Fraction(at_most))[0]


def _start(request: ScheduleInputs) -> Fraction:
  """batch_size_start, which has no default: a microbatch depends on the devices and their memory.

  So would the ramp, and a run resumed on other devices would take other steps.
  """
  if request.config.batch_size_start != -1:
    return Fraction(request.config.batch_size_start)
  kind, target = request.config.batch_schedule_type, request.sizes.batch
  groups = request.topology.num_batch_groups
  halved = next((n for n in (8, 4, 2) if target % (n * groups) == 0), None)
  if kind == "doubling" and halved is None:
    offer = f"but batch_size={target} has no half on {groups_of(request.topology)}: use linear"
  elif target == groups:
    offer = f"but nothing is below batch_size={target} on {groups_of(request.topology)}; raise it"
  else:
    offer = f"for example batch_size_start={target // halved if halved else groups}"
  raise UserError(
    f"batch_schedule_type={kind} needs batch_size_start, the samples of its first updates; {offer}"
  )


def _length(request: ScheduleInputs) -> Fraction:
  if request.config.batch_schedule_length == -1:
    raise UserError(
      f"batch_schedule_type={request.config.batch_schedule_type} needs the length of its ramp in "
      f"{request.config.batch_schedule_unit}; for example batch_schedule_length=10000"
    )
  return Fraction(request.config.batch_schedule_length)


def _check_increments(
  keys: tuple[str, str], sizes: tuple[Fraction, Fraction, Fraction], unit: Fraction, target_key: str
) -> None:
  """Start and target must be whole increments apart, and all of them multiples of `unit`."""
  start, increment, target = sizes
  if start % unit or not unit <= start < target:
    near = [size for size in nearest_multiples(unit, min(start, target)) if size < target]
    near = near or [unit * (math.ceil(target / unit) - 1)]
    offers = " or ".join(f"{keys[0]}={text(size)}" for size in near if size > 0)
    raise UserError(
      f"{keys[0]}={text(start)} must be a positive multiple of {text(unit)} (one sample for every "
      f"group of devices) below {target_key}={text(target)}; "
      + (f"nearest: {offers}" if offers else f"there is none; raise {target_key}")
    )
  rise = target - start
  if increment <= 0 or rise % increment or increment % unit:
    divisors = nearest_divisors(int(rise / unit), increment / unit)
    offers = " or ".join(f"{keys[1]}={text(divisor * unit)}" for divisor in divisors)
    raise UserError(
      f"{keys[1]}={text(increment)} must lead from {keys[0]}={text(start)} to "
      f"{target_key}={text(target)} in whole increments, each a multiple of {text(unit)}; "
      f"nearest: {offers}"
    )


def _shown(pairs: Sequence[Sequence[int]] | str) -> str:
  """The list, its middle left out where it is long."""
  if isinstance(pairs, str):
    return pairs
  shown = [str(list(pair)) for pair in pairs]
  return f"[{', '.join(shown if len(shown) < 5 else [*shown[:2], '…', shown[-1]])}]"
