"""Sharding: one table of rules maps logical axes to mesh axes, for parameters and activations.

A dimension that the devices do not divide evenly is replicated, and reported.
"""

import contextlib
import functools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxbatch.core.topology import (
  AXES,
  AXIS_NAMES,
  BATCH_AXES,
  WEIGHT_AXES,
  Topology,
  weight_groups,
)
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device

LogicalAxes = tuple[str | None, ...]

_LARGE_BYTES = 64 * 2**20
"""Of a gathered matrix on a TPU: half of the vector memory of a core. With attention's of 34 MB in main memory, too, a
step of Llama-2-7B took 3% longer."""
_FEW_TOKENS = 8192
"""Of a device: products with twice as many read a matrix in main memory so often that a step took 3% longer."""

MESH_AXES = tuple(axis.name for axis in sorted(AXES, key=lambda axis: axis.depth))
"""In the order in which shard_maps take them, the outer before the inner."""
_OPTIONAL_AXES = {axis.name for axis in AXES if axis.is_optional}

LOGICAL_AXIS_RULES: dict[str | None, tuple[str, ...]] = {
  "batch": BATCH_AXES,
  "layers": ("stage",),
  "embed": WEIGHT_AXES,
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "heads_of_rows": ("tensor", "context"),
  "mlp": ("tensor",),
  "expert": ("expert",),
  "head_dim": (),
  "length": ("context",),
  "position": (),
  "activation_embed": (),
  "fsdp_part": WEIGHT_AXES,
  "tensor_part": ("tensor",),
  "device_part": (*WEIGHT_AXES, "tensor"),
  None: (),
}


def mesh_axes(topology: Topology) -> tuple[str, ...]:
  """Returns the axes of its mesh, in the order of the table's depths."""
  return tuple(name for name in MESH_AXES if name in topology.shape)


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
  names = mesh_axes(topology)
  array = np.transpose(array, [list(topology.shape).index(name) for name in names])
  return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


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
  dims = len(topology.shape)
  interleaved = slices.transpose([at + part for at in range(dims) for part in (0, dims)])
  return interleaved.reshape(tuple(topology.shape.values()))


def num_processes(mesh: Mesh) -> int:
  """Returns how many processes the devices belong to."""
  return len({device.process_index for device in mesh.devices.flat})


def spec(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
  """Returns the PartitionSpec of an array of `shape` with logical axes `axes`."""
  if len(axes) != len(shape):
    raise ValueError(f"axes {axes} do not name the dimensions of shape {tuple(shape)}")
  return PartitionSpec(*dividing_axes(axes, shape, mesh.shape))


def dividing_axes(
  axes: LogicalAxes, shape: Sequence[int], sizes: Mapping[str, int]
) -> list[tuple[str, ...] | None]:
  """Returns the mesh axes, of these sizes, that divide each dim; None: none does.

  A mesh axis divides the first dim that it can: of experts' matrices `expert` divides the experts.
  """
  results, taken = [], set()
  for axis, size in zip(axes, shape, strict=True):
    names = _mesh_axes(axis, sizes, taken)
    ways = math.prod(sizes.get(name, 1) for name in names)
    divides = ways > 1 and size % ways == 0
    results.append(names if divides else None)
    taken |= set(names) if divides else set()
  return results


def _mesh_axes(
  axis: str | None, sizes: Mapping[str, int], taken: Container[str]
) -> tuple[str, ...]:
  """Returns the mesh axes of a logical one that are there and not taken."""
  return tuple(
    name
    for name in LOGICAL_AXIS_RULES[axis]
    if name not in taken and (name not in _OPTIONAL_AXES or sizes.get(name, 1) > 1)
  )


def sharding(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
  """Returns the NamedSharding of an array of `shape` with logical axes `axes`."""
  return NamedSharding(mesh, spec(axes, shape, mesh))


def with_data(place: NamedSharding, shape: Sequence[int]) -> NamedSharding:
  """Returns the sharding divided over `data` too: along the first dim that no other axis divides, or else
  inside of another's parts; as it is where `data` divides no dim evenly."""
  ways, names = place.mesh.shape["data"], [*place.spec, *(None,) * (len(shape) - len(place.spec))]
  fitting = [dim for dim, size in enumerate(place.shard_shape(tuple(shape))) if size % ways == 0]
  if ways == 1 or not fitting:
    return place
  dim = min(fitting, key=lambda dim: names[dim] is not None)
  others = (names[dim],) if isinstance(names[dim], str) else names[dim] or ()
  names[dim] = (*others, "data") if others else "data"
  return NamedSharding(place.mesh, PartitionSpec(*names))


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
  problems, taken = [], set()
  for axis, size in zip(axes, shape, strict=True):
    names = _mesh_axes(axis, mesh.shape, taken)
    ways = math.prod(mesh.shape[name] for name in names)
    if size % ways:
      problems.append(
        f"{axis} {size} is not a multiple of {' × '.join(names)} = {ways}: replicated"
      )
    elif ways > 1:
      taken |= set(names)
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


def auto_axes_spec(axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
  """Returns the spec for the mesh of the enclosing code.

  Inside a shard_map its manual axes are left out: arrays are already local along them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  sizes = auto_axis_sizes()
  divided = dividing_axes(axes, shape, sizes)
  return PartitionSpec(*(_without(names, mesh.manual_axes) for names in divided))


def auto_weight_groups() -> int:
  """Returns the groups of devices with different tokens that share one copy of the weights, in the
  enclosing code."""
  return weight_groups(auto_axis_sizes())


def auto_axis_sizes() -> dict[str, int]:
  """Returns the devices along each automatic mesh axis; 1 for manual axes of a shard_map, or
  without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return {name: 1 if name in mesh.manual_axes else mesh.shape.get(name, 1) for name in AXIS_NAMES}


def local_shape(axes: LogicalAxes, shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the shape of one device's shard of an array, in the enclosing code."""
  sizes = auto_axis_sizes()
  divided = dividing_axes(axes, shape, sizes)
  ways = (math.prod(sizes[name] for name in names or ()) for names in divided)
  return tuple(size // by for size, by in zip(shape, ways, strict=True))


_tokens_of_device = jax.make_user_context(default_value=0)
"""In the microbatch that is traced here; 0: unknown."""


def read_by(
  tokens_BT: jax.Array | jax.ShapeDtypeStruct, mesh: Mesh
) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which parameters are gathered for these tokens of all devices, (…, B, T)."""
  shape = tokens_BT.shape[-2:]
  return _tokens_of_device(math.prod(sharding(("batch", "length"), shape, mesh).shard_shape(shape)))


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
  of_use = tuple(None if axis == "embed" else axis for axis in axes)
  stored, used = (math.prod(local_shape(each, parameter.shape)) for each in (axes, of_use))
  whole = constrain(parameter, of_use)
  item = parameter.dtype.itemsize
  is_large = used > stored and item <= 2 and used * item >= _LARGE_BYTES
  has_few_readers = 0 < _tokens_of_device.value <= _FEW_TOKENS and not is_piped()
  return _in_main_memory(whole) if is_large and has_few_readers and is_for("tpu") else whole


_gathered.defvjp(
  lambda parameter, axes: (_gathered(parameter, axes), None),
  lambda axes, _, gradient: (constrain(gradient, axes),),
)


def _in_main_memory(matrix: jax.Array) -> jax.Array:
  """Returns a matrix that the compiler for TPUs must not place in a core's vector memory.

  It gathers a matrix beside products. Where it gathers one of 90 MB to vector memory, it gives these products up
  to one and a half of their cycles: 3% of a step of Llama-2-7B on a v5e-256. Not in a pipeline's stage, whose step
  took 2% longer, nor in float32, where it took 24% longer.
  """
  with set_xla_metadata(_xla_buffer_placement="pinned_device"):
    # By the name that jax.device_put has for other memories in a compiled function; 2 is the form of its call.
    place = jax.ffi.ffi_call(
      "annotate_device_placement",
      jax.ShapeDtypeStruct(matrix.shape, matrix.dtype),
      vmap_method="broadcast_all",
      custom_call_api_version=2,
    )
    return place(matrix)


def is_piped() -> bool:
  """Returns whether what is traced here is a stage of a pipeline."""
  return jax.sharding.get_abstract_mesh().shape.get("stage", 1) > 1


def is_for(platform: str) -> bool:
  """Returns whether what is traced here is for devices of that platform; not without a mesh."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device is not None and device.platform == platform


def _without(axes: tuple[str, ...] | None, taken: Sequence[str]) -> tuple[str, ...] | None:
  left = tuple(axis for axis in axes or () if axis not in taken)
  return left or None
