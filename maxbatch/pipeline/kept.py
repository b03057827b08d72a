"""What differentiation of a stage's layers would keep: shapes, and how devices divide them.

R rows of a microbatch, T tokens, D width of the residual stream.

The arrays come out of the model's inside, where nothing names their dims. Which of them fsdp or
tensor divides is found by computing the shapes again with twice the rows, and with twice the heads
and twice the width of the feed-forward layer: the dims that have become larger are it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxbatch.pipeline.parts import Leaves, Parts, divided
from maxbatch.rows import Rows
from maxbatch.sharding import LogicalAxes, local_shape, open_sizes


class Given(NamedTuple):
  """What a stage's layers of one repeat are given, or the shapes of it."""

  layers: Leaves
  """Their parameters, (layers, …)."""
  x_RTD: jax.Array
  """Their input."""
  rows: Rows
  """The microbatch."""
  first: jax.Array
  """int32: which layer of the model their first is."""


class Kept(NamedTuple):
  """One array that is kept of a microbatch."""

  shape: tuple[int, ...]
  dtype: np.dtype
  axes: LogicalAxes

  @property
  def local_bytes(self) -> int:
    """Bytes on one device, in the code around."""
    return math.prod(local_shape(self.axes, self.shape)) * self.dtype.itemsize


def linearized(
  parts: Parts, rest: Leaves, given: Given
) -> tuple[jax.Array, Callable[[jax.Array], tuple[Leaves, jax.Array]]]:
  """The layers' output, and the way back from its gradient to theirs and their input's."""

  def apply(layers: Leaves, x_RTD: jax.Array) -> jax.Array:
    return parts.apply_layers(layers, rest, x_RTD, given.rows, given.first)

  return jax.vjp(apply, given.layers, given.x_RTD)


def kept_leaves(
  parts: Parts, rest: Leaves, given: Given, places: Sequence[int | None]
) -> tuple[Kept, ...]:
  """Those leaves of the way back that have a place, in the order of the places."""

  def shapes(parts: Parts, rest: Leaves, given: Given) -> list[Any]:
    _, go_back = jax.eval_shape(lambda *some: linearized(parts, *some), rest, given)
    leaves = dict(zip(places, jax.tree.leaves(go_back), strict=True))
    return [leaves[place] for place in range(len(set(places) - {None}))]

  found, sizes = shapes(parts, rest, given), open_sizes()
  axes: list[LogicalAxes] = [(None,) * leaf.ndim for leaf in found]
  if sizes["tensor"] > 1:
    larger = shapes(*_with_more_heads(parts, given))
    axes = [_named("heads", *each) for each in zip(axes, found, larger, strict=True)]
  if sizes["fsdp"] > 1:
    larger = shapes(parts, rest, _with_more_rows(given))
    axes = [_named("batch", *each) for each in zip(axes, found, larger, strict=True)]
  return tuple(
    Kept(leaf.shape, np.dtype(leaf.dtype), names) for leaf, names in zip(found, axes, strict=True)
  )


def _named(name: str, axes: LogicalAxes, leaf: Any, larger: Any) -> LogicalAxes:
  """The axes with a name for the dims that have become larger."""
  dims = zip(axes, leaf.shape, larger.shape, strict=True)
  return tuple(axis if size == other else name for axis, size, other in dims)


def _with_more_rows(given: Given) -> Given:
  def twice(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

  return given._replace(x_RTD=twice(given.x_RTD), rows=jax.tree.map(twice, given.rows))


def _with_more_heads(parts: Parts, given: Given) -> tuple[Parts, Leaves, Given]:
  parts = parts.with_more_heads(given.x_RTD.shape[1])
  layers, rest = divided(parts.model, parts.model.shapes())
  few = {
    path: jax.ShapeDtypeStruct((given.layers[path].shape[0], *leaf.shape[1:]), leaf.dtype)
    for path, leaf in layers.items()
  }
  return parts, rest, given._replace(layers=few)
