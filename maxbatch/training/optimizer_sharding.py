"""Where the optimizer's state lies: divided over the devices as the parameters it belongs to are.

A leaf of the state belongs to the parameter whose path stands in its own, and each of its dims of
a size that the parameter has too is divided as that dim of the parameter is: moments of the
parameter's shape, Adafactor's rows and columns, which lack a dim, Shampoo's square matrices.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from maxbatch.errors import UserError
from maxbatch.hardware.sharding import LogicalAxes, sharding

Path = tuple[str, ...]

_LARGEST_SHARE = 0.01
"""Share of its parameter's bytes that a leaf may have and still be whole on every device."""
_ALWAYS_ALLOWED_BYTES = 2**16
"""Bytes of counters, coefficients and small models."""


def parameter_of(path: Sequence[Any], parameters: Collection[Path]) -> Path | None:
  """Returns the path of the parameter that a leaf of the state belongs to; None if there is none.

  Args:
    path: jax's path of the leaf, whose keys of dictionaries count.
    parameters: paths of all parameters.
  """
  names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
  for length in range(len(names), 0, -1):
    for start in range(len(names) - length + 1):
      if names[start : start + length] in parameters:
        return names[start : start + length]
  return None


def shared_axes(shape: Sequence[int], of: Sequence[int], axes: LogicalAxes) -> LogicalAxes:
  """Returns the logical axes of a leaf's dims: those of the parameter's dims of the same sizes.

  Args:
    shape: of the leaf.
    of: the parameter's shape.
    axes: the parameter's logical axes. Each names one dim of the leaf at most, in the parameter's
      order where sizes leave a choice.
  """
  left, last, names = list(range(len(of))), -1, []
  for size in shape:
    same = [dim for dim in left if of[dim] == size]
    if not same:
      names.append(None)
      continue
    last = next((dim for dim in same if dim > last), same[0])
    left.remove(last)
    names.append(axes[last])
  return tuple(names)


def place_optimizer_state(
  state: Any, params: Any, axes: Mapping[Path, LogicalAxes], mesh: Mesh
) -> Any:
  """Returns shape, dtype and sharding of every leaf of the optimizer's state.

  Args:
    state: shapes of the state.
    params: shapes of the parameters that train.
    axes: logical axes of every parameter by its path.
    mesh: the devices.

  Raises:
    UserError: the parameters are divided, but a large leaf has no dim by which it could be.
  """
  shapes = {
    tuple(entry.key for entry in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  divided = {
    path: leaf
    for path, leaf in shapes.items()
    if not sharding(axes[path], leaf.shape, mesh).is_fully_replicated
  }

  def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    owner, names = parameter_of(path, shapes), (None,) * leaf.ndim
    if owner:
      names = shared_axes(leaf.shape, shapes[owner].shape, axes[owner])
    where = sharding(names, leaf.shape, mesh)
    if where.is_fully_replicated:
      _check_size(path, leaf, owner, divided)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  return jax.tree_util.tree_map_with_path(place, state)


def _check_size(
  path: Sequence[Any], leaf: Any, owner: Path | None, divided: Mapping[Path, Any]
) -> None:
  """Refuses a leaf that every device would hold whole, unless it is small beside its parameter, or
  that one is whole on every device too."""
  owners = [shape for name, shape in divided.items() if owner in (name, None)]
  size, largest = _bytes(leaf), _LARGEST_SHARE * sum(map(_bytes, owners))
  if not owners or size <= max(largest, _ALWAYS_ALLOWED_BYTES):
    return
  reason = (
    f"of the dims of {'/'.join(owner)}, {owners[0].shape}, that the mesh divides it has none"
    if owner
    else "its path does not end with a parameter's"
  )
  raise UserError(
    f"optimizer state {jax.tree_util.keystr(tuple(path), simple=True, separator='/')} of shape "
    f"{leaf.shape}: {reason}, so every device would hold all of its {size / 2**20:,.1f} MiB. State of "
    f"more than {_LARGEST_SHARE:.0%} of its parameter must be divided as the parameter is: keep it in a "
    "tree like the parameters', with dims of theirs, or use ici_fsdp_parallelism=1 "
    "ici_tensor_parallelism=1"
  )


def _bytes(leaf: Any) -> int:
  return leaf.size * leaf.dtype.itemsize
