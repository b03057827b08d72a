"""Sharding: one table of rules maps logical axes to mesh axes, for parameters and activations.

A dimension that the devices do not divide evenly is replicated, and reported.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxbatch.core.topology import AXES, AXIS_NAMES, BATCH_AXES, Topology
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device

LogicalAxes = tuple[str | None, ...]
Result = TypeVar("Result")

MESH_AXES = tuple(axis.name for axis in sorted(AXES, key=lambda axis: axis.depth))
"""In the order in which shard_maps take them, the outer before the inner."""

LOGICAL_AXIS_RULES: dict[str | None, tuple[str, ...]] = {
  "batch": BATCH_AXES,
  "layers": ("stage",),
  "embed": ("fsdp",),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "expert": (),
  "head_dim": (),
  "length": (),
  "activation_embed": (),
  "fsdp_part": ("fsdp",),
  "tensor_part": ("tensor",),
  "device_part": ("fsdp", "tensor"),
  None: (),
}


def make_mesh(topology: Topology, devices: Sequence[Device]) -> Mesh:
  """Makes the mesh of all `devices`, in an order that follows the interconnect where it is known.

  Raises:
    UserError: the number of devices is not the topology's.
  """
  if len(devices) != topology.num_devices:
    raise UserError(
      f"the mesh {topology} needs {topology.num_devices} devices, but there are {len(devices)}"
    )
  ici, dcn = tuple(topology.ici.values()), tuple(topology.dcn.values())
  if not _form_cuboids(devices, topology.num_slices):
    array = _as_they_come(topology, devices)
  elif topology.num_slices > 1:
    array = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
  elif devices[0].platform == "cpu":
    array = np.array(devices).reshape(ici)
  else:
    array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
  array = np.transpose(array, [AXIS_NAMES.index(axis) for axis in MESH_AXES])
  return Mesh(array, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _form_cuboids(devices: Sequence[Device], num_slices: int) -> bool:
  """Returns whether the chips of each slice fill a cuboid of the interconnect, as whole slices do;
  those that rollout_devices leave may not, and jax finds no order for them."""
  places: Sequence[tuple[int, ...] | None] = [getattr(device, "coords", None) for device in devices]
  known = [place for place in places if place is not None]
  if len(known) < len(devices):
    return True  # Not a TPU.
  cores = len({getattr(device, "core_on_chip", 0) for device in devices})
  sides = [max(along) - min(along) + 1 for along in zip(*known, strict=True)]
  return math.prod([*sides, cores, num_slices]) == len(devices)


def _as_they_come(topology: Topology, devices: Sequence[Device]) -> np.ndarray:
  """Returns the devices, slice after slice, in the order in which they are given."""
  slices = np.array(devices).reshape(*topology.dcn.values(), *topology.ici.values())
  interleaved = slices.transpose([at + part for at in range(len(AXES)) for part in (0, len(AXES))])
  return interleaved.reshape(tuple(topology.shape.values()))


def num_processes(mesh: Mesh) -> int:
  """Returns how many processes the devices belong to."""
  return len({device.process_index for device in mesh.devices.flat})


def spec(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
  """Returns the PartitionSpec of an array of `shape` with logical axes `axes`."""
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
  """Returns the NamedSharding of an array of `shape` with logical axes `axes`."""
  return NamedSharding(mesh, spec(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a value that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def put(arrays: Any, shardings: Any) -> Any:
  """Puts arrays of the host on the devices; every process has the whole of them.

  jax.device_put would compare what the processes have, array by array, in a collective each.
  """

  def one(x: np.ndarray, place: NamedSharding) -> jax.Array:
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])

  return jax.tree.map(one, arrays, shardings)


def replicated_dims(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> list[str]:
  """Returns a message for each dimension that is replicated because its size does not divide
  evenly."""
  problems = []
  for axis, size in zip(axes, shape, strict=True):
    ways = math.prod(mesh.shape[name] for name in LOGICAL_AXIS_RULES[axis])
    if size % ways:
      over = " × ".join(LOGICAL_AXIS_RULES[axis])
      problems.append(f"{axis} {size} is not a multiple of {over} = {ways}: replicated")
  return problems


def constrain(x: jax.Array, axes: LogicalAxes) -> jax.Array:
  """Constrains the sharding of activation `x` to the table's.

  Does nothing without a mesh, or where all its automatic axes have one device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  open_sizes = [size for name, size in mesh.shape.items() if name not in mesh.manual_axes]
  if all(size == 1 for size in open_sizes):
    return x
  places = NamedSharding(mesh, auto_axes_spec(axes, x.shape))
  return jax.lax.with_sharding_constraint(x, places)


def over_rows(
  function: Callable[..., Result], stored: jax.Array, axes: LogicalAxes, *rows: jax.Array
) -> Result:
  """Runs `function(whole parameter, *rows)` on each device for its own rows: (B, …) → one or more
  arrays (B, …).

  For code that the compiler would shard badly over fsdp: gathers, for which it moves rows between
  devices, and sums over tokens in a loop, which it all-reduces in every iteration. Here the
  parameter is all-gathered once before, and its gradient reduced once after.

  Args:
    function: of the whole parameter and one device's rows.
    stored: the parameter, in any sharding.
    axes: its logical axes.
    rows: arrays whose first dimension is the batch.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if "fsdp" in mesh.manual_axes or mesh.shape.get("fsdp", 1) == 1:
    return function(stored, *rows)
  place, dtype = _fsdp_spec(axes, stored.shape), stored.dtype
  if "fsdp" not in place:
    # XLA's CPU compiler aborts on the all-reduce of its gradient in bfloat16.
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


def by_device(
  function: Callable[..., tuple[jax.Array, Any]],
  parameters: Mapping[str, tuple[jax.Array, LogicalAxes]],
  *rows: jax.Array,
) -> tuple[jax.Array, Any]:
  """Runs `function(parameters, *rows)` on each device for its own rows and its part of a layer's width.

  For code that sorts and groups tokens, which the compiler would do for all devices' tokens at once.
  Parameters are gathered along fsdp before, and their gradients are reduced after.

  Args:
    function: from parameters by name and one device's rows to an array (B, …), which is summed over
      the devices that share the width, and a pytree of arrays (B, …) that are the same on these.
    parameters: with their logical axes, of which `mlp` is the width.
    rows: arrays whose first dimension is the batch.
  """
  sizes = auto_axis_sizes()
  if rows[0].shape[0] % math.prod(sizes[name] for name in BATCH_AXES):
    sizes = dict.fromkeys(sizes, 1)
  widths = [
    size
    for x, axes in parameters.values()
    for axis, size in zip(axes, x.shape, strict=True)
    if axis == "mlp"
  ]
  shares = 1 if any(width % sizes["tensor"] for width in widths) else sizes["tensor"]
  used = {name for name in BATCH_AXES if sizes[name] > 1} | ({"tensor"} if shares > 1 else set())
  if not used:
    return function({name: x for name, (x, _) in parameters.items()}, *rows)

  def place(x: jax.Array, axes: LogicalAxes) -> PartitionSpec:
    each = [
      names[0] if isinstance(names, tuple) else names for names in auto_axes_spec(axes, x.shape)
    ]
    return PartitionSpec(*(name if name in used else None for name in each))

  places = {name: place(*parameter) for name, parameter in parameters.items()}
  dtypes = {name: x.dtype for name, (x, _) in parameters.items()}

  def sent(name: str) -> jax.Array:
    # XLA's CPU compiler aborts on the all-reduce of a gradient in bfloat16.
    x = parameters[name][0]
    return x.astype(jnp.float32) if used - {"data"} - set(places[name]) else x

  def local(parts: dict[str, jax.Array], *rows: jax.Array) -> tuple[jax.Array, Any]:
    whole: dict[str, Any] = {
      name: _all_parts(part, places[name].index("fsdp")) if "fsdp" in places[name] else part
      for name, part in parts.items()
    }
    given = {name: x.astype(dtypes[name]) for name, x in whole.items()}
    part, others = function(given, *(x[0] for x in rows))
    return part[None], others

  batch = PartitionSpec(tuple(name for name in BATCH_AXES if name in used) or None)
  by_share = PartitionSpec("tensor" if shares > 1 else None, *batch)
  # A copy for each share: so their gradients are summed out here, in whatever format they are.
  copies = [jnp.broadcast_to(x[None], (shares, *x.shape)) for x in rows]
  parts_, others = jax.shard_map(
    local,
    in_specs=(places, *(by_share for _ in rows)),
    out_specs=(by_share, batch),
    axis_names=used,
    check_vma=False,
  )({name: sent(name) for name in parameters}, *copies)
  return parts_.sum(0), others


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_parts(part: jax.Array, dim: int) -> jax.Array:
  """Gathers the parts over fsdp along `dim`; the gradient is reduce-scattered."""
  return jax.lax.all_gather(part, "fsdp", axis=dim, tiled=True)


def _summed(x: jax.Array, dim: int | None) -> jax.Array:
  """Sums over fsdp: reduce-scattered along `dim`, or all-reduced if it is None."""

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
  """Runs `function(*rows)` on each device for its own rows, and sums its first result over fsdp.

  Args:
    function: from one device's rows, arrays whose first dimension is the batch, to a sum over them
      and an array (B, …).
    axes: logical axes of the sum, which is returned in the table's sharding.
    shape: of the sum.
    rows: the rows of all devices.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if "fsdp" in mesh.manual_axes or mesh.shape.get("fsdp", 1) == 1:
    return function(*rows)
  place = _fsdp_spec(axes, shape)

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


def _fsdp_spec(axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
  """Returns the PartitionSpec of an array over fsdp alone."""
  names = auto_axes_spec(axes, shape)
  return PartitionSpec(*("fsdp" if each in ("fsdp", ("fsdp",)) else None for each in names))


def auto_axes_spec(axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
  """Returns the spec for the mesh of the enclosing code.

  Inside a shard_map its manual axes are left out: arrays are already local along them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  sizes = auto_axis_sizes()
  divided = (_divide(axis, size, sizes) for axis, size in zip(axes, shape, strict=True))
  return PartitionSpec(*(_without(names, mesh.manual_axes) for names in divided))


def auto_axis_sizes() -> dict[str, int]:
  """Returns the devices along each automatic mesh axis; 1 for manual axes of a shard_map, or
  without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return {name: 1 if name in mesh.manual_axes else mesh.shape.get(name, 1) for name in AXIS_NAMES}


def local_shape(axes: LogicalAxes, shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the shape of one device's shard of an array, in the enclosing code."""
  sizes = auto_axis_sizes()
  divided = (_divide(axis, size, sizes) for axis, size in zip(axes, shape, strict=True))
  ways = (math.prod(sizes[name] for name in names or ()) for names in divided)
  return tuple(size // by for size, by in zip(shape, ways, strict=True))


def gathered(parameter: jax.Array, axes: LogicalAxes) -> jax.Array:
  """Gathers a parameter for use: along `embed`, which fsdp shards only for storage.

  The constraint is explicit because the compiler may otherwise move activations instead of
  parameters. The gradient is constrained to the parameter's stored sharding, so that it can be
  reduce-scattered. (By default the gradient of a constraint has the same constraint, and would be
  all-reduced.)
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
