"""The sizes of one step of reinforcement learning: prompts, generations, completions, microbatches.

A step takes batch_size unique prompts and samples num_generations completions of each, a group. A
completion, with its prompt, is a sample for the rest of batch/:

    global_batch_to_train = batch_size · num_generations           completions per step
    micro_batch_to_train  = micro_batch_size                       completions per microbatch
    gradient_accumulation_steps = global_batch_to_train / micro_batch_to_train

Each key has one unit, whatever is sampled or trained: batch_size counts prompts, micro_batch_size
completions on all devices, per_device_batch_size those on one. The keys that give each unknown:

    completions per step        batch_size · num_generations, global_batch_to_train,
                                tokens_per_step / max_target_length
    completions per microbatch  micro_batch_size, per_device_batch_size · devices
    microbatches                gradient_accumulation_steps, micro_batch_size=none (1)

A microbatch holds whole groups, since the rewards of a group are compared with each other, and as many
completions for each data-parallel group of devices, those that sample and those that train: it is a
multiple of `RLTopology.unit` and divides the step.

batch_size, micro_batch_size (−1: none) and num_generations are MaxText's names (configs/post_train/
rl.yml), and mean what its documentation says.
"""

import dataclasses
import math
from fractions import Fraction

from maxbatch.config.schema import BatchConfig
from maxbatch.core.keys import GivenSize, counted, single_value, text
from maxbatch.core.solve import (
  MOST_SAMPLES,
  Sizes,
  describe_groups,
  divisors,
  nearest_divisors,
  nearest_multiples,
)
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

_WARM_START_BATCH = 64


@dataclasses.dataclass(frozen=True)
class RLTopology:
  """The devices that train, those that sample, and what both ask of a microbatch."""

  training: Topology
  num_generations: int
  rollout: Topology | None = None
  """Of the devices that only sample; None: those that train sample too."""

  @property
  def rollout_devices(self) -> int:
    """Devices that only sample."""
    return self.rollout.num_devices if self.rollout else 0

  @property
  def rollout_groups(self) -> int:
    """Groups of devices that sample completions of their own."""
    return (self.rollout or self.training).num_batch_groups

  @property
  def rollout_words(self) -> str:
    """Names these groups, where other devices sample than train."""
    assert self.rollout
    if self.rollout_groups == self.rollout_devices:
      return counted(self.rollout_devices, "rollout device")
    return (
      f"{counted(self.rollout_groups, 'group')} of rollout devices ({axes_words(self.rollout)})"
    )

  @property
  def unit(self) -> int:
    """Completions of the smallest microbatch: whole groups, and as many on each device."""
    return math.lcm(self.num_generations, self.training.num_batch_groups, self.rollout_groups)

  @property
  def unit_prompts(self) -> int:
    """The prompts of these completions."""
    return self.unit // self.num_generations

  def __str__(self) -> str:
    """Says what the unit is made of."""
    rollout = f" and the {self.rollout_words}" if self.rollout else ""
    return (
      f"{counted(self.unit, 'completion')} (whole groups of num_generations={self.num_generations}, and "
      f"as many for each of {describe_groups(self.training)}"
      f"{rollout})"
    )


def axes_words(mesh: Topology) -> str:
  """Returns the axes of a mesh that divide anything, as `data 2 × tensor 4`."""
  return " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "1 device"


@dataclasses.dataclass(frozen=True)
class GivenCompletions:
  """The three unknowns as the configuration gives them, in completions; None where it gives none."""

  batch: GivenSize
  micro_batch: GivenSize | None
  num_microbatches: GivenSize | None

  def batch_unit(self, topology: RLTopology) -> int:
    """Returns the completions of which a step must be a multiple for the other sizes to stay."""
    count = int(self.num_microbatches.size) if self.num_microbatches else 1
    micro = self.micro_batch
    return count * (int(micro.size) if micro and _is_whole(micro, topology) else topology.unit)


def solve_rl(given: GivenCompletions, topology: RLTopology) -> Sizes:
  """Solves for the microbatch and the number of microbatches, in completions.

  Raises:
    UserError: the sizes contradict each other, or a microbatch would not hold whole groups for all
      devices; the message names the nearest values that work.
  """
  batch, micro, number = given.batch, given.micro_batch, given.num_microbatches
  if batch.size > MOST_SAMPLES:
    raise UserError(
      f"{batch.assigned()} with num_generations={topology.num_generations} is {text(batch.size)} "
      f"completions, of which a step has at most {MOST_SAMPLES:,}; for example "
      f"{batch.assigned(topology.unit)}"
    )
  if batch.size % topology.unit:
    raise UserError(
      f"{batch.assigned()} with num_generations={topology.num_generations} is {text(batch.size)} "
      f"completions, which must be a positive multiple of {topology}; "
      f"nearest: {' or '.join(_batches(given, topology))}"
    )
  if micro is None:
    return _from_number(batch, number, topology)
  if number is not None:
    _check_product(batch, micro, number, topology)
  return _from_micro_batch(batch, micro, topology)


def given_completions(batch: BatchConfig, topology: RLTopology) -> GivenCompletions:
  """Reads the keys of all three unknowns; a microbatch that is to be chosen (auto, explore) is none.

  Raises:
    UserError: two keys give one size different values, none gives the batch, or a key cannot be used.
  """
  micro = batch.micro_batch_size
  _check_open(batch)
  whole = single_value(
    *_if_set("batch_size", batch.batch_size, Fraction(1, topology.num_generations)),
    *_if_set("global_batch_to_train", batch.global_batch_to_train),
    *_if_set("tokens_per_step", batch.tokens_per_step, batch.max_target_length),
  )
  if whole is None:
    raise UserError(
      f"batch_size=-1 with num_generations={topology.num_generations}: a step needs its number of "
      f"prompts; for example batch_size={topology.unit_prompts}"
    )
  devices = topology.training.num_devices
  return GivenCompletions(
    batch=whole,
    micro_batch=single_value(
      *_if_set("micro_batch_size", micro if isinstance(micro, Fraction) else -1),
      *_if_set("per_device_batch_size", batch.per_device_batch_size, Fraction(1, devices)),
    ),
    num_microbatches=single_value(
      *_if_set("gradient_accumulation_steps", batch.gradient_accumulation_steps),
      *([GivenSize("micro_batch_size", Fraction(1), word="none")] if micro == "none" else []),
    ),
  )


def _check_open(batch: BatchConfig) -> None:
  """Checks that a microbatch which is to be chosen does not follow from other keys."""
  micro = batch.micro_batch_size
  given = {
    "per_device_batch_size": batch.per_device_batch_size,
    "gradient_accumulation_steps": batch.gradient_accumulation_steps,
  }
  keys = [key for key, value in given.items() if value != -1]
  if keys and not isinstance(micro, Fraction) and micro != "none":
    word = micro if isinstance(micro, str) else "explore"
    raise UserError(
      f"{keys[0]}={text(given[keys[0]])} already gives the size that micro_batch_size={word} is to "
      f"choose; keep one of them, for example with {keys[0]}=-1"
    )


def _if_set(key: str, value: Fraction | int, scale: Fraction | int = 1) -> list[GivenSize]:
  return [] if value == -1 else [GivenSize(key, value / Fraction(scale), scale)]


def _completions(batch: GivenSize) -> str:
  """Describes a batch, as `128 completions of batch_size=16`."""
  return f"{text(batch.size)} completions of {batch.assigned()}"


def _is_whole(micro: GivenSize, topology: RLTopology) -> bool:
  """Returns whether a microbatch holds whole groups, and as many completions for each device."""
  return micro.size > 0 and micro.size % topology.unit == 0


def _batches(given: GivenCompletions, topology: RLTopology) -> list[str]:
  """Suggests the nearest steps, with the microbatch that they need where the given one works with
  none."""
  unit, micro = given.batch_unit(topology), given.micro_batch
  if micro is None:
    return [given.batch.assigned(size) for size in nearest_multiples(unit, given.batch.size)]
  if _is_whole(micro, topology):
    nearest = nearest_multiples(unit, given.batch.size)
    sizes = [Fraction(unit)] if given.num_microbatches else nearest
    return [given.batch.assigned(size) for size in sizes]
  offers = []
  for size in nearest_multiples(unit, given.batch.size):
    units = int(size / topology.unit)
    near = nearest_divisors(units, micro.size / topology.unit)[0]
    if given.num_microbatches:
      near = units // int(given.num_microbatches.size)
    offers.append(f"{given.batch.assigned(size)} {micro.assigned(Fraction(near * topology.unit))}")
  return offers


def _check_product(
  batch: GivenSize, micro: GivenSize, number: GivenSize, topology: RLTopology
) -> None:
  """Checks that all three, where all are given, agree."""
  product, unit = micro.size * number.size, topology.unit
  is_whole = _is_whole(micro, topology)
  if product == batch.size and is_whole:
    return
  offers = []
  if is_whole:
    offers.append(batch.assigned(product))
  if batch.size % (unit * number.size) == 0:
    offers.append(micro.assigned(batch.size / number.size))
  if is_whole and batch.size % micro.size == 0 and not number.word:
    offers.append(number.assigned(batch.size / micro.size))
  rule = "" if is_whole else f", and {micro.assigned()} must be a multiple of {topology}"
  raise UserError(
    f"{micro.assigned()} × {number.assigned()} must be the {_completions(batch)} with num_generations="
    f"{topology.num_generations}, and is {counted(product, 'completion')}{rule}; for example "
    f"{', or '.join(offers) or f'{micro.key}=-1 {number.key}=-1'}"
  )


def _from_micro_batch(batch: GivenSize, micro: GivenSize, topology: RLTopology) -> Sizes:
  """Divides: microbatches = completions of the step / completions of a microbatch."""
  unit, is_whole = topology.unit, _is_whole(micro, topology)
  if is_whole and batch.size % micro.size == 0:
    return Sizes(int(micro.size), int(batch.size / micro.size))
  near = nearest_divisors(int(batch.size / unit), micro.size / unit)
  offers = " or ".join(micro.assigned(Fraction(count * unit)) for count in near)
  steps = nearest_multiples(micro.size, batch.size) if is_whole else []
  others = "".join(f", or {batch.assigned(size)}" for size in steps)
  size = "" if micro.scale == 1 else f" ({text(micro.size)} completions)"
  raise UserError(
    f"{micro.assigned()}{size} must divide the {_completions(batch)}, and be a multiple of {topology}; "
    f"nearest: {offers}{others}"
  )


def _from_number(batch: GivenSize, number: GivenSize | None, topology: RLTopology) -> Sizes:
  """Divides: completions of a microbatch = completions of the step / microbatches, which are 1
  unless given."""
  count, units = int(number.size) if number else 1, int(batch.size / topology.unit)
  if number is None or units % count == 0:
    return Sizes(int(batch.size) // count, count)
  counts = " or ".join(number.assigned(near) for near in nearest_divisors(units, number.size))
  steps = nearest_multiples(count * topology.unit, batch.size)
  raise UserError(
    f"{number.assigned()}: the {_completions(batch)} in {count} microbatches are "
    f"{text(batch.size / count)} each, which must be a multiple of {topology}; nearest: {counts}"
    f"{''.join(f', or {batch.assigned(size)}' for size in steps)}"
  )


def warm_start_batch(training: Topology) -> int:
  """Returns the demonstrations of a step before reinforcement learning: 64, or the next number that
  divides."""
  groups = training.num_batch_groups
  return -(-_WARM_START_BATCH // groups) * groups


def micro_batch_sizes(completions: int, topology: RLTopology) -> list[int]:
  """Returns every microbatch that a step of so many completions can have, ascending."""
  return [count * topology.unit for count in divisors(completions // topology.unit)]


def halving_micro_batch_sizes(completions: int, topology: RLTopology) -> list[int]:
  """Returns those microbatches from which the noise of the gradient can be estimated, ascending.

  Each replica has whole groups, whose halves divide over its devices, and a step has several.
  """
  replicas = topology.training.shape["data"]
  return [
    micro
    for micro in micro_batch_sizes(completions, topology)
    if topology.num_generations % 2 == 0
    and micro // topology.num_generations % replicas == 0
    and micro // 2 % topology.training.num_batch_groups == 0
    and completions // micro * replicas > 1
  ]
