"""Which dimension of an array is divided over which mesh axis: one table, read by everything.

Parameters and activations name their dimensions with logical axes; the table maps these to mesh
axes. A dimension that the devices do not divide evenly is kept whole on each of them, and reported.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxbatch.batch.topology import AXES, Topology
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device

LogicalAxes = tuple[str | None, ...]
Result = TypeVar("Result")

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
  "fsdp_part": ("fsdp",),
  "tensor_part": ("tensor",),
  "device_part": ("fsdp", "tensor"),
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


def over_rows(
  function: Callable[..., Result], stored: jax.Array, axes: LogicalAxes, *rows: jax.Array
) -> Result:
  """`function(whole parameter, *rows)`, run by each device on its own rows: (B, …) → one or more
  arrays (B, …).

  For what the compiler would divide otherwise: gathers, for which it sends rows between the devices
  that fsdp sets apart, and sums over tokens in a loop, which it completes in every turn. Here the
  parameter is gathered before and its gradient summed after, once.

  Args:
    function: of the whole parameter and one device's rows.
    stored: the parameter, laid out as the table says or in any other way.
    axes: its logical axes.
    rows: arrays whose first dimension is the batch.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if "fsdp" in mesh.manual_axes or mesh.shape.get("fsdp", 1) == 1:
    return function(stored, *rows)
  place, dtype = _fsdp_only(axes, stored.shape), stored.dtype
  if "fsdp" not in place:
    # Its gradient is summed as it enters, and XLA's CPU compiler aborts on such sums of bfloat16.
    stored = stored.astype(jnp.float32)

  def local(part: jax.Array, *rows: jax.Array) -> Result:
    whole = _all_parts(part, place.index("fsdp")) if "fsdp" in place else part.astype(dtype)
    return function(whole, *rows)

  return jax.shard_map(
    local,
    in_specs=(place, *(PartitionSpec("fsdp") for _ in rows)),
    out_specs=PartitionSpec("fsdp"),
    axis_names={"fsdp"},
    check_vma=False,
  )(stored, *rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_parts(part: jax.Array, dim: int) -> jax.Array:
  """The whole of what fsdp divides along `dim`; its gradient is summed and divided again."""
  return jax.lax.all_gather(part, "fsdp", axis=dim, tiled=True)


def _summed(x: jax.Array, dim: int | None) -> jax.Array:
  """The sum over fsdp, divided along `dim` or whole."""

  def plainly(x: jax.Array) -> jax.Array:
    if dim is None:
      return jax.lax.psum(x, "fsdp")
    return jax.lax.psum_scatter(x, "fsdp", scatter_dimension=dim, tiled=True)

  def in_float32(x: jax.Array) -> jax.Array:
    return plainly(x.astype(jnp.float32)).astype(x.dtype)

  # XLA's CPU compiler sums bfloat16 in float32, but aborts on sums that come from a shard_map.
  return jax.lax.platform_dependent(x, cpu=in_float32, default=plainly)


_all_parts.defvjp(
  lambda part, dim: (_all_parts(part, dim), None),
  lambda dim, _, gradient: (_summed(gradient, dim),),
)


def sum_over_rows(
  function: Callable[..., tuple[jax.Array, jax.Array]],
  axes: LogicalAxes,
  shape: Sequence[int],
  *rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """`function(*rows)`, a sum over rows and something of each row, run by each device on its own.

  Args:
    function: of one device's rows, arrays whose first dimension is the batch, to a sum over them
      and an array (B, …).
    axes: logical axes of the sum, which arrives laid out as the table says.
    shape: its shape.
    rows: the rows of all devices.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if "fsdp" in mesh.manual_axes or mesh.shape.get("fsdp", 1) == 1:
    return function(*rows)
  place = _fsdp_only(axes, shape)

  def local(*rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    total, of_each = function(*rows)
    return _summed(total, place.index("fsdp") if "fsdp" in place else None), of_each

  return jax.shard_map(
    local,
    in_specs=PartitionSpec("fsdp"),
    out_specs=(place, PartitionSpec("fsdp")),
    axis_names={"fsdp"},
    check_vma=False,
  )(*rows)


def _fsdp_only(axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
  """How fsdp divides an array, other mesh axes left out."""
  names = open_spec(axes, shape)
  return PartitionSpec(*("fsdp" if each in ("fsdp", ("fsdp",)) else None for each in names))


def open_spec(axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
  """As `spec`, for the mesh of the code around.

  Inside a shard_map the axes it has taken over are already divided, so they are left out.
  """
  mesh = jax.sharding.get_abstract_mesh()
  sizes = open_sizes()
  divided = (_divide(axis, size, sizes) for axis, size in zip(axes, shape, strict=True))
  return PartitionSpec(*(_without(names, mesh.manual_axes) for names in divided))


def open_sizes() -> dict[str, int]:
  """Devices along each axis that is not taken over around; 1 for the others, or without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return {name: 1 if name in mesh.manual_axes else mesh.shape.get(name, 1) for name in AXES}


def local_shape(axes: LogicalAxes, shape: Sequence[int]) -> tuple[int, ...]:
  """What one device holds of an array of this shape, in the code around."""
  sizes = open_sizes()
  divided = (_divide(axis, size, sizes) for axis, size in zip(axes, shape, strict=True))
  ways = (math.prod(sizes[name] for name in names or ()) for names in divided)
  return tuple(size // by for size, by in zip(shape, ways, strict=True))


def gathered(parameter: jax.Array, axes: LogicalAxes) -> jax.Array:
  """A parameter as it is used: whole along `embed`, which fsdp divides only to store it.

  Said outright, because the compiler may otherwise move activations instead of parameters. Its
  gradient is asked for as the parameter is stored: where the compiler divides the sum at all, each
  device receives only its share. (The gradient of a constraint is the same constraint: everyone
  would receive everything.)
  """
  return _gathered(parameter, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(parameter: jax.Array, axes: LogicalAxes) -> jax.Array:
  return constrain(parameter, tuple(None if axis == "embed" else axis for axis in axes))


_gathered.defvjp(
  lambda parameter, axes: (_gathered(parameter, axes), None),
  lambda axes, _, gradient: (constrain(gradient, axes),),
)


def _without(axes: tuple[str, ...] | None, taken: Sequence[str]) -> tuple[str, ...] | None:
  left = tuple(axis for axis in axes or () if axis not in taken)
  return left or None
