"""What differentiation of a stage's layers would keep: shapes, and how devices divide them.

R rows of a microbatch, T tokens, D width of the residual stream.

The arrays come out of the model's inside, where nothing names their dims. So their shapes are
computed again with twice the rows and with twice the heads and feed-forward width: the dims that
grow are those that fsdp and tensor divide. What comes out of a shard_map inside the model, as around
a kernel, has the devices themselves in a dim, which is found by computing without tensor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import LogicalAxes, local_shape, open_sizes
from maxbatch.training.model_parts import Leaves, ModelParts, divided


class StageInput(NamedTuple):
  """What a stage's layers of one repeat are given, or the shapes of it."""

  layers: Leaves
  """Their parameters, (layers, …)."""
  x_RTD: jax.Array
  """Their input."""
  rows: Rows
  """The microbatch."""
  first: jax.Array
  """int32: which layer of the model their first is."""


class Residual(NamedTuple):
  """One array that is kept of a microbatch."""

  shape: tuple[int, ...]
  dtype: np.dtype
  axes: LogicalAxes

  @property
  def local_bytes(self) -> int:
    """Bytes on one device, in the code around."""
    return math.prod(local_shape(self.axes, self.shape)) * self.dtype.itemsize


def linearized(
  parts: ModelParts, rest: Leaves, given: StageInput
) -> tuple[jax.Array, Callable[[jax.Array], tuple[Leaves, jax.Array]]]:
  """The layers' output, and the way back from its gradient to theirs and their input's."""

  def apply(layers: Leaves, x_RTD: jax.Array) -> jax.Array:
    return parts.apply_layers(layers, rest, x_RTD, given.rows, given.first)

  return jax.vjp(apply, given.layers, given.x_RTD)


def residuals(
  parts: ModelParts, rest: Leaves, given: StageInput, places: Sequence[int | None]
) -> tuple[Residual, ...]:
  """Those leaves of the way back that have a place, in the order of the places."""
  leaves, sizes = _leaves(parts, rest, given), open_sizes()
  axes: list[LogicalAxes] = [(None,) * leaf.ndim for leaf in leaves]
  if sizes["tensor"] > 1:
    axes = _named("heads", axes, leaves, _leaves(*_with_more_heads(parts, given)))
  if sizes["fsdp"] > 1:
    axes = _named("batch", axes, leaves, _leaves(parts, rest, _with_more_rows(given)))
  if sizes["tensor"] > 1:
    with jax.sharding.use_abstract_mesh(_without_tensor()):
      whole = _leaves(parts, rest, given)
    axes = _named("device_part", axes, whole, leaves)
  found = dict(zip(places, zip(leaves, axes, strict=True), strict=True))
  kept = (found[place] for place in range(len(set(places) - {None})))
  return tuple(Residual(leaf.shape, np.dtype(leaf.dtype), names) for leaf, names in kept)


def _leaves(parts: ModelParts, rest: Leaves, given: StageInput) -> list[Any]:
  """Shapes of all leaves of the way back."""
  _, vjp_fn = jax.eval_shape(lambda *some: linearized(parts, *some), rest, given)
  return jax.tree.leaves(vjp_fn)


def _named(
  name: str, axes: list[LogicalAxes], before: Sequence[Any], after: Sequence[Any]
) -> list[LogicalAxes]:
  """The axes with a name for dims that grow and none for those that shrink.

  Of a model that keeps other arrays at another size nothing can be said: its dims stay whole.
  """
  if [leaf.ndim for leaf in before] != [leaf.ndim for leaf in after]:
    return axes

  def one(axes: LogicalAxes, shape: Sequence[int], other: Sequence[int]) -> LogicalAxes:
    dims = zip(axes, shape, other, strict=True)
    return tuple(name if b > a else None if b < a else axis for axis, a, b in dims)

  each = zip(axes, before, after, strict=True)
  return [one(names, leaf.shape, other.shape) for names, leaf, other in each]


def _with_more_rows(given: StageInput) -> StageInput:
  def twice(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

  return given._replace(x_RTD=twice(given.x_RTD), rows=jax.tree.map(twice, given.rows))


def _with_more_heads(parts: ModelParts, given: StageInput) -> tuple[ModelParts, Leaves, StageInput]:
  parts = parts.with_more_heads(given.x_RTD.shape[1])
  layers, rest = divided(parts.model, parts.model.shapes())
  few = {
    path: jax.ShapeDtypeStruct((given.layers[path].shape[0], *leaf.shape[1:]), leaf.dtype)
    for path, leaf in layers.items()
  }
  return parts, rest, given._replace(layers=few)


def _without_tensor() -> AbstractMesh:
  """As many devices, those along tensor among the stages: inside one all stages are alike."""
  mesh = jax.sharding.get_abstract_mesh()
  sizes = mesh.shape | {"tensor": 1, "stage": mesh.shape["stage"] * mesh.shape["tensor"]}
  return mesh.update(axis_sizes=tuple(sizes[name] for name in mesh.axis_names))
