"""Sums that each device forms over what it holds, to be joined once at the end of a step.

A reduction over an array that the mesh divides costs a message between devices, however small its
result. A step counts many numbers (loss, tokens, squared norms of many gradients): kept in parts,
as arrays (…, F, S) with an entry per device along the mesh axes, they all share one message.

F devices along fsdp, expert and context, which divide weights and tokens, S along tensor.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxbatch.core.terms import Max
from maxbatch.core.topology import WEIGHT_AXES
from maxbatch.hardware.sharding import (
  LogicalAxes,
  auto_axis_sizes,
  auto_weight_groups,
  constrain,
  dividing_axes,
)

Tree = TypeVar("Tree")
Other = TypeVar("Other")

_AXES = (*WEIGHT_AXES, "tensor")
PARTS: LogicalAxes = ("fsdp_part", "tensor_part")
"""The logical axes of the dims (F, S)."""


def of_rows(x: jax.Array) -> jax.Array:
  """Sums over the rows of a batch: (…, B, S or 1) → (…, F, S)."""
  sharing, (*lead, B, shards) = auto_axis_sizes()["context"], x.shape
  groups = auto_weight_groups() // sharing
  ways = groups if B % groups == 0 else 1
  summed = x.reshape(*lead, ways, B // ways, 1, shards).sum(-3)
  padded = _padded_to(summed, (groups, sharing, _shards()))
  return padded.reshape(*lead, groups * sharing, _shards())


def of_parts(x_F: jax.Array) -> jax.Array:
  """Spreads sums of each device's own tokens, as `over_rows` returns them: (F,) → (F, S)."""
  return _padded_to(x_F[:, None], (auto_weight_groups(), _shards()))


def of_one(x: jax.Array) -> jax.Array:
  """Spreads a sum that all devices have already: (…) → (…, F, S)."""
  return _padded_to(x[..., None, None], (auto_weight_groups(), _shards()))


class Form(NamedTuple):
  """How sums are kept until the end of a step: in parts, or each as one number."""

  of_rows: Callable[[jax.Array], jax.Array]
  """Of an array (B, 1), by row."""
  of_parts: Callable[[jax.Array], jax.Array]
  """Of an array (F,), by what `over_rows` returns."""
  of_one: Callable[[jax.Array], jax.Array]
  """Of a scalar that all devices have."""


IN_PARTS, AT_ONCE = Form(of_rows, of_parts, of_one), Form(jnp.sum, jnp.sum, jnp.asarray)


def of_squares(x: jax.Array, axes: LogicalAxes, lead: int = 0) -> jax.Array:
  """Sums squares in float32 over all but the first `lead` dims: (*lead, …) → (*lead, F, S).

  Args:
    x: a parameter's gradient, laid out as the table of logical axes says.
    axes: the logical axes of its dims, the leading ones included.
    lead: dims that are kept.
  """
  kept, rest = x.shape[:lead], x.shape[lead:]
  sizes = {name: size for name, size in auto_axis_sizes().items() if name in _AXES}
  divided = dividing_axes(axes, x.shape, sizes | {"stage": 1})[lead:]
  ways = [[sizes[name] for name in names or ()] for names in divided]
  split = [
    part for size, by in zip(rest, ways, strict=True) for part in (*by, size // math.prod(by))
  ]
  squared = jnp.square(x.astype(jnp.float32)).reshape(*kept, *split)
  ends = itertools.accumulate(len(by) + 1 for by in ways)
  summed = squared.sum(tuple(lead + end - 1 for end in ends))
  order = [name for names in divided for name in names or ()]
  summed = summed.transpose(
    *range(lead), *(lead + order.index(name) for name in _AXES if name in order)
  ).reshape(*kept, *(sizes[name] if name in order else 1 for name in _AXES))
  return _padded(summed)


def in_one(tree: Tree, of_all: Callable[[jax.Array], jax.Array]) -> Tree:
  """Returns what `of_all` makes of all leaves (…, F, S) of a tree, as one array (N, F, S)."""
  leaves, structure = jax.tree.flatten(tree)
  lead = [leaf.shape[:-2] for leaf in leaves]
  sizes = [math.prod(shape) for shape in lead]
  x = of_all(jnp.concatenate([leaf.reshape(-1, *leaf.shape[-2:]) for leaf in leaves]))
  pieces = jnp.split(x, list(itertools.accumulate(sizes[:-1])))
  whole = (piece.reshape(*shape, *x.shape[1:]) for piece, shape in zip(pieces, lead, strict=True))
  return jax.tree.unflatten(structure, whole)


def joined(tree: Tree) -> Tree:
  """Sums over all parts, in one message: leaves (…, F, S) → (…)."""
  return in_one(tree, lambda x: constrain(x, (None, *PARTS)).sum((-1, -2)))


def joined_sums(sums: Tree, others: Other) -> tuple[Tree, Other]:
  """Returns what `joined` makes of the float sums in `sums` and of all in `others`, in one message.

  A `Max`, integers and scalars are never in parts.
  """
  leaves, structure = jax.tree.flatten(sums, is_leaf=lambda x: isinstance(x, Max))
  is_whole = [
    isinstance(x, Max) or x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating) for x in leaves
  ]
  parts = [x for x, whole in zip(leaves, is_whole, strict=True) if not whole]
  parts, others = joined((parts, others))
  rest = iter(parts)
  return jax.tree.unflatten(
    structure, [x if whole else next(rest) for x, whole in zip(leaves, is_whole, strict=True)]
  ), others


def _padded(x: jax.Array) -> jax.Array:
  """Pads an array whose last dims are the mesh axes, or 1 of each: (…, each) → (…, F, S)."""
  sizes = auto_axis_sizes()
  whole = _padded_to(x, tuple(sizes[name] for name in _AXES))
  return whole.reshape(*x.shape[: -len(_AXES)], auto_weight_groups(), _shards())


def _padded_to(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
  """Pads the last dims: what a device holds for all counts as the first's."""
  missing = (size - now for size, now in zip(sizes, x.shape[-len(sizes) :], strict=True))
  return jnp.pad(x, [(0, 0)] * (x.ndim - len(sizes)) + [(0, each) for each in missing])


def _shards() -> int:
  return auto_axis_sizes()["tensor"]
