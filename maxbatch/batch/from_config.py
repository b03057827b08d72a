"""The plan of a configuration: its keys and devices, handed to the core's arithmetic as numbers."""

import dataclasses
import functools
import pathlib
from fractions import Fraction

from maxbatch.batch.schedule_file import read_changes
from maxbatch.config.registry import registered
from maxbatch.config.schema import BatchConfig, MeshConfig, RunConfig
from maxbatch.config.yaml_file import shown
from maxbatch.core.keys import BatchKeys, GivenSizes, text
from maxbatch.core.make_plan import derive
from maxbatch.core.plan import BatchPlan
from maxbatch.core.schedule import (
  SCHEDULES,
  PhaseStarts,
  ScheduleInputs,
  constant,
  schedule_name,
)
from maxbatch.core.solve import nearest_multiples
from maxbatch.core.topology import AXES, AXIS_NAMES, Topology, fill
from maxbatch.errors import UserError

_DEFAULT_MAX_GROWTH = 16
"""batch_schedule=gns grows the batch up to this multiple of the first, unless configured."""


def topology(mesh: MeshConfig, num_devices: int, num_slices: int = 1) -> Topology:
  """Returns the mesh of `num_devices` devices in `num_slices` equal slices.

  Raises:
    UserError: the product of the axes is not the number of devices, or the slices are not equal.
  """
  if num_devices % num_slices:
    raise UserError(
      f"{num_devices} devices in {num_slices} slices: all slices must have the same number of "
      f"devices; for example {num_devices // num_slices * num_slices} devices"
    )
  keys = dataclasses.asdict(mesh)

  def sizes(prefix: str, total: int, what: str) -> dict[str, int]:
    names = [f"{prefix}_{axis.key}_parallelism" for axis in AXES]
    filled = fill({name: keys[name] for name in names}, total, what)
    return dict(zip(AXIS_NAMES, filled.values(), strict=True))

  return Topology(
    ici=sizes("ici", num_devices // num_slices, "devices of a slice"),
    dcn=sizes("dcn", num_slices, "slices"),
  )


def plan_batches(batch: BatchConfig, run: RunConfig, topology: Topology) -> BatchPlan:
  """Derives every size from the configuration and the devices, and checks every phase.

  Raises:
    UserError: sizes contradict each other or are not whole; the message suggests sizes that work.
  """
  budget = {
    "steps": run.steps,
    "total_samples": run.total_samples,
    "total_tokens": run.total_tokens,
  }
  keys = dataclasses.replace(batch_keys(batch), **budget)
  plan = derive(keys, topology, functools.partial(_phase_starts, batch))
  most = batch.gns_max_batch_size
  most = _DEFAULT_MAX_GROWTH * plan.global_batch_to_train if most == -1 else most
  return dataclasses.replace(
    plan,
    max_batch=most if follows_noise_scale(batch) else 0,
    loading_hosts=batch.loading_hosts,
  )


def given_sizes(batch: BatchConfig) -> GivenSizes:
  """Returns the three sizes of a step as the configuration gives them.

  Raises:
    UserError: two keys give one size different values.
  """
  return batch_keys(batch).given_sizes()


def follows_noise_scale(batch: BatchConfig) -> bool:
  """Returns whether the batch follows the gradient noise scale during the run."""
  return schedule_name(batch_keys(batch)) == "gns"


def batch_keys(batch: BatchConfig) -> BatchKeys:
  """Returns the sizes and the schedule as plain numbers, without a budget."""
  micro = batch.micro_batch_size
  none = micro == "none"
  # auto and explore give no size: tuning/candidates.py lists the sizes to choose from.
  return BatchKeys(
    batch_size=batch.batch_size,
    global_batch_to_train=batch.global_batch_to_train,
    tokens_per_step=batch.tokens_per_step,
    per_device_batch_size=batch.per_device_batch_size,
    micro_batch_size="none" if none else micro if isinstance(micro, Fraction) else -1,
    gradient_accumulation_steps=batch.gradient_accumulation_steps,
    max_target_length=batch.max_target_length,
    expansion_factor_real_data=batch.expansion_factor_real_data,
    eval_per_device_batch_size=batch.eval_per_device_batch_size,
    batch_schedule=batch.batch_schedule,
    batch_schedule_type=shown(batch.batch_schedule_type),
    batch_schedule_unit=batch.batch_schedule_unit,
    batch_schedule_length=batch.batch_schedule_length,
    batch_size_start=batch.batch_size_start,
    batch_size_increment=batch.batch_size_increment,
    enable_rampup_batch_size=batch.enable_rampup_batch_size,
    per_device_batch_size_start=batch.per_device_batch_size_start,
    per_device_batch_size_increment=batch.per_device_batch_size_increment,
    global_rampup_samples=batch.global_rampup_samples,
  )


def _phase_starts(batch: BatchConfig, inputs: ScheduleInputs) -> PhaseStarts:
  """Makes the phases of the schedule that the keys select: registered, a plug-in's or a run's."""
  name, most = schedule_name(inputs.keys), batch.gns_max_batch_size
  if name == "gns":
    _check_growth(inputs, most)
    # The first batch alone; noise/controller.py decides on the later ones during the run.
    return constant(inputs)
  if most != -1:
    raise UserError(
      f"gns_max_batch_size={most} limits batch_schedule=gns, and the batch does not follow the "
      "noise scale; for example gns_max_batch_size=-1"
    )
  if name == "file":
    return _from_file(batch.batch_schedule_file, inputs.sizes.batch)
  name = batch.batch_schedule_type if name == inputs.keys.batch_schedule_type else name
  return registered("batch_schedule_type", name, SCHEDULES, batch.plugins)(inputs)


def _check_growth(inputs: ScheduleInputs, most: int) -> None:
  """Checks gns_max_batch_size; -1 is not given."""
  batch, micro = inputs.sizes.batch, inputs.sizes.micro_batch
  if most != -1 and most < batch:
    raise UserError(
      f"gns_max_batch_size={most} must be at least batch_size={batch}, with which "
      f"batch_schedule=gns begins; for example gns_max_batch_size={_DEFAULT_MAX_GROWTH * batch}"
    )
  if most != -1 and most % micro:
    near = [size for size in nearest_multiples(micro, Fraction(most)) if size >= batch]
    offers = " or ".join(f"gns_max_batch_size={text(size)}" for size in near)
    raise UserError(
      f"gns_max_batch_size={most} must be a multiple of the microbatch of {micro} samples, which "
      f"every batch of batch_schedule=gns is; nearest: {offers}"
    )


def _from_file(file: str, batch: int) -> PhaseStarts:
  """Reads the phases that another run or a person wrote.

  Raises:
    UserError: the file cannot be read, or begins with another batch than the run's.
  """
  if not file:
    raise UserError(
      "batch_schedule=file needs batch_schedule_file, the schedule that a run with "
      "batch_schedule=gns wrote; for example batch_schedule_file=runs/steered/batch_schedule.yml"
    )
  changes = read_changes(pathlib.Path(file).expanduser())
  if changes[0].batch != batch:
    raise UserError(
      f"batch_schedule_file={file} begins with {changes[0].batch} samples and batch_size is "
      f"{batch}; to follow the file, batch_size={changes[0].batch}"
    )
  return [(Fraction(change.samples), Fraction(change.batch)) for change in changes]
