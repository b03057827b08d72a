"""The arithmetic of one step: any sufficient subset of its batch sizes determines the others.

A mesh of D devices forms G = data × fsdp data-parallel groups. Each group reads its own samples;
the devices within a group (the context, tensor and stage axes) share them. One microbatch has r samples for
each group, and one optimizer step accumulates k microbatches:

    micro_batch_to_train  = G · r = D · per_device_batch_size        samples per microbatch
    global_batch_to_train = G · r · k                                samples per step

r and k are whole numbers, at least 1. per_device_batch_size = G · r / D is a fraction where the
devices of a group share a sample. So every microbatch is a multiple of G, and every batch a
multiple of its microbatch. The three unknowns, and the keys that give each of them:

    global batch        batch_size, global_batch_to_train, tokens_per_step / max_target_length
    per-device batch    per_device_batch_size, micro_batch_size
    k                   gradient_accumulation_steps, micro_batch_size=none (k = 1)

Two of the three give the third; with fewer, k is 1, then b DEFAULT_PER_DEVICE_BATCH_SIZE.

With pad_batch the batch need not be a multiple of G: where it is none, r, or k where r is given, is rounded
up, and p rows of padding fill the last microbatch up, so that global_batch_to_train = G · r · k − p.

Example: batch_size=512 micro_batch_size=16 on 8 devices with ici_tensor_parallelism=2. D = 8 and
G = 4, so micro_batch_to_train = 8 · 16 = 128, r = 128 / 4 = 32 samples per group, and
gradient_accumulation_steps = 512 / 128 = 4.

per_device_batch_size, gradient_accumulation_steps, micro_batch_to_train and global_batch_to_train
are MaxText's names; batch_size and micro_batch_size (a number, none, auto, explore) are those of
the Cerebras Model Zoo. Everything is exact: sizes are fractions until they count samples.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.core.keys import GivenSize, GivenSizes, counted, text
from maxbatch.core.topology import BATCH_AXES, Topology
from maxbatch.errors import UserError

DEFAULT_PER_DEVICE_BATCH_SIZE = Fraction(4)

MOST_SAMPLES = 2**40
"""In a step: the divisors of larger numbers, which messages offer, take seconds to find."""


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The solution: samples of one microbatch on all devices, and microbatches per step."""

  micro_batch: int
  num_microbatches: int
  padding: int = 0
  """Rows of the last microbatch that hold no sample."""

  @property
  def batch(self) -> int:
    """Samples of one step."""
    return self.micro_batch * self.num_microbatches - self.padding


def solve(given: GivenSizes, topology: Topology) -> Sizes:
  """Returns the microbatch and the gradient accumulation steps on these devices.

  Raises:
    UserError: the given sizes contradict each other, a derived size is not whole, or a step has too
      many samples; the message names the nearest values that work.
  """
  if given.batch and given.batch.size > MOST_SAMPLES:
    smaller = given.batch.assigned(DEFAULT_PER_DEVICE_BATCH_SIZE * topology.num_devices)
    raise UserError(
      f"{given.batch}: a step has at most {MOST_SAMPLES:,} samples; for example {smaller}"
    )
  sizes = _solved(given, topology)
  if sizes.batch > MOST_SAMPLES:
    smaller = [
      *([given.per_device.assigned(DEFAULT_PER_DEVICE_BATCH_SIZE)] if given.per_device else []),
      *(["gradient_accumulation_steps=1"] if given.num_microbatches else []),
    ]
    raise UserError(
      f"{topology.num_devices} devices × {text(Fraction(sizes.micro_batch, topology.num_devices))} "
      f"samples × gradient_accumulation_steps={sizes.num_microbatches} are {sizes.batch} samples "
      f"per step, of which there can be {MOST_SAMPLES:,}; for example {' '.join(smaller)}"
    )
  return sizes


def _solved(given: GivenSizes, topology: Topology) -> Sizes:
  """Returns the sizes, however large."""
  batch, per_device, accumulation = given.batch, given.per_device, given.num_microbatches
  if given.may_pad and batch and (padded := _padded(batch, per_device, accumulation, topology)):
    return padded
  if batch is None:
    default = GivenSize("per_device_batch_size", DEFAULT_PER_DEVICE_BATCH_SIZE)
    micro_batch = whole_micro_batch(per_device or default, topology)
    return Sizes(micro_batch, int(accumulation.size) if accumulation else 1)
  if per_device is None:
    return _from_batch(batch, accumulation, topology)
  if accumulation is None:
    return _from_batch_and_micro_batch(batch, per_device, topology)
  micro_batch = whole_micro_batch(per_device, topology, batch, accumulation)
  sizes = Sizes(micro_batch, int(accumulation.size))
  if batch.size != sizes.batch:
    offers = _suggested_fixes(batch, per_device, accumulation, topology)
    raise UserError(
      f"{batch}, but {per_device} on {topology.num_devices} devices with {accumulation} is "
      f"{sizes.batch} samples per step; change one of them: {', or '.join(offers)}"
    )
  return sizes


def _padded(
  batch: GivenSize, per_device: GivenSize | None, accumulation: GivenSize | None, topology: Topology
) -> Sizes | None:
  """Returns the sizes of a batch that does not divide over the groups; None where it does, or where a device
  would have nothing but padding in a microbatch that could be smaller."""
  count, groups = int(accumulation.size) if accumulation else None, topology.num_batch_groups
  if batch.size.denominator != 1 or batch.size % groups == 0:
    return None
  if per_device is None:
    micro_batch = groups * math.ceil(batch.size / (groups * (count or 1)))
  else:
    micro_batch = whole_micro_batch(per_device, topology)
  needed, least = math.ceil(batch.size / micro_batch), groups * math.ceil(batch.size / groups)
  if needed != (count or needed) or micro_batch > least:
    return None
  return Sizes(micro_batch, needed, micro_batch * needed - int(batch.size))


def solve_num_devices(given: GivenSizes) -> int:
  """Returns the number of devices that the given sizes need: batch / (per-device batch × k).

  Raises:
    UserError: the batch or the per-device batch is not given, or the quotient is not whole.
  """
  if given.batch is None or given.per_device is None:
    raise UserError(
      "num_devices=-1 is derived from the batch and the per-device size, which must both be given; "
      "for example batch_size=512 micro_batch_size=64"
    )
  each = given.per_device.size * (given.num_microbatches.size if given.num_microbatches else 1)
  devices = given.batch.size / each if each else Fraction(0)
  if devices.denominator == 1 and devices > 0:
    return int(devices)
  accumulation = f" × {given.num_microbatches}" if given.num_microbatches else ""
  sizes = [size * each for size in _integers_around(devices) if size * each > 0]
  nearest = [given.batch.assigned(size) for size in sizes]
  raise UserError(
    f"{given.batch} / {given.per_device}{accumulation} is {text(devices)} devices, which must be "
    f"whole; nearest: {' or '.join(nearest) or 'micro_batch_size=1'}"
  )


def whole_micro_batch(
  given: GivenSize,
  topology: Topology,
  batch: GivenSize | None = None,
  accumulation: GivenSize | None = None,
) -> int:
  """Returns num_devices × per-device batch; every data-parallel group must get a whole number of samples.

  Args:
    batch: the global batch, if given: only sizes that divide it are suggested.
    accumulation: gradient accumulation steps, likewise.

  Raises:
    UserError: a group gets a fraction of a sample; the message suggests the nearest sizes.
  """
  devices, groups = topology.num_devices, topology.num_batch_groups
  samples = given.size * devices
  rows = samples / groups
  if rows.denominator == 1 and rows > 0:
    return int(samples)
  fitting = _fitting_rows(rows, batch, accumulation, groups)
  alone = fitting or [near for near in _integers_around(rows) if near > 0]
  nearest = [given.assigned(Fraction(near * groups, devices)) for near in alone]
  if batch and not fitting:
    # No size divides this batch, so each suggestion comes with a batch that it divides.
    units = [near * groups * (accumulation.size if accumulation else 1) for near in alone]
    beside = [
      nearest_multiples(unit, batch.size)[-1] if not accumulation else unit for unit in units
    ]
    pairs = zip(nearest, beside, strict=True)
    nearest = [f"{offer} with {batch.assigned(size)}" for offer, size in pairs]
  raise UserError(
    f"{given} on {devices} devices is {text(samples)} samples, which must be a positive multiple "
    f"of {describe_groups(topology, samples)}; nearest: {' or '.join(nearest)}"
  )


def _fitting_rows(
  rows: Fraction, batch: GivenSize | None, accumulation: GivenSize | None, groups: int
) -> list[int]:
  """Returns samples per group and microbatch, near `rows`, that divide the batch."""
  if batch is None:
    return []
  per_group = batch.size / groups / (accumulation.size if accumulation else 1)
  if per_group.denominator != 1:
    return []
  return [int(per_group)] if accumulation else nearest_divisors(int(per_group), rows)


def describe_groups(topology: Topology, samples: Fraction = Fraction(0)) -> str:
  """Names the data-parallel groups of the mesh, for a message, and, where so many samples are too few for
  them, how many devices would have to share the tokens of each row."""
  groups = topology.num_batch_groups
  axes = " × ".join(
    f"{axis} {topology.shape[axis]}" for axis in BATCH_AXES if axis in topology.shape
  )
  if samples.denominator == 1 and 0 < samples < groups and groups % samples == 0:
    ways = topology.ici.get("context", 1) * groups // int(samples)
    axes += f"; ici_context_parallelism={ways}, whose devices share rows, leaves {samples}"
  return f"the {counted(groups, 'data-parallel group')} ({axes})"


def nearest_divisors(number: int, near: Fraction) -> list[int]:
  """Returns the largest divisor of `number` below `near` and the smallest above it, where there is one."""
  below = [n for n in divisors(number) if n < near]
  above = [n for n in divisors(number) if n > near]
  return below[-1:] + above[:1]


@functools.lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
  """Returns all divisors, ascending."""
  small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
  return tuple(sorted({*small, *(number // n for n in small)}))


def nearest_multiples(unit: Fraction | int, near: Fraction) -> list[Fraction]:
  """Returns the positive multiples of `unit` on both sides of `near`, which is not one."""
  counts = [count for count in _integers_around(near / unit) if count > 0] or [1]
  return [Fraction(unit * count) for count in counts]


def _integers_around(value: Fraction) -> tuple[int, int]:
  return math.floor(value), math.floor(value) + 1


def _from_batch_and_micro_batch(
  batch: GivenSize, per_device: GivenSize, topology: Topology
) -> Sizes:
  """Derives gradient accumulation steps = batch / microbatch."""
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
  """Derives microbatch = batch / gradient accumulation steps, which are 1 unless given."""
  count, groups = int(accumulation.size) if accumulation else 1, topology.num_batch_groups
  rows = batch.size / (groups * count)
  if rows.denominator == 1 and rows > 0:
    return Sizes(int(rows) * groups, count)
  per_group = batch.size / groups
  near = []
  if accumulation and not accumulation.word and per_group.denominator == 1:
    near = nearest_divisors(int(per_group), accumulation.size)
  options = [(batch, nearest_multiples(groups * count, batch.size))]
  if accumulation and near:
    options.append((accumulation, [Fraction(count) for count in near]))
  raise UserError(
    f"{batch} in {counted(count, 'microbatch', 'microbatches')} ({accumulation or 'one unless given'}) "
    f"is {text(batch.size / count)} samples per microbatch, which must be a multiple of "
    f"{describe_groups(topology, batch.size / count)}; " + _nearest_of(*options)
  )


def _nearest_of(*options: tuple[GivenSize, Sequence[Fraction]]) -> str:
  """Returns the nearest value of each key, then those on the other side of what is given."""
  nearest, others = [], []
  for given, sizes in options:
    ordered = sorted(sizes, key=lambda size: abs(size - given.size))
    nearest += [given.assigned(size) for size in ordered[:1]]
    others += [given.assigned(size) for size in ordered[1:]]
  other_side = f" (also: {', or '.join(others)})" if others else ""
  return f"nearest: {', or '.join(nearest)}{other_side}"


def _suggested_fixes(
  batch: GivenSize, per_device: GivenSize, accumulation: GivenSize, topology: Topology
) -> list[str]:
  """Returns each of the three sizes as the other two determine it, where that is whole."""
  each = per_device.size * topology.num_devices
  offers = [batch.assigned(each * accumulation.size)]
  if (batch.size / each).denominator == 1 and not accumulation.word:
    offers.append(accumulation.assigned(batch.size / each))
  if (batch.size / (accumulation.size * topology.num_batch_groups)).denominator == 1:
    offers.append(per_device.assigned(batch.size / (accumulation.size * topology.num_devices)))
  return offers


def samples_per_group(
  micro_batch: int, topology: Topology, num_pipeline_microbatches: int = 1
) -> int:
  """Returns a data-parallel group's samples of a microbatch, or of a pipeline microbatch of it."""
  return micro_batch // topology.num_batch_groups // num_pipeline_microbatches


def per_device_size(samples_per_group: int, topology: Topology) -> Fraction:
  """Returns the samples per device where each data-parallel group gets `samples_per_group`."""
  return Fraction(samples_per_group * topology.num_batch_groups, topology.num_devices)


def fitting_micro_batch(micro_batch: int, batch: int, topology: Topology) -> int:
  """Returns `micro_batch` if it divides `batch`, else the largest smaller one that does.

  Args:
    micro_batch: samples per microbatch, a multiple of the data-parallel groups.
    batch: samples per step, likewise; else it is padded to a microbatch that is not larger than need be.
  """
  if batch % micro_batch == 0:
    return micro_batch
  groups = topology.num_batch_groups
  if batch % groups:
    return min(micro_batch, groups * math.ceil(Fraction(batch, groups)))
  return groups * nearest_divisors(batch // groups, Fraction(micro_batch, groups))[0]


def splits_of(batch: int, topology: Topology) -> list[tuple[Fraction, int]]:
  """Returns every way to divide a batch into equal microbatches, ascending in the samples of one.

  Returns:
    Samples per device and number of microbatches; none where data-parallel groups share samples.
  """
  rows, rest = divmod(batch, topology.num_batch_groups)
  if rest or not rows:
    return []
  return [(per_device_size(size, topology), rows // size) for size in divisors(rows)]


def microbatch_rows(sizes: Sizes, topology: Topology) -> list[int]:
  """Returns the rows of a group in which the microbatch may be divided further, ascending.

  Those that divide it; what is padded also into 2, 4, … microbatches, each rounded up.
  """
  rows = samples_per_group(sizes.micro_batch, topology)
  if sizes.padding:
    return sorted({math.ceil(rows / 2**power) for power in range(rows.bit_length())})
  return list(divisors(rows))


def nearest_batches(batch: int, topology: Topology) -> list[int]:
  """Returns the nearest batches that divide over the data-parallel groups; itself if it does."""
  unit = topology.num_batch_groups
  if batch % unit == 0:
    return [batch]
  return [int(size) for size in nearest_multiples(unit, Fraction(batch))]
