"""From plain numbers to a BatchPlan: `maxbatch.plan(batch_size=512, micro_batch_size=4)`."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from maxbatch.core.keys import BatchKeys, GivenSize, Number, Pairs, Unit, exact, text, whole
from maxbatch.core.phases import ENDLESS_STEPS, BatchSchedule, Budget, Position, phases_of
from maxbatch.core.plan import BatchPlan
from maxbatch.core.schedule import (
  SEESAW,
  Build,
  RampupBatchManager,
  ScheduleInputs,
  make_schedule,
)
from maxbatch.core.solve import solve, whole_micro_batch
from maxbatch.core.topology import Topology, fill
from maxbatch.errors import UserError

Schedule = Sequence[Sequence[Number]] | RampupBatchManager | Build
"""Pairs (at, samples per step), a ramp-up, or a function from the sizes to such pairs."""


def plan(
  *,
  batch_size: Number = -1,
  micro_batch_size: Number | Literal["none"] = -1,
  gradient_accumulation_steps: Number = -1,
  per_device_batch_size: Number = -1,
  global_batch_to_train: Number = -1,
  tokens_per_step: Number = -1,
  max_target_length: Number = -1,
  expansion_factor_real_data: Number = 1,
  eval_per_device_batch_size: Number = 0,
  pad_batch: bool = False,
  batch_schedule: Schedule = (),
  batch_schedule_type: Literal["constant", "linear", "doubling"] = "constant",
  batch_schedule_unit: Unit = "samples",
  batch_schedule_length: Number = -1,
  batch_size_start: Number = -1,
  batch_size_increment: Number = -1,
  steps: Number = -1,
  total_samples: Number = -1,
  total_tokens: Number = -1,
  mesh: Mapping[str, int] | Topology | None = None,
  num_devices: Number = -1,
) -> BatchPlan:
  """Derives every size of a run from those that are given; -1 is one that is not.

  The arguments have the names, the meaning and the units of the configuration's keys. Numbers are
  exact, also 0.1 and "1/3". Nothing here needs jax.

    >>> import maxbatch as mb
    >>> plan = mb.plan(batch_size=96, micro_batch_size=4, num_devices=8, total_samples=224)
    >>> plan.gradient_accumulation_steps
    3
    >>> for position, batch, num_microbatches, micro_batch in plan:
    ...   print(position.step, position.samples, f"{batch} = {num_microbatches} x {micro_batch}")
    0 0 96 = 3 x 32
    1 96 96 = 3 x 32
    2 192 32 = 1 x 32

  A loop that keeps its own position asks `plan.phase_at(samples)` and `plan.advance(position)`; one
  that goes on after a restart takes `plan.starting_at(position)`.

  Args:
    batch_size: samples per step; global_batch_to_train is another name, and tokens_per_step gives
      it in tokens. With a ramp-up, that of its last phase.
    micro_batch_size: samples of a microbatch on each device, fractions where devices share a
      sample; per_device_batch_size is another name. "none": one microbatch per step.
    gradient_accumulation_steps: microbatches per step.
    max_target_length: tokens of a sample, which sizes in tokens need.
    expansion_factor_real_data: samples that are loaded for each that is trained on.
    eval_per_device_batch_size: as micro_batch_size, for evaluation; 0: the same.
    pad_batch: fills the last microbatch of a step up with rows of padding where the batch does not
      divide over the devices; a loss must give them no weight.
    batch_schedule: how the batch changes: pairs (at, samples per step), the first at 0, in the unit
      of batch_schedule_unit; a RampupBatchManager; or a function from ScheduleInputs to pairs.
    batch_schedule_type: "linear" or "doubling", from batch_size_start over batch_schedule_length.
    batch_schedule_unit: what a schedule counts.
    batch_schedule_length: of the ramp of batch_schedule_type.
    batch_size_start: samples per step of its first phase.
    batch_size_increment: of "linear"; batch_size_start unless given.
    steps: when the run ends, unless total_samples or total_tokens says so; with none it has no end.
    mesh: devices along each axis, {"data": 2, "fsdp": 4}; -1 along one is the rest of num_devices.
    num_devices: of the mesh; without a mesh, all along "data". 1 where neither is given.

  Raises:
    UserError: a ValueError that names the arguments, their values, the rule and values that work.
  """
  pairs, build = _schedule(batch_schedule, batch_schedule_type)
  is_rampup = isinstance(batch_schedule, RampupBatchManager)
  keys = _keys(
    batch_size=batch_size,
    micro_batch_size=micro_batch_size,
    gradient_accumulation_steps=gradient_accumulation_steps,
    per_device_batch_size=per_device_batch_size,
    global_batch_to_train=global_batch_to_train,
    tokens_per_step=tokens_per_step,
    max_target_length=max_target_length,
    expansion_factor_real_data=expansion_factor_real_data,
    eval_per_device_batch_size=eval_per_device_batch_size,
    pad_batch=pad_batch,
    batch_schedule=pairs,
    batch_schedule_type=batch_schedule_type,
    batch_schedule_unit="samples" if is_rampup else batch_schedule_unit,
    batch_schedule_length=batch_schedule_length,
    batch_size_start=batch_size_start,
    batch_size_increment=batch_size_increment,
    steps=ENDLESS_STEPS if steps == total_samples == total_tokens == -1 else steps,
    total_samples=total_samples,
    total_tokens=total_tokens,
  )
  return derive(keys, _topology(mesh, whole("num_devices", num_devices)), build)


_EXACT = {
  "micro_batch_size",
  "per_device_batch_size",
  "expansion_factor_real_data",
  "eval_per_device_batch_size",
}


_WORDS = {
  "batch_schedule_type": ("constant", "linear", "doubling"),
  "batch_schedule_unit": ("samples", "steps", "tokens"),
}


def _keys(**given: Any) -> BatchKeys:
  for key, allowed in _WORDS.items():
    if given[key] not in allowed:
      raise UserError(
        f"{key}={given[key]} must be one of {', '.join(allowed)}; for example {key}={allowed[0]}"
      )
  in_tokens = [key for key in ("tokens_per_step", "total_tokens") if given[key] != -1]
  in_tokens += ["batch_schedule_unit"] if given["batch_schedule_unit"] == "tokens" else []
  if in_tokens and given["max_target_length"] == -1:
    raise UserError(
      f"{in_tokens[0]}={given[in_tokens[0]]} counts tokens and needs max_target_length, the tokens of "
      "a sample; for example max_target_length=2048"
    )
  keys = dict(given)
  for key, value in given.items():
    if key not in {*_WORDS, "batch_schedule", "pad_batch"} and value != "none":
      keys[key] = exact(key, value) if key in _EXACT else whole(key, value)
  keys["max_target_length"] = max(1, keys["max_target_length"])
  return BatchKeys(**keys)


def _schedule(given: Schedule, kind: str) -> tuple[Pairs, Build | None]:
  """Returns the pairs of a schedule, or the function that makes it."""
  if isinstance(given, RampupBatchManager):
    return tuple(given.phase_starts()), None
  if callable(given):
    if kind != "constant":
      raise UserError(
        f"batch_schedule_type={kind} and a function as batch_schedule are different schedules; keep "
        "one of them, for example batch_schedule_type=constant"
      )
    return (), given
  pairs = list(given) if isinstance(given, Sequence) else [given]
  if isinstance(given, str) or not all(isinstance(pair, Sequence) for pair in pairs):
    raise UserError(
      f"batch_schedule={given} must be pairs [at, batch], a RampupBatchManager or a function; for "
      "example batch_schedule=[[0, 32], [10000, 64]]"
    )
  return tuple(tuple(exact("batch_schedule", size) for size in pair) for pair in pairs), None


def _topology(mesh: Mapping[str, int] | Topology | None, num_devices: int) -> Topology:
  """Returns the mesh, checked against the number of devices; -1 is not given."""
  if mesh is None:
    return Topology.of(data=max(1, num_devices))
  if isinstance(mesh, Topology):
    fill(mesh.shape, mesh.num_devices if num_devices == -1 else num_devices, "devices")
    return mesh
  sizes = {axis: whole(f"mesh[{axis!r}]", size) for axis, size in mesh.items()}
  total = math.prod(sizes.values()) if num_devices == -1 else num_devices
  if total < 0:
    raise UserError(
      f"mesh={dict(mesh)}: an axis of -1 takes the remaining devices and needs num_devices; for "
      f"example num_devices={-total}"
    )
  return Topology(fill(sizes, total, "devices"))


def derive(keys: BatchKeys, topology: Topology, build: Build | None = None) -> BatchPlan:
  """Derives every size from the keys and the devices, and checks every phase.

  Args:
    keys: the sizes, the schedule and the budget as they are given.
    build: makes the phases of a schedule that SCHEDULES does not have.

  Raises:
    UserError: sizes contradict each other or are not whole; the message suggests sizes that work.
  """
  sizes = solve(keys.given_sizes(), topology)
  schedule = make_schedule(ScheduleInputs(keys, sizes, topology), build)
  factor = max(Fraction(keys.expansion_factor_real_data), Fraction(0)) or Fraction(1)
  _check_loads(schedule, factor)
  budget = _budget(keys)
  return BatchPlan(
    topology=topology,
    max_target_length=keys.max_target_length,
    per_device_batch_size=Fraction(sizes.micro_batch, topology.num_devices),
    gradient_accumulation_steps=sizes.num_microbatches,
    expansion_factor_real_data=factor,
    micro_batch_to_train=sizes.micro_batch,
    global_batch_to_train=sizes.batch,
    global_batch_to_load=int(sizes.batch * factor),
    eval_batch=_eval_batch(Fraction(keys.eval_per_device_batch_size), sizes.micro_batch, topology),
    schedule=schedule,
    budget=budget,
    phases=phases_of(schedule, budget, Position(0, 0)),
    rate_is_of_first_batch=isinstance(keys.batch_schedule, str)
    or keys.batch_schedule_type == SEESAW,
  )


def _eval_batch(per_device: Fraction, micro_batch: int, topology: Topology) -> int:
  """Returns the samples of an evaluation batch: by eval_per_device_batch_size, or training's microbatch."""
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
