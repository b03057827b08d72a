"""The batch of a resumed run: what it keeps, and whether it can go on with the sizes given now."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from maxbatch.batch.from_config import given_sizes
from maxbatch.config.keys.batch import BatchConfig, Explore
from maxbatch.core.keys import text
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.solve import fitting_micro_batch, solve
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError


def keep_batch(
  config: BatchConfig, topology: Topology, saved: Mapping[str, Any], changed: Collection[str]
) -> BatchConfig:
  """Returns the sizes of a run that is resumed, perhaps on other devices: its batch stays.

  Unless a key says otherwise: one that gives the batch, or a size of the microbatch or their number
  that is in `changed`, of which the start that wrote the checkpoint had other values. The microbatch of a
  device stays too, if no key gives it and it divides the batch. `saved` is `BatchPlan.as_dict` of the
  checkpoint.

  Raises:
    UserError: the batch does not divide over these devices, or not as the keys ask.
  """
  given, batch = given_sizes(config), saved.get("global_batch_to_train")
  divisions = (given.per_device, given.num_microbatches)
  is_given = given.batch or any(size and size.key in changed for size in divisions)
  # A microbatch that is to be chosen has no size yet, and its choice must not change the batch.
  is_open = config.micro_batch_size == "auto" or isinstance(config.micro_batch_size, Explore)
  if is_given or batch is None:
    return config
  try:
    if not is_open and solve(given, topology).batch == batch:
      return config
    kept = dataclasses.replace(config, batch_size=batch)
    if is_open and given.num_microbatches:
      # Batch and number of microbatches give the size that was to be chosen.
      kept = dataclasses.replace(kept, micro_batch_size=Fraction(-1))
    solve(given_sizes(kept), topology)
  except UserError as error:
    raise UserError(
      f"this run trains with {batch} samples per step, which it keeps unless a key such as "
      f"batch_size gives another batch: {error}"
    ) from None
  if is_open or any(divisions):
    return kept
  per_device = _near(Fraction(saved["per_device_batch_size"]), batch, topology)
  return dataclasses.replace(kept, per_device_batch_size=per_device)


def _near(per_device: Fraction, batch: int, topology: Topology) -> Fraction:
  """Returns the size of a device's microbatch, or the largest smaller one that divides the
  batch."""
  devices, groups = topology.num_devices, topology.num_batch_groups
  rows = max(1, math.floor(per_device * devices / groups))
  return Fraction(fitting_micro_batch(rows * groups, batch, topology), devices)


def resumed_plan(
  plan: BatchPlan, saved: Mapping[str, Any], position: Position, *, steered: bool
) -> BatchPlan:
  """Returns the plan from a checkpoint on, whose own was `saved`, by `BatchPlan.as_dict`.

  Where the noise scale decides on the batch (`steered`) what it had decided stays.
  """
  if steered:
    plan = plan.with_schedule([(int(at), batch) for at, batch in saved["batch_schedule"]])
  return plan.starting_at(position)


def check_can_continue(plan: BatchPlan, first: int, now: int) -> None:
  """Refuses sizes with which a run with batch_schedule=gns cannot be resumed.

  Such a run began with `first` samples per step, and had come to `now` at the checkpoint.

  Raises:
    UserError: the run began with another batch, or the microbatch does not divide the present one.
  """
  batch, micro = plan.global_batch_to_train, plan.micro_batch_to_train
  if batch != first:
    raise UserError(
      f"global_batch_to_train={batch} must be the {first} samples per step with which this run "
      f"began, because batch_schedule=gns continues from there; for example batch_size={first}, or "
      "another run_name"
    )
  if now % micro:
    raise UserError(
      f"micro_batch_to_train={micro} must divide the {now} samples per step that "
      f"batch_schedule=gns has reached in this run; for example {_micro_batch_that_works(plan, now)}"
    )


def _micro_batch_that_works(plan: BatchPlan, batch: int) -> str:
  common = math.gcd(batch, plan.micro_batch_to_train)
  if common % plan.topology.num_batch_groups:
    return "another mesh, or another run_name"
  return f"per_device_batch_size={text(plan.per_device(common))} gradient_accumulation_steps=-1"
