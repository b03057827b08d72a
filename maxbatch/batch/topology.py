"""The number of devices along each mesh axis, as plain integers: no jax, no device access."""

import dataclasses
import math

from maxbatch.config.schema import MeshConfig
from maxbatch.errors import UserError

AXES = ("data", "fsdp", "tensor", "stage")
BATCH_AXES = ("data", "fsdp")
"""Devices that differ along these axes get different samples; along the others they share them."""

_KEYS = ("data", "fsdp", "tensor", "pipeline")
"""The axes in the names of keys, as MaxText has them: ici_data_parallelism."""


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices per mesh axis: `ici` inside a slice, `dcn` between slices, both in the order of AXES."""

  ici: tuple[int, int, int, int]
  dcn: tuple[int, int, int, int]

  @property
  def shape(self) -> dict[str, int]:
    """Devices along each mesh axis."""
    return {axis: i * d for axis, i, d in zip(AXES, self.ici, self.dcn, strict=True)}

  @property
  def num_devices(self) -> int:
    """Devices of the mesh."""
    return math.prod(self.ici) * math.prod(self.dcn)

  @property
  def num_slices(self) -> int:
    """Slices: sets of devices connected by ICI, the fast interconnect."""
    return math.prod(self.dcn)

  @property
  def devices_per_slice(self) -> int:
    """Devices of one slice."""
    return math.prod(self.ici)

  @property
  def num_batch_groups(self) -> int:
    """Data-parallel groups: data × fsdp. Each gets its own samples."""
    return math.prod(self.shape[axis] for axis in BATCH_AXES)

  def __str__(self) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in self.shape.items())


def topology(mesh: MeshConfig, num_devices: int, num_slices: int = 1) -> Topology:
  """The mesh of `num_devices` devices in `num_slices` equal slices.

  Raises:
    UserError: the product of the axes is not the number of devices, or the slices are not equal.
  """
  if num_devices % num_slices:
    raise UserError(
      f"{num_devices} devices in {num_slices} slices: all slices must have the same number of "
      f"devices; for example {num_devices // num_slices * num_slices} devices"
    )
  ici = (
    mesh.ici_data_parallelism,
    mesh.ici_fsdp_parallelism,
    mesh.ici_tensor_parallelism,
    mesh.ici_pipeline_parallelism,
  )
  dcn = (
    mesh.dcn_data_parallelism,
    mesh.dcn_fsdp_parallelism,
    mesh.dcn_tensor_parallelism,
    mesh.dcn_pipeline_parallelism,
  )
  return Topology(
    ici=_fill("ici", ici, num_devices // num_slices, "devices of a slice"),
    dcn=_fill("dcn", dcn, num_slices, "slices"),
  )


def devices_per_process(num_simulated_devices: int, num_processes: int) -> int:
  """The simulated devices of each of several processes.

  Raises:
    UserError: the processes cannot share them equally.
  """
  if num_simulated_devices % num_processes:
    fitting = max(num_simulated_devices // num_processes, 1) * num_processes
    raise UserError(
      f"num_simulated_devices={num_simulated_devices}: {num_processes} processes share them "
      f"equally, so it must be a multiple of {num_processes}; for example "
      f"num_simulated_devices={fitting}"
    )
  return num_simulated_devices // num_processes


def _fill(prefix: str, sizes: tuple[int, ...], total: int, what: str) -> tuple[int, int, int, int]:
  """Replaces a -1 by the remaining devices, and checks that the product is `total`."""
  names = [f"{prefix}_{name}_parallelism" for name in _KEYS]
  given = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
  open_axes = [name for name, size in zip(names, sizes, strict=True) if size == -1]
  if len(open_axes) > 1:
    raise UserError(
      f"{given}: only one axis can be -1 (the remaining devices), not {len(open_axes)}; "
      f"for example {_working_example(names, sizes, total)}"
    )
  product = math.prod(size for size in sizes if size != -1)
  if open_axes and total % product == 0:
    data, fsdp, tensor, stage = (total // product if size == -1 else size for size in sizes)
    return data, fsdp, tensor, stage
  if open_axes or product != total:
    raise UserError(
      f"{given}: the product of the axes, {product}, must "
      f"{'divide' if open_axes else 'equal'} the {total} {what}; "
      f"for example {_working_example(names, sizes, total)}"
    )
  data, fsdp, tensor, stage = sizes
  return data, fsdp, tensor, stage


def _working_example(names: list[str], sizes: tuple[int, ...], total: int) -> str:
  """The given sizes, each reduced to a divisor of the devices that remain; data gets the rest."""
  left, example = total, []
  for name, size in zip(names[1:], sizes[1:], strict=True):
    fitting = math.gcd(max(size, 1), left)
    left //= fitting
    example.append(f"{name}={fitting}")
  return " ".join([f"{names[0]}={left}", *example])
