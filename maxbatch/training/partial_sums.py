"""Sums that each device forms over what it holds, to be joined once at the end of a step.

A reduction over an array that the mesh divides costs a message between devices, however small its
result. A step counts many numbers (loss, tokens, squared norms of many gradients): kept in parts,
as arrays (…, F, S) with an entry per device along the mesh axes, they all share one message.

F devices along fsdp, S along tensor.
"""

import itertools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from maxbatch.core.terms import Max
from maxbatch.hardware.sharding import LOGICAL_AXIS_RULES, LogicalAxes, auto_axis_sizes, constrain

Tree = TypeVar("Tree")
Other = TypeVar("Other")

_AXES = ("fsdp", "tensor")


def of_rows(x: jax.Array) -> jax.Array:
  """Sums over the rows of a batch: (…, B, S or 1) → (…, F, S)."""
  F, (*lead, B, shards) = auto_axis_sizes()["fsdp"], x.shape
  ways = F if B % F == 0 else 1
  return _padded(x.reshape(*lead, ways, B // ways, shards).sum(-2))


def of_one(x: jax.Array) -> jax.Array:
  """Spreads a sum that all devices have already: (…) → (…, F, S)."""
  return _padded(x[..., None, None])


def of_squares(x: jax.Array, axes: LogicalAxes, lead: int = 0) -> jax.Array:
  """Sums squares in float32 over all but the first `lead` dims: (*lead, …) → (*lead, F, S).

  Args:
    x: a parameter's gradient, laid out as the table of logical axes says.
    axes: the logical axes of its dims, the leading ones included.
    lead: dims that are kept.
  """
  sizes, kept, rest = auto_axis_sizes(), x.shape[:lead], x.shape[lead:]
  # The mesh axis, of the two, that divides each logical one.
  names = [
    next((name for name in _AXES if name in LOGICAL_AXIS_RULES[axis]), None) for axis in axes[lead:]
  ]
  sized = zip(names, rest, strict=True)
  ways = [sizes[name] if name and size % sizes[name] == 0 else 1 for name, size in sized]
  split = [part for size, by in zip(rest, ways, strict=True) for part in (by, size // by)]
  squared = jnp.square(x.astype(jnp.float32)).reshape(*kept, *split)
  summed = squared.sum(tuple(range(lead + 1, squared.ndim, 2)))
  dividing = {name: by for name, by in zip(names, ways, strict=True) if name and by > 1}
  summed = summed.reshape(*kept, *dividing.values())
  if list(dividing) == ["tensor", "fsdp"]:
    summed = summed.swapaxes(-1, -2)
  return _padded(summed.reshape(*kept, *(dividing.get(name, 1) for name in _AXES)))


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
  return in_one(tree, lambda x: constrain(x, (None, "fsdp_part", "tensor_part")).sum((-1, -2)))


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
  """Pads: what a device holds for all counts as the first's: (…, F or 1, S or 1) → (…, F, S)."""
  sizes = auto_axis_sizes()
  widths = [(0, sizes[name] - size) for name, size in zip(_AXES, x.shape[-2:], strict=True)]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + widths)
