"""The microbatch sizes a run may choose from: those for which its whole plan works.

With the batch given auto chooses from the divisors of its samples per group of devices. Without any
size given, it divides the batch that the run would have without it: to ask for a faster microbatch does
not change the training. explore tries powers of two besides, each with the batch nearest to the one that
is given: which size is fast does not depend on that. Without a batch, or with only the number of
microbatches given, the sizes are powers of two of samples per group, and the batch follows.
"""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

from maxbatch.batch.from_config import given_sizes, is_rl, plan_batches
from maxbatch.config.keys.batch import Explore
from maxbatch.config.schema import BatchConfig, Config, ModelConfig, OptimizerConfig, RunConfig
from maxbatch.core.keys import GivenSizes, counted, text
from maxbatch.core.solve import (
  DEFAULT_PER_DEVICE_BATCH_SIZE,
  microbatch_rows,
  per_device_size,
  solve,
)
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import pipeline_of

_BEYOND_SHARE = 4
LEAST_TOKENS = 2048
"""Without a range, explore tries sizes up to so many times what the batch is on each device, or so many
tokens of a device."""
MOST_TOKENS = 1 << 17
"""Tokens of one microbatch on one device beyond which no size is looked for when the batch is open."""


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A size to choose, with the plan it makes."""

  per_device: Fraction
  """Samples of one microbatch on one device."""
  num_microbatches: int
  """Microbatches per step."""
  micro_batch: int
  """Samples of one microbatch on all devices."""
  batch: int
  """Samples of one step."""
  max_target_length: int
  batch_is_near: bool = False
  """Whether the batch is not the one that was given, which this size does not divide."""
  remat_policy: str | None = None
  """Where the policy is explored too: the one that this candidate takes."""
  compiler_flags: str | None = None
  """Likewise, of the sets of flags."""
  context: int | None = None
  """Likewise, of how many devices share a row."""

  @property
  def variant(self) -> str:
    """The variant explored beside the size, in words; empty if there is none."""
    sharing = f"context={self.context}" if self.context else ""
    flags = f"flags={self.compiler_flags}" if self.compiler_flags else ""
    return " ".join(filter(None, (sharing, self.remat_policy, flags)))

  @property
  def size(self) -> Fraction:
    """The size as micro_batch_size counts it."""
    return self.per_device

  key: ClassVar[str] = "micro_batch_size"
  unit: ClassVar[str] = "samples per device"
  unit_of_microbatch: ClassVar[str] = "samples per device and microbatch"

  @property
  def words(self) -> str:
    """The size with its unit."""
    return f"{counted(self.per_device, 'sample')} per device"

  @property
  def batch_size(self) -> int:
    """The step as the key batch_size counts it."""
    return self.batch

  @property
  def device_tokens(self) -> Fraction:
    """Tokens of one microbatch on one device."""
    return self.per_device * self.max_target_length

  def applied_to(self, config: Config) -> Config:
    """Returns the configuration with this choice made."""
    batch = with_size(config.batch, self.size)
    if self.batch_is_near:
      batch = with_batch(batch, self.batch_size)
    config = dataclasses.replace(config, batch=batch)
    model, mesh, keys = config.model, config.mesh, config.compile
    if self.context:
      mesh = dataclasses.replace(mesh, ici_context_parallelism=self.context)
    if self.remat_policy:
      model = with_policy(model, self.remat_policy)
    if self.compiler_flags:
      keys = dataclasses.replace(keys, compiler_flags=self.compiler_flags)
    return dataclasses.replace(config, model=model, mesh=mesh, compile=keys)

  def suggested_batches(self) -> tuple[int, ...]:
    """Returns global batches that this size divides: the plan's own, and those next to it."""
    near = (self.batch - self.micro_batch, self.batch, self.batch + self.micro_batch)
    return tuple(batch for batch in near if batch > 0)

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values."""
    return {
      self.key: text(self.size),
      "gradient_accumulation_steps": self.num_microbatches,
      "global_batch_to_train": self.batch,
      "suggested_global_batches": list(self.suggested_batches()),
    }


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def is_open(batch: BatchConfig) -> bool:
  """Returns whether the microbatch is to be chosen: micro_batch_size is auto or explore."""
  return batch.micro_batch_size == "auto" or isinstance(batch.micro_batch_size, Explore)


def batch_follows(batch: BatchConfig) -> bool:
  """Returns whether the batch is open as well and follows from the microbatch that is chosen."""
  return given_sizes(batch).batch is None


def with_default_batch(config: Config, topology: Topology) -> Config:
  """Returns the configuration with the batch that auto divides, where no key gives one."""
  given = given_sizes(config.batch)
  if config.batch.micro_batch_size != "auto" or given != GivenSizes(None, None, None):
    return config
  batch = dataclasses.replace(config.batch, batch_size=solve(given, topology).batch)
  return dataclasses.replace(config, batch=batch)


def default_batch_note(batch: int, topology: Topology) -> str:
  """Returns where a batch comes from that no key gave."""
  each = counted(DEFAULT_PER_DEVICE_BATCH_SIZE, "sample")
  return (
    f"batch_size is the default: {batch:,}, {each} for each of {topology.num_devices:,} devices"
  )


def with_size(batch: BatchConfig, per_device: Fraction) -> BatchConfig:
  """Returns the configuration with the choice made."""
  return dataclasses.replace(batch, micro_batch_size=per_device)


def with_batch(batch: BatchConfig, batch_size: int) -> BatchConfig:
  """Returns the configuration with this batch, whichever key gave it."""
  return dataclasses.replace(
    batch, batch_size=batch_size, global_batch_to_train=-1, tokens_per_step=-1
  )


def candidates(
  batch: BatchConfig, run: RunConfig, topology: Topology, optimizer: OptimizerConfig | None = None
) -> tuple[Candidate, ...]:
  """Returns all sizes that the plan allows, ascending.

  Args:
    batch: the sizes; micro_batch_size is auto or explore.
    run: the run's budget, which ends with a whole microbatch.
    optimizer: as for `plan_batches`.

  Raises:
    UserError: the size is given by other keys, no size makes a plan, or none lies in the range.
  """
  given = given_sizes(batch)
  _check_open(batch, given)
  if not given.batch:
    most = Fraction(MOST_TOKENS, batch.max_target_length)
    sizes = powers_of_two(per_device_size(1, topology), _top(batch, most))
  else:
    least = Fraction(LEAST_TOKENS, batch.max_target_length)
    smallest = per_device_size(1, topology)
    sizes = with_powers_of_two(batch, _divisors(given, topology), smallest, least)
  allowed = _with_a_plan(batch, run, topology, sizes, optimizer)
  return in_range(batch.micro_batch_size, allowed)


def sizes_of(config: Config, topology: Topology) -> tuple[Candidate, ...]:
  """Returns the sizes that a run can have: all candidates, or those that its pipeline can divide.

  Raises:
    UserError: as `candidates`; or the pipeline can divide none.
  """
  sizes = candidates(config.batch, config.run, topology, config.optimizer)
  if config.pipeline.pipeline_schedule == "none":
    return sizes
  result, problem = [], None
  for one in sizes:
    sized = one.applied_to(config)
    try:
      pipeline_of(sized, topology, plan_batches(sized.batch, sized.run, topology, sized.optimizer))
    except UserError as error:
      problem = problem or error
    else:
      result.append(one)
  if problem and not result:
    raise UserError(f"{asked(config.batch)}: no size works; the smallest: {problem}")
  return tuple(result)


def with_policy(model: ModelConfig, policy: str) -> ModelConfig:
  """Returns the model with a remat_policy."""
  return dataclasses.replace(model, remat_policy=policy)  # pyright: ignore[reportArgumentType]


def asked(batch: BatchConfig) -> str:
  """Returns micro_batch_size and its value, as it is written."""
  return written(Candidate.key, batch.micro_batch_size)


def written(key: str, value: Fraction | str | Explore) -> str:
  """Returns a key and its value, as it is written."""
  if value == Explore():
    return f"{key}=explore"
  if isinstance(value, Explore):
    return f"{key}={{explore: {{min: {value.min}, max: {value.max}}}}}"
  return f"{key}={value}"


def offered(batch: BatchConfig, sizes: Sequence[Candidate]) -> str:
  """Returns what is chosen from: `micro_batch_size=auto chooses from 1, 2, 4 samples …`."""
  line = listed(asked(batch), sizes)
  return f"{line}, and batch_size follows" if batch_follows(batch) else line


def listed(asked: str, sizes: Sequence[Candidate]) -> str:
  """Returns `asked` with what it chooses from."""
  return f"{asked} chooses from {_listed(sizes)} {sizes[0].unit_of_microbatch}"


_ASKS = ("micro_batch_size", "validate_only", "compile_only")
"""Keys that the offered command sets, or leaves out, itself."""


def offer_of_auto(config: Config, arguments: Sequence[str]) -> str:
  """Returns a line that offers to choose the microbatch, with the whole command; "" where a key gives it, or
  none says how much memory there is (device_memory_gb) or on which devices (compile_topology).

  Args:
    config: as its keys say.
    arguments: config=… and the keys, as they were given.
  """
  keys, given = config.compile, given_sizes(config.batch)
  named = keys.device_memory_gb or keys.compile_topology
  if not named or is_open(config.batch) or given.per_device or given.num_microbatches:
    return ""
  kept = [one for one in arguments if one.partition("=")[0] not in _ASKS]
  instead = ["compile_only=true"] if keys.compile_topology or keys.compile_only else []
  command = "train_rl" if is_rl(config.rl) else "train"
  return (
    "no key gives the microbatch; the largest that fits and is fast takes: "
    f"maxbatch {command} {shlex.join([*kept, *instead, 'micro_batch_size=auto'])}"
  )


def _listed(sizes: Sequence[Candidate]) -> str:
  """Returns the sizes, the middle left out where they are many."""
  shown = [text(one.size) for one in sizes]
  return ", ".join(shown if len(shown) < 12 else [*shown[:5], "…", *shown[-5:]])


def _check_open(batch: BatchConfig, given: GivenSizes) -> None:
  """Checks that the size does not follow from other keys."""
  if given.per_device:
    raise UserError(
      f"{given.per_device} already gives the size that {asked(batch)} is to choose; keep one of "
      f"them, for example with {given.per_device.key}=-1"
    )
  if given.batch and given.num_microbatches:
    raise UserError(
      f"{given.batch} with {given.num_microbatches} already gives the size that {asked(batch)} is to choose; "
      f"keep two of the three, for example with {given.num_microbatches.key}=-1"
    )


def _divisors(given: GivenSizes, topology: Topology) -> list[Fraction]:
  """Returns per-device sizes that divide the batch.

  Raises:
    UserError: the batch does not divide into the groups of devices.
  """
  return [
    per_device_size(each, topology) for each in microbatch_rows(solve(given, topology), topology)
  ]


def with_powers_of_two(
  batch: BatchConfig, divisors: Sequence[Fraction], first: Fraction, least: Fraction
) -> list[Fraction]:
  """Returns the sizes that divide a batch; where they are explored, with powers of two of the smallest.

  Args:
    batch: its keys.
    divisors: ascending.
    first: the smallest size that the devices divide.
    least: up to which size powers of two are tried whatever the batch.
  """
  if not isinstance(batch.micro_batch_size, Explore):
    return list(divisors)
  most = max(_BEYOND_SHARE * divisors[-1], least)
  return sorted({*divisors, *powers_of_two(first, _top(batch, most))})


def _top(batch: BatchConfig, most: Fraction) -> Fraction:
  """Returns explore's max, or `most` where there is none."""
  value = batch.micro_batch_size
  return Fraction(value.max) if isinstance(value, Explore) and value.max != -1 else most


def powers_of_two(first: Fraction, most: Fraction) -> list[Fraction]:
  """Returns sizes of 1, 2, 4, … times the first, at most `most`, at least two."""
  sizes = [first, first * 2]
  while sizes[-1] * 2 <= most:
    sizes.append(sizes[-1] * 2)
  return sizes


def _with_a_plan(
  batch: BatchConfig,
  run: RunConfig,
  topology: Topology,
  sizes: Sequence[Fraction],
  optimizer: OptimizerConfig | None,
) -> list[Candidate]:
  """Returns those of the sizes with which every phase, load and budget of the plan works.

  Raises:
    UserError: none of them; says what is wrong with the smallest.
  """
  result, problem = [], None
  given = given_sizes(batch)
  wanted = solve(given, topology).batch if given.batch else None
  for size in sizes:
    micro_batch = int(size * topology.num_devices)
    nearest = max(1, round(Fraction(wanted or 0, micro_batch))) * micro_batch
    is_near = wanted is not None and nearest != wanted and not given.may_pad
    sized = with_size(batch, size)
    try:
      tried = with_batch(sized, nearest) if is_near else sized
      plan = plan_batches(tried, run, topology, optimizer)
    except UserError as error:
      problem = problem or error
      continue
    result.append(
      Candidate(
        per_device=size,
        num_microbatches=plan.num_microbatches,
        micro_batch=plan.micro_batch_to_train,
        batch=plan.global_batch_to_train,
        max_target_length=plan.max_target_length,
        batch_is_near=is_near,
      )
    )
  if result or problem is None:
    return result
  raise UserError(
    f"{asked(batch)}: no size gives a valid plan; the smallest, micro_batch_size={text(sizes[0])}: "
    f"{problem}"
  )


def in_range(
  value: Fraction | str | Explore, allowed: Sequence[AnyCandidate]
) -> tuple[AnyCandidate, ...]:
  """Returns those of the sizes that lie in the range of explore, if `value` is one.

  Raises:
    UserError: there are none.
  """
  if not isinstance(value, Explore):
    return tuple(allowed)
  # Sizes below 1 exist where devices share a sample; no whole minimum could name them.
  chosen = tuple(
    one
    for one in allowed
    if (value.min == 1 or one.size >= value.min) and (value.max == -1 or one.size <= value.max)
  )
  if chosen:
    return chosen
  # explore's bounds are whole: the smallest and the largest size, rounded outwards.
  low, high = math.floor(allowed[0].size), math.ceil(allowed[-1].size)
  raise UserError(
    f"{written(allowed[0].key, value)}: none of the {counted(len(allowed), 'size')} that the plan allows lies in this "
    f"range; allowed: {_listed(allowed)} {allowed[0].unit}; for example "
    f"{allowed[0].key}={{explore: {{min: {max(1, low)}, max: {high}}}}}"
  )
