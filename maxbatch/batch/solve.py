"""Which size follows from which: any sufficient subset of a run's sizes determines the others.

With G groups of devices that see different samples, r samples per group in one pass, and k passes:

    micro batch = G · r      per-device size = G · r / devices      batch = G · r · k

What is not given is derived. What stays open then is 1 pass, and after that
DEFAULT_PER_DEVICE_BATCH_SIZE samples per device.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.batch.topology import Topology
from maxbatch.config.schema import BatchConfig
from maxbatch.config.value import plain
from maxbatch.errors import UserError

DEFAULT_PER_DEVICE_BATCH_SIZE = Fraction(4)


@dataclasses.dataclass(frozen=True)
class GivenSize:
  """A size as one key gives it; `scale` times the size is the key's value."""

  key: str
  size: Fraction
  scale: int = 1
  word: str = ""
  """The key's value where it is not a number."""

  def assigned(self, size: Fraction | int | None = None) -> str:
    """`key=value`, of this size or of another."""
    value = text(Fraction(self.size if size is None else size) * self.scale)
    return f"{self.key}={self.word or value}"

  def __str__(self) -> str:
    return self.assigned() + (f" ({counted(self.size, 'sample')})" if self.scale != 1 else "")


@dataclasses.dataclass(frozen=True)
class GivenSizes:
  """What the configuration says about the three sizes; None where it says nothing."""

  batch: GivenSize | None
  per_device: GivenSize | None
  gradient_accumulation_steps: GivenSize | None


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The solution: samples of one pass over all devices, and passes per step."""

  micro_batch: int
  gradient_accumulation_steps: int

  @property
  def batch(self) -> int:
    """Samples of one step."""
    return self.micro_batch * self.gradient_accumulation_steps


def given_sizes(config: BatchConfig) -> GivenSizes:
  """Reads the keys of both vocabularies.

  Raises:
    UserError: two keys give one size different values.
  """
  none = config.micro_batch_size == "none"
  # auto and explore give no size: batch/candidates.py lists those that are chosen from.
  micro_batch_size = config.micro_batch_size
  micro_batch_size = micro_batch_size if isinstance(micro_batch_size, Fraction) else -1
  pairs = config.batch_schedule
  last = pairs[-1][1:2] if isinstance(pairs, tuple) and pairs else ()
  return GivenSizes(
    batch=_agreed(
      *(GivenSize("the last batch of batch_schedule", Fraction(size)) for size in last),
      *_if_set("batch_size", config.batch_size),
      *_if_set("global_batch_to_train", config.global_batch_to_train),
      *_if_set("tokens_per_step", config.tokens_per_step, config.max_target_length),
    ),
    per_device=_agreed(
      *_if_set("per_device_batch_size", config.per_device_batch_size),
      *_if_set("micro_batch_size", micro_batch_size),
    ),
    gradient_accumulation_steps=_agreed(
      *_if_set("gradient_accumulation_steps", config.gradient_accumulation_steps),
      *([GivenSize("micro_batch_size", Fraction(1), word="none")] if none else []),
    ),
  )


def solve(given: GivenSizes, topology: Topology) -> Sizes:
  """The sizes on these devices.

  Raises:
    UserError: the given sizes contradict each other or leave a remainder.
  """
  batch, per_device, accumulation = given.batch, given.per_device, given.gradient_accumulation_steps
  if batch is None:
    default = GivenSize("per_device_batch_size", DEFAULT_PER_DEVICE_BATCH_SIZE)
    micro_batch = whole_micro_batch(per_device or default, topology)
    return Sizes(micro_batch, int(accumulation.size) if accumulation else 1)
  if per_device is None:
    return _from_batch(batch, accumulation, topology)
  if accumulation is None:
    return _from_batch_and_micro_batch(batch, per_device, topology)
  sizes = Sizes(
    whole_micro_batch(per_device, topology, batch, accumulation), int(accumulation.size)
  )
  if batch.size != sizes.batch:
    offers = _suggested_fixes(batch, per_device, accumulation, topology)
    raise UserError(
      f"{batch}, but {per_device} on {topology.num_devices} devices with {accumulation} is {sizes.batch} "
      f"samples per step; change one of them: {', or '.join(offers)}"
    )
  return sizes


def solve_num_devices(given: GivenSizes) -> int:
  """The devices on which the given sizes hold.

  Raises:
    UserError: too little is given, or the number is not whole.
  """
  if given.batch is None or given.per_device is None:
    raise UserError(
      "num_devices=-1 is derived from the batch and the per-device size, which must both be given; "
      "for example batch_size=512 micro_batch_size=64"
    )
  each = given.per_device.size * (
    given.gradient_accumulation_steps.size if given.gradient_accumulation_steps else 1
  )
  devices = given.batch.size / each if each else Fraction(0)
  if devices.denominator == 1 and devices > 0:
    return int(devices)
  accumulation = (
    f" × {given.gradient_accumulation_steps}" if given.gradient_accumulation_steps else ""
  )
  nearest = [given.batch.assigned(size * each) for size in _around(devices) if size * each > 0]
  raise UserError(
    f"{given.batch} / {given.per_device}{accumulation} is {text(devices)} devices, which must be whole; "
    f"nearest: {' or '.join(nearest) or 'micro_batch_size=1'}"
  )


def whole_micro_batch(
  given: GivenSize,
  topology: Topology,
  batch: GivenSize | None = None,
  accumulation: GivenSize | None = None,
) -> int:
  """num_devices × per-device size; every group of devices must get whole samples.

  Raises:
    UserError: it does not, with the nearest sizes that do, and that fit `batch` and `passes`.
  """
  devices, groups = topology.num_devices, topology.num_batch_groups
  samples = given.size * devices
  rows = samples / groups
  if rows.denominator == 1 and rows > 0:
    return int(samples)
  fitting = _fitting_rows(rows, batch, accumulation, groups)
  alone = fitting or [near for near in _around(rows) if near > 0]
  nearest = [given.assigned(Fraction(near * groups, devices)) for near in alone]
  if batch and not fitting:
    # No size fits this batch, so a batch is offered beside each.
    units = [near * groups * (accumulation.size if accumulation else 1) for near in alone]
    beside = [
      nearest_multiples(unit, batch.size)[-1] if not accumulation else unit for unit in units
    ]
    pairs = zip(nearest, beside, strict=True)
    nearest = [f"{offer} with {batch.assigned(size)}" for offer, size in pairs]
  raise UserError(
    f"{given} on {devices} devices is {text(samples)} samples, which must be a positive multiple "
    f"of {groups_of(topology)}; nearest: {' or '.join(nearest)}"
  )


def _fitting_rows(
  rows: Fraction, batch: GivenSize | None, accumulation: GivenSize | None, groups: int
) -> list[int]:
  """Samples per group in a pass, near `rows`, that make up the batch."""
  if batch is None:
    return []
  per_group = batch.size / groups / (accumulation.size if accumulation else 1)
  if per_group.denominator != 1:
    return []
  return [int(per_group)] if accumulation else nearest_divisors(int(per_group), rows)


def groups_of(topology: Topology) -> str:
  """The groups of devices in words."""
  return (
    f"the {counted(topology.num_batch_groups, 'group')} of devices that see different samples "
    f"(data {topology.shape['data']} × fsdp {topology.shape['fsdp']})"
  )


def text(value: Fraction) -> str:
  """A fraction as people write it and the configuration reads it: 4, 0.25, 1/3."""
  return str(plain(value))


def counted(number: Fraction | int, one: str, many: str = "") -> str:
  """`1 sample`, `2,000 samples`."""
  shown = f"{int(number):,}" if number == int(number) else text(Fraction(number))
  return f"{shown} {one if number == 1 else many or one + 's'}"


def nearest_divisors(number: int, near: Fraction) -> list[int]:
  """The divisors of `number` next to `near` on both sides, itself not included."""
  small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
  divisors = sorted({*small, *(number // n for n in small)})
  below = [n for n in divisors if n < near]
  above = [n for n in divisors if n > near]
  return below[-1:] + above[:1]


def nearest_multiples(unit: Fraction | int, near: Fraction) -> list[Fraction]:
  """The positive multiples of `unit` next to `near` on both sides."""
  return [Fraction(unit * count) for count in _around(near / unit) if count > 0]


def _around(value: Fraction) -> tuple[int, int]:
  """The whole numbers on both sides of one that is not whole."""
  return math.floor(value), math.floor(value) + 1


def _if_set(key: str, value: Fraction | int, scale: int = 1) -> list[GivenSize]:
  return [] if value == -1 else [GivenSize(key, Fraction(value) / scale, scale)]


def _agreed(*given: GivenSize) -> GivenSize | None:
  """The one size that all these keys mean."""
  for other in given[1:]:
    if other.size != given[0].size:
      free = next(one.key for one in (other, given[0]) if " " not in one.key)
      raise UserError(
        f"{given[0]} and {other} give the same size two values; keep one of them, for example "
        f"with {free}=-1"
      )
  return given[0] if given else None


def _from_batch_and_micro_batch(
  batch: GivenSize, per_device: GivenSize, topology: Topology
) -> Sizes:
  """Passes = batch / micro batch."""
  devices, groups = topology.num_devices, topology.num_batch_groups
  micro_batch = whole_micro_batch(per_device, topology, batch)
  accumulation, rows = batch.size / micro_batch, batch.size / groups
  if accumulation.denominator == 1:
    return Sizes(micro_batch, int(accumulation))
  fitting = (
    nearest_divisors(int(rows), Fraction(micro_batch, groups)) if rows.denominator == 1 else []
  )
  sizes = [Fraction(near * groups, devices) for near in fitting]
  raise UserError(
    f"{batch} over {devices} devices is {text(batch.size / devices)} per device, not a multiple of "
    f"{per_device}; "
    + _nearest_of((batch, nearest_multiples(micro_batch, batch.size)), (per_device, sizes))
  )


def _from_batch(batch: GivenSize, accumulation: GivenSize | None, topology: Topology) -> Sizes:
  """Micro batch = batch / passes, in 1 pass unless another number is given."""
  count, groups = int(accumulation.size) if accumulation else 1, topology.num_batch_groups
  rows = batch.size / (groups * count)
  if rows.denominator == 1 and rows > 0:
    return Sizes(int(rows) * groups, count)
  per_group = batch.size / groups
  divisors = []
  if accumulation and not accumulation.word and per_group.denominator == 1:
    divisors = nearest_divisors(int(per_group), accumulation.size)
  options = [(batch, nearest_multiples(groups * count, batch.size))]
  if accumulation and divisors:
    options.append((accumulation, [Fraction(near) for near in divisors]))
  raise UserError(
    f"{batch} in {counted(count, 'pass', 'passes')} ({accumulation or 'one unless given'}) is "
    f"{text(batch.size / count)} samples a pass, which must be a multiple of "
    f"{groups_of(topology)}; " + _nearest_of(*options)
  )


def _nearest_of(*options: tuple[GivenSize, Sequence[Fraction]]) -> str:
  """The nearest value of each key, and those on the other side."""
  nearest, others = [], []
  for given, sizes in options:
    ordered = sorted(sizes, key=lambda size: abs(size - given.size))
    nearest += [given.assigned(size) for size in ordered[:1]]
    others += [given.assigned(size) for size in ordered[1:]]
  other_side = f" (on the other side: {', or '.join(others)})" if others else ""
  return f"nearest: {', or '.join(nearest)}{other_side}"


def _suggested_fixes(
  batch: GivenSize, per_device: GivenSize, accumulation: GivenSize, topology: Topology
) -> list[str]:
  """Each of three sizes as the other two make it, where that is whole."""
  each = per_device.size * topology.num_devices
  offers = [batch.assigned(each * accumulation.size)]
  if (batch.size / each).denominator == 1 and not accumulation.word:
    offers.append(accumulation.assigned(batch.size / each))
  if (batch.size / (accumulation.size * topology.num_batch_groups)).denominator == 1:
    offers.append(per_device.assigned(batch.size / (accumulation.size * topology.num_devices)))
  return offers
