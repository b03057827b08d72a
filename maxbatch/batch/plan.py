"""BatchPlan: every batch size of a run, derived exactly and explained line by line.

Sizes are rational numbers until they count samples, so that 0.29 samples on each of 100 devices
are 29 samples, and nothing is ever truncated.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Literal

from maxbatch.config.schema import BatchConfig, RunConfig
from maxbatch.config.value import plain
from maxbatch.errors import UserError
from maxbatch.topology import Topology

Unit = Literal["steps", "samples", "tokens"]

_SMALLEST_TRIP_CAPACITY = 16
"""Microbatches the fused step has room for at least; unused room is a few KiB of token ids."""


@dataclasses.dataclass(frozen=True)
class Position:
  """A place in the run: updates made and samples consumed."""

  step: int
  samples: int


@dataclasses.dataclass(frozen=True)
class BatchPlan:
  """The sizes of a run. Samples are rows of `max_target_length` tokens."""

  topology: Topology
  max_target_length: int
  per_device_batch_size: Fraction
  gradient_accumulation_steps: int
  expansion_factor_real_data: Fraction
  micro_batch_to_train: int
  global_batch_to_train: int
  global_batch_to_load: int
  eval_batch: int
  steps: int

  @property
  def tokens_per_step(self) -> int:
    """Tokens in one optimizer update, padding included."""
    return self.tokens(self.global_batch_to_train)

  @property
  def total_samples(self) -> int:
    """Samples consumed when the run ends."""
    return self.samples_at(self.steps)

  @property
  def total_tokens(self) -> int:
    """Tokens consumed when the run ends."""
    return self.tokens(self.total_samples)

  @property
  def trip_capacity(self) -> int:
    """Microbatches the compiled fused step has room for.

    A power of two, so that changing gradient_accumulation_steps within it compiles nothing new.
    """
    needed = max(self.gradient_accumulation_steps, _SMALLEST_TRIP_CAPACITY)
    return 1 << (needed - 1).bit_length()

  def tokens(self, samples: int) -> int:
    """Tokens in `samples` samples."""
    return samples * self.max_target_length

  def samples_at(self, step: int) -> int:
    """Samples consumed before `step` (0-based)."""
    return step * self.global_batch_to_train

  def advance(self, position: Position) -> Position:
    """The position one step further."""
    return Position(position.step + 1, position.samples + self.global_batch_to_train)

  def measure(self, position: Position, unit: Unit) -> int:
    """A position counted in steps, samples or tokens."""
    if unit == "steps":
      return position.step
    return position.samples if unit == "samples" else self.tokens(position.samples)

  def end(self) -> Position:
    """The position at which the run is complete."""
    return Position(self.steps, self.total_samples)

  def as_dict(self) -> dict[str, int | float | str]:
    """The derived sizes, for the run's config.yml and its checkpoints."""
    names = ("micro_batch_to_train", "global_batch_to_train", "global_batch_to_load", "eval_batch")
    sizes: dict[str, int | float | str] = {name: getattr(self, name) for name in names}
    return sizes | {
      "num_devices": self.topology.num_devices,
      "per_device_batch_size": _text(self.per_device_batch_size),
      "gradient_accumulation_steps": self.gradient_accumulation_steps,
      "tokens_per_step": self.tokens_per_step,
      "steps": self.steps,
      "total_samples": self.total_samples,
      "total_tokens": self.total_tokens,
    }

  def __str__(self) -> str:
    rows = self._derivation()
    how_width = max(len(how) for _, how, _, _ in rows)
    size_width = max(len(f"{size:,}") for _, _, size, _ in rows)
    lines = [
      f"  {name:<21}  {how:<{how_width}} = {size:>{size_width},} {unit}"
      for name, how, size, unit in rows
    ]
    return "\n".join(["Batch plan", *lines])

  def _derivation(self) -> list[tuple[str, str, int, str]]:
    """Name, derivation, size and unit of every size, each derived from those above it."""
    devices = self.topology.num_devices
    micro, batch = self.micro_batch_to_train, self.global_batch_to_train
    per_device, factor = _text(self.per_device_batch_size), _text(self.expansion_factor_real_data)
    per_device_eval = _text(Fraction(self.eval_batch, devices))
    times = f"{devices:,} devices ×"
    accumulation, length = f"{self.gradient_accumulation_steps:,}", f"{self.max_target_length:,}"
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
      ("total_samples", f"{batch:,} × steps {self.steps:,}", self.total_samples, "samples"),
      ("total_tokens", f"{self.total_samples:,} × {length}", self.total_tokens, "tokens"),
    ]


def plan_batches(batch: BatchConfig, run: RunConfig, topology: Topology) -> BatchPlan:
  """Derives every size from the configuration and the devices.

  Raises:
    UserError: if a size is not whole, with the nearest values that are.
  """
  micro_batch = _micro_batch("per_device_batch_size", batch.per_device_batch_size, topology)
  global_batch = micro_batch * batch.gradient_accumulation_steps
  factor = batch.expansion_factor_real_data
  factor = factor if factor > 0 else Fraction(1)
  per_device_eval = batch.eval_per_device_batch_size or batch.per_device_batch_size
  return BatchPlan(
    topology=topology,
    max_target_length=batch.max_target_length,
    per_device_batch_size=batch.per_device_batch_size,
    gradient_accumulation_steps=batch.gradient_accumulation_steps,
    expansion_factor_real_data=factor,
    micro_batch_to_train=micro_batch,
    global_batch_to_train=global_batch,
    global_batch_to_load=_batch_to_load(global_batch, factor),
    eval_batch=_micro_batch("eval_per_device_batch_size", per_device_eval, topology),
    steps=_steps(run, global_batch, batch.max_target_length),
  )


def _micro_batch(key: str, per_device: Fraction, topology: Topology) -> int:
  """num_devices × per-device size; every group of devices must get whole samples."""
  devices, groups = topology.num_devices, topology.num_batch_groups
  samples = per_device * devices
  rows_per_group = samples / groups
  if rows_per_group.denominator == 1 and rows_per_group > 0:
    return int(samples)
  below, above = _neighbours(rows_per_group)
  nearest = [_text(Fraction(rows * groups, devices)) for rows in (below, above) if rows > 0]
  raise UserError(
    f"{key}={_text(per_device)} on {devices} devices is {_text(samples)} samples, which must be a "
    f"positive multiple of the {groups} groups of devices that see different samples "
    f"(data {topology.shape['data']} × fsdp {topology.shape['fsdp']}); "
    f"nearest: {_choices(key, nearest)}"
  )


def _batch_to_load(global_batch: int, factor: Fraction) -> int:
  """global_batch_to_train × factor, whole."""
  loaded = global_batch * factor
  if loaded.denominator == 1:
    return int(loaded)
  below, above = _neighbours(loaded)
  nearest = [_text(Fraction(size, global_batch)) for size in (below, above) if size > 0]
  raise UserError(
    f"expansion_factor_real_data={_text(factor)} × global_batch_to_train={global_batch} is "
    f"{_text(loaded)}, but global_batch_to_load counts whole samples; "
    f"nearest: {_choices('expansion_factor_real_data', nearest)}"
  )


def _steps(run: RunConfig, global_batch: int, max_target_length: int) -> int:
  """The budget in steps; exactly one of the three budget keys is given."""
  per_step = {
    "steps": 1,
    "total_samples": global_batch,
    "total_tokens": global_batch * max_target_length,
  }
  sizes = {"steps": run.steps, "total_samples": run.total_samples, "total_tokens": run.total_tokens}
  given = [key for key, size in sizes.items() if size != -1]
  if len(given) != 1:
    # Of several the last is kept: steps comes from base.yml, the others from a person.
    unset = " ".join(f"{key}=-1" for key in given[:-1]) or "steps=1000"
    values = ", ".join(f"{key}={size}" for key, size in sizes.items())
    raise UserError(f"{values}: exactly one must be set, the others -1; for example {unset}")
  key = given[0]
  steps, rest = divmod(sizes[key], per_step[key])
  if rest == 0:
    return steps
  unit = key.removeprefix("total_")
  nearest = [str(count * per_step[key]) for count in (steps, steps + 1) if count > 0]
  raise UserError(
    f"{key}={sizes[key]} is {steps} steps of {per_step[key]} {unit} and {rest} {unit} more, and a "
    f"run ends with a whole step; nearest: {_choices(key, nearest)}"
  )


def _neighbours(value: Fraction) -> tuple[int, int]:
  """The whole numbers on both sides."""
  return math.floor(value), math.floor(value) + 1


def _choices(key: str, values: list[str]) -> str:
  return " or ".join(f"{key}={value}" for value in values)


def _text(value: Fraction) -> str:
  """A fraction as people write it and the configuration reads it: 4, 0.25, 1/3."""
  return str(plain(value))
