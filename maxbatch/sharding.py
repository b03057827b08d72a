"""Which dimension of an array is divided over which mesh axis: one table, read by everything.

Parameters and activations name their dimensions with logical axes; the table maps these to mesh
axes. A dimension that the devices do not divide evenly is kept whole on each of them, and reported.
"""

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxbatch.devices import Device
from maxbatch.errors import UserError
from maxbatch.topology import AXES, Topology

LogicalAxes = tuple[str | None, ...]

LOGICAL_AXIS_RULES: dict[str | None, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
  "layers": ("stage",),
  "embed": ("fsdp",),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "head_dim": (),
  "length": (),
  "activation_embed": (),
  None: (),
}


def make_mesh(topology: Topology, devices: Sequence[Device]) -> Mesh:
  """The mesh of all `devices`, neighbours on the interconnect kept together where it is known.

  Raises:
    UserError: if the number of devices is not the topology's.
  """
  if len(devices) != topology.num_devices:
    raise UserError(
      f"the mesh {topology} needs {topology.num_devices} devices, and {len(devices)} are there"
    )
  if topology.num_slices > 1:
    array = mesh_utils.create_hybrid_device_mesh(
      topology.ici, topology.dcn, devices, allow_split_physical_axes=True
    )
  elif devices[0].platform == "cpu":
    array = np.array(devices).reshape(topology.ici)
  else:
    array = mesh_utils.create_device_mesh(topology.ici, devices, allow_split_physical_axes=True)
  return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
  """The mesh axes that divide each dimension of an array of `shape` named by `axes`."""
  if len(axes) != len(shape):
    raise ValueError(f"axes {axes} do not name the dimensions of shape {tuple(shape)}")
  return PartitionSpec(
    *(_divide(axis, size, mesh.shape) for axis, size in zip(axes, shape, strict=True))
  )


def _divide(axis: str | None, size: int, mesh_shape: dict[str, int]) -> tuple[str, ...] | None:
  mesh_axes = LOGICAL_AXIS_RULES[axis]
  ways = math.prod(mesh_shape[name] for name in mesh_axes)
  return mesh_axes if ways > 1 and size % ways == 0 else None


def sharding(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
  """As `spec`, bound to the mesh."""
  return NamedSharding(mesh, spec(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
  """The same value on every device."""
  return NamedSharding(mesh, PartitionSpec())


def undivided(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> list[str]:
  """What the table would divide but the sizes do not allow, in words; [] if nothing."""
  problems = []
  for axis, size in zip(axes, shape, strict=True):
    ways = math.prod(mesh.shape[name] for name in LOGICAL_AXIS_RULES[axis])
    if size % ways:
      over = " × ".join(LOGICAL_AXIS_RULES[axis])
      problems.append(f"{axis} {size} is not a multiple of {over} = {ways}: kept whole")
  return problems


def constrain(x: jax.Array, axes: LogicalAxes) -> jax.Array:
  """Asks the compiler to keep activation `x` divided as the table says.

  Without a mesh (one device, or a model called by hand) nothing happens.
  """
  mesh = jax.sharding.get_abstract_mesh()
  open_sizes = [size for name, size in mesh.shape.items() if name not in mesh.manual_axes]
  if all(size == 1 for size in open_sizes):
    return x
  places = NamedSharding(mesh, open_spec(axes, x.shape))
  return jax.lax.with_sharding_constraint(x, places)


def over_rows(function: Callable[..., jax.Array], whole: jax.Array, rows: jax.Array) -> jax.Array:
  """`function(whole, rows)`, run by each device on its own rows.

  For gathers: the compiler would rather send rows between the devices that fsdp sets apart.
  `whole` must not be divided over fsdp; its gradient is summed over it.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if "fsdp" in mesh.manual_axes or mesh.shape.get("fsdp", 1) == 1:
    return function(whole, rows)
  on_fsdp = PartitionSpec("fsdp")
  return jax.shard_map(
    function,
    in_specs=(PartitionSpec(), on_fsdp),
    out_specs=on_fsdp,
    axis_names={"fsdp"},
    check_vma=False,
  )(whole, rows)


def open_spec(axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
  """As `spec`, for the mesh of the code around.

  Inside a shard_map the axes it has taken over are already divided, so they are left out.
  """
  mesh = jax.sharding.get_abstract_mesh()
  sizes = {name: 1 if name in mesh.manual_axes else size for name, size in mesh.shape.items()}
  divided = (_divide(axis, size, sizes) for axis, size in zip(axes, shape, strict=True))
  return PartitionSpec(*(_without(names, mesh.manual_axes) for names in divided))


def gathered(parameter: jax.Array, axes: LogicalAxes) -> jax.Array:
  """A parameter as it is used: whole along `embed`, which fsdp divides only to store it.

  Said outright, because the compiler may otherwise move activations instead of parameters.
  """
  return constrain(parameter, tuple(None if axis == "embed" else axis for axis in axes))


def _without(axes: tuple[str, ...] | None, taken: Sequence[str]) -> tuple[str, ...] | None:
  left = tuple(axis for axis in axes or () if axis not in taken)
  return left or None
