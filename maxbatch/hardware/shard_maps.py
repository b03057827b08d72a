"""Code that each device runs for its own tokens, in shard_maps, where the compiler would shard it badly."""

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from maxbatch.core.topology import BATCH_AXES, WEIGHT_AXES
from maxbatch.hardware.sharding import (
  LOGICAL_AXIS_RULES,
  LogicalAxes,
  auto_axes_spec,
  auto_axis_sizes,
)

Result = TypeVar("Result")


def over_rows(
  function: Callable[..., Result],
  stored: jax.Array,
  axes: LogicalAxes,
  *rows: jax.Array,
  is_summed: bool = False,
) -> Result:
  """Runs `function(whole parameter, *rows)` on each device for its own rows, or its tokens of them:
  (B, …) → one or more arrays (B, …).

  For code that the compiler would shard badly over fsdp: gathers, for which it moves rows between
  devices, and sums over tokens in a loop, which it all-reduces in every iteration. Here the
  parameter is all-gathered once before, and its gradient reduced once after.

  Args:
    function: of the whole parameter and one device's rows.
    stored: the parameter, in any sharding.
    axes: its logical axes.
    rows: arrays whose first dimension is the batch, and the second, if it is as long as that of the first
      array, the row's tokens.
    is_summed: whether it returns sums over its tokens, (1,) each: they come as (F,).
  """
  if not (names := _open_weight_axes()):
    return function(stored, *rows)
  place, dtype = _weight_spec(axes, stored.shape), stored.dtype
  if not any(place):
    # XLA's CPU compiler aborts on the all-reduce of its gradient in bfloat16.
    stored = stored.astype(jnp.float32)

  def local(part: jax.Array, *rows: jax.Array) -> Result:
    return function(_gathered_along(part, place).astype(dtype), *rows)

  return jax.shard_map(
    local,
    in_specs=(place, *_token_specs(rows)),
    out_specs=PartitionSpec(names) if is_summed else _token_specs(rows)[0],
    axis_names=set(names),
    check_vma=False,
  )(stored, *rows)


def has_columns(axes: LogicalAxes, shape: Sequence[int]) -> bool:
  """Returns whether the devices that divide weights divide the last dim of this table, and no other."""
  *others, last = _weight_spec(axes, shape)
  return bool(last) and _names(last) == _open_weight_axes() and not any(others)


def by_columns(
  function: Callable[[jax.Array, jax.Array], jax.Array],
  table_VD: jax.Array,
  axes: LogicalAxes,
  ids_BT: jax.Array,
) -> jax.Array:
  """Looks tokens up in a table whose columns devices divide, `has_columns`: (B, T) → (B, T, D).

  Each device looks up its columns of all devices' tokens, (own D) of a row, and sends every device those of
  its tokens. So neither the table is gathered nor its gradient reduced, which a device has for its columns.

  Args:
    function: from a table (V, own D) and tokens (n,) to their rows (n, own D).
  """
  names = _open_weight_axes()

  def local(part_VC: jax.Array, ids_BT: jax.Array) -> jax.Array:
    ids = jax.lax.all_gather(ids_BT.reshape(-1), names, tiled=True)
    rows = jax.lax.all_to_all(function(part_VC, ids), names, 0, 1, tiled=True)
    return rows.reshape(*ids_BT.shape, -1)

  return jax.shard_map(
    local,
    in_specs=(_weight_spec(axes, table_VD.shape), *_token_specs((ids_BT,))),
    out_specs=_token_specs((ids_BT,))[0],
    axis_names=set(names),
    check_vma=False,
  )(table_VD, ids_BT)


def divisible_heads(x_BSKH: jax.Array, num_query_heads: int, ways: int) -> jax.Array:
  """Repeats key/value heads until `ways` devices divide them, where they divide the query heads.

  Each device then holds just the heads its queries need: one, if K is less than `ways`.
  """
  K = x_BSKH.shape[2]
  repeats = math.lcm(K, ways) // K if num_query_heads % ways == 0 else 1
  return jnp.repeat(x_BSKH, repeats, axis=2) if repeats > 1 else x_BSKH


def by_device(
  function: Callable[..., tuple[jax.Array, Any, Any]],
  parameters: Mapping[str, tuple[jax.Array, LogicalAxes]],
  *rows: jax.Array,
  is_kernel: bool = False,
) -> tuple[jax.Array, Any, Any]:
  """Runs `function(parameters, *rows)` on each device for its own rows, tokens of them, experts, and part
  of a layer's width.

  For code that sorts and groups tokens, which the compiler would do for all devices' tokens at once.
  Parameters are gathered along fsdp before, and their gradients are reduced after.

  Args:
    function: from parameters by name and one device's rows to an array (B, T, …), which is summed over
      the devices that share the width, and two pytrees that are the same on these: of arrays (B, …), sums
      over the rows' tokens, and of arrays (B, T, …). It has a part of the experts where it has fewer than
      there are; `ring_gathered` and `ring_summed` are for these.
    parameters: with their logical axes, of which `mlp` is the width, and a leading `expert` that of
      arrays whose experts are divided.
    rows: arrays (B, T, …).
    is_kernel: whether it runs kernels, which the compiler divides along no axis: all that are left are then
      taken.
  """
  sizes, mesh = auto_axis_sizes(), jax.sharding.get_abstract_mesh()
  left = set(mesh.axis_names) - set(mesh.manual_axes) if is_kernel and mesh.size > 1 else set[str]()
  if rows[0].shape[0] % math.prod(sizes.get(name, 1) for name in BATCH_AXES):
    sizes = dict.fromkeys(sizes, 1)
  if rows[0].shape[1] % sizes["context"]:
    sizes["context"] = 1
  widths = [
    size
    for x, axes in parameters.values()
    for axis, size in zip(axes, x.shape, strict=True)
    if axis == "mlp"
  ]
  shares = 1 if any(width % sizes["tensor"] for width in widths) else sizes["tensor"]
  used = {name for name in (*BATCH_AXES, "context") if sizes.get(name, 1) > 1}
  used |= {"tensor"} if shares > 1 else set()
  if not used | left:
    return function({name: x for name, (x, _) in parameters.items()}, *rows)

  def place(x: jax.Array, axes: LogicalAxes) -> PartitionSpec:
    is_by_expert = axes[0] == "expert" and len(axes) > 1
    axes = axes if is_by_expert else tuple(None if axis == "expert" else axis for axis in axes)
    return _only(used, auto_axes_spec(axes, x.shape))

  places = {name: place(*parameter) for name, parameter in parameters.items()}
  dtypes = {name: x.dtype for name, (x, _) in parameters.items()}

  def sent(name: str) -> jax.Array:
    # XLA's CPU compiler aborts on the all-reduce of a gradient in bfloat16.
    x = parameters[name][0]
    divided = {name for names in places[name] for name in _names(names)}
    return x.astype(jnp.float32) if used - {"data"} - divided else x

  def local(parts: dict[str, jax.Array], *rows: jax.Array) -> tuple[jax.Array, Any, Any]:
    whole = {
      name: _gathered_along(part, _whole_experts(places[name], parameters[name][1]))
      for name, part in parts.items()
    }
    given = {name: x.astype(dtypes[name]) for name, x in whole.items()}
    part, sums, of_tokens = function(given, *(x[0] for x in rows))
    return part[None], jax.tree.map(lambda x: x[:, None], sums), of_tokens

  batch = tuple(name for name in BATCH_AXES if name in used) or None
  tokens = PartitionSpec(batch, "context" if "context" in used else None)
  by_share = PartitionSpec("tensor" if shares > 1 else None, *tokens)
  # A copy for each share: so their gradients are summed out here, in whatever format they are.
  copies = [jnp.broadcast_to(x[None], (shares, *x.shape)) for x in rows]
  parts_, sums, of_tokens = jax.shard_map(
    local,
    in_specs=(places, *(by_share for _ in rows)),
    out_specs=(by_share, tokens, tokens),
    axis_names=used | left,
    check_vma=False,
  )({name: sent(name) for name in parameters}, *copies)
  return parts_.sum(0), jax.tree.map(lambda x: x.sum(1, dtype=x.dtype), sums), of_tokens


def _whole_experts(place: PartitionSpec, axes: LogicalAxes) -> PartitionSpec:
  """Returns along which dims a device's experts, or what all of them share, are gathered."""
  return PartitionSpec(
    *(names if axis == "embed" else None for names, axis in zip(place, axes, strict=True))
  )


def ring_gathered(x: jax.Array) -> jax.Array:
  """Gathers arrays (B, …) of the devices that divide experts; the gradient is reduce-scattered."""
  return _all_parts(x, 0, ("expert",))


def ring_summed(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Sums arrays (B, …) over the devices that divide experts, each of which keeps its own rows; the
  gradient, which the caller has in `dtype`, is gathered in it."""
  return _ring_summed(x, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _ring_summed(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  del dtype
  return jax.lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)


_ring_summed.defvjp(
  lambda x, dtype: (_ring_summed(x, dtype), None),
  lambda dtype, _, gradient: (ring_gathered(gradient.astype(dtype)).astype(gradient.dtype),),
)


def to_own_tokens(x: jax.Array) -> jax.Array:
  """Sums arrays (n, …) over the devices that share rows, each of which keeps its own part of n."""
  return _summed(x, 0, ("context",))


def _gathered_along(part: jax.Array, place: PartitionSpec) -> jax.Array:
  """Gathers the parts of an array that only one dim, if any, is divided along."""
  for dim, names in enumerate(place):
    if names:
      return _all_parts(part, dim, _names(names))
  return part


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_parts(part: jax.Array, dim: int, names: tuple[str, ...]) -> jax.Array:
  """Gathers the parts over mesh axes along `dim`; the gradient is reduce-scattered."""
  return jax.lax.all_gather(part, names, axis=dim, tiled=True)


def _summed(x: jax.Array, dim: int | None, names: tuple[str, ...]) -> jax.Array:
  """Sums over mesh axes: reduce-scattered along `dim`, or all-reduced if it is None."""

  def plainly(x: jax.Array) -> jax.Array:
    if dim is None:
      return jax.lax.psum(x, names)
    return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)

  def in_float32(x: jax.Array) -> jax.Array:
    return plainly(x.astype(jnp.float32)).astype(x.dtype)

  # XLA's CPU compiler sums bfloat16 in float32, but aborts on sums that come from a shard_map.
  return jax.lax.platform_dependent(x, cpu=in_float32, default=plainly)


_all_parts.defvjp(
  lambda part, dim, names: (_all_parts(part, dim, names), None),
  lambda dim, names, _, gradient: (_summed(gradient, dim, names),),
)


def sum_over_rows(
  function: Callable[..., tuple[jax.Array, jax.Array]],
  axes: LogicalAxes,
  shape: Sequence[int],
  *rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Runs `function(*rows)` on each device for its own rows, or its tokens of them, and sums its first
  result over fsdp, the second over the devices that share a row.

  Args:
    function: from one device's rows, arrays whose first dimensions are the batch and the tokens, to a sum
      over them and an array (B, …) of sums over each row's tokens.
    axes: logical axes of the sum, which is returned in the table's sharding.
    shape: of the sum.
    rows: the rows of all devices.
  """
  if not (names := _open_weight_axes()):
    return function(*rows)
  place = _weight_spec(axes, shape)
  dim = next((dim for dim, each in enumerate(place) if each), None)

  def local(*rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    total, of_each = function(*rows)
    return _summed(total, dim, names), summed_over_tokens(of_each)

  return jax.shard_map(
    local,
    in_specs=_token_specs(rows),
    out_specs=(place, _row_spec()),
    axis_names=set(names),
    check_vma=False,
  )(*rows)


def sums_of_rows(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
  """Runs `function(*rows)` → (B, …), sums over each row's tokens, as `sum_over_rows` does."""
  if not (names := _open_weight_axes()):
    return function(*rows)
  return jax.shard_map(
    lambda *rows: summed_over_tokens(function(*rows)),
    in_specs=_token_specs(rows),
    out_specs=_row_spec(),
    axis_names=set(names),
    check_vma=False,
  )(*rows)


def of_own_tokens(
  kernel: Callable[..., tuple[jax.Array, ...]], x: jax.Array, *shared: jax.Array
) -> tuple[jax.Array, ...]:
  """Runs a kernel, which the compiler divides along no axis, on each device for its own tokens: (B, T, …), of
  which no axis divides the other dims, and what all tokens share → arrays (B, T, …)."""
  mesh = jax.sharding.get_abstract_mesh()
  left = set(mesh.axis_names) - set(mesh.manual_axes)
  if mesh.size == 1 or not left:
    return kernel(x, *shared)
  tokens = auto_axes_spec(("batch", "length"), x.shape[:2])
  return jax.shard_map(
    kernel,
    in_specs=(tokens, *(PartitionSpec() for _ in shared)),
    out_specs=tokens,
    axis_names=left,
    check_vma=False,
  )(x, *shared)


def _sharing_devices() -> int:
  """Returns the devices that share the tokens of a row with this one, inside of a shard_map."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.shape["context"] if "context" in mesh.manual_axes else 1


def summed_over_tokens(x: jax.Array) -> jax.Array:
  """Sums over the devices that share a row's tokens, inside of a shard_map."""
  return x if _sharing_devices() == 1 else jax.lax.psum(x, "context")


def all_tokens(x_BTD: jax.Array) -> jax.Array:
  """Gathers rows whose tokens devices share, inside of a shard_map: (B, own T, …) → (B, T, …)."""
  return x_BTD if _sharing_devices() == 1 else _all_parts(x_BTD, 1, ("context",))


def tokens_by_width(x_BTD: jax.Array) -> jax.Array:
  """Gives each device that shares a row all of its tokens, and a part of their width, which is filled up
  with zeros, inside of a shard_map: (B, own T, D) → (B, T, own D)."""
  if (sharing := _sharing_devices()) == 1:
    return x_BTD
  filled = jnp.pad(x_BTD, ((0, 0), (0, 0), (0, -x_BTD.shape[2] % sharing)))
  return jax.lax.all_to_all(filled, "context", split_axis=2, concat_axis=1, tiled=True)


def summed_part(x: jax.Array, axes: LogicalAxes) -> jax.Array:
  """Sums over the devices that share a row's tokens, of which each keeps a part, inside of a shard_map: the
  squares of all parts add up to those of the sum."""
  if (sharing := _sharing_devices()) == 1:
    return x
  for dim, (axis, size) in enumerate(zip(axes, x.shape, strict=True)):
    if "tensor" not in LOGICAL_AXIS_RULES[axis] and size % sharing == 0:
      return jax.lax.psum_scatter(x, "context", scatter_dimension=dim, tiled=True)
  return jax.lax.psum(x, "context") / math.sqrt(sharing)


def _open_weight_axes() -> tuple[str, ...]:
  """Returns the mesh axes that divide weights, with devices, and that no shard_map has taken."""
  sizes = auto_axis_sizes()
  return tuple(name for name in WEIGHT_AXES if sizes[name] > 1)


def _row_spec() -> PartitionSpec:
  """Returns the PartitionSpec of an array (B, …) over the axes that divide weights and rows."""
  return PartitionSpec(tuple(name for name in _open_weight_axes() if name in BATCH_AXES) or None)


def _token_specs(rows: Sequence[jax.Array]) -> tuple[PartitionSpec, ...]:
  """Returns the PartitionSpecs of arrays (B, …) over the axes that divide weights: `context` divides the
  second dim of those that have there as many tokens as the first array."""
  size = auto_axis_sizes()["context"]
  length = rows[0].shape[1] if size > 1 and rows[0].ndim > 1 else 0
  by_token = PartitionSpec(*_row_spec(), "context")
  is_divided = (length and length % size == 0 and x.ndim > 1 and x.shape[1] == length for x in rows)
  return tuple(by_token if each else _row_spec() for each in is_divided)


def _weight_spec(axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
  """Returns the PartitionSpec of an array over the axes that divide weights alone."""
  return _only(_open_weight_axes(), auto_axes_spec(axes, shape))


def _only(kept: Container[str], place: PartitionSpec) -> PartitionSpec:
  """Returns the spec with some of its mesh axes alone."""
  return PartitionSpec(
    *(tuple(name for name in _names(names) if name in kept) or None for names in place)
  )


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """Returns the mesh axes in an entry of a PartitionSpec, which holds a single one as a string."""
  return (entry,) if isinstance(entry, str) else entry or ()
