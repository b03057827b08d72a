"""Residuals of a stage's layers: their shapes, and how devices divide them.

R rows of a microbatch, T tokens, D width of the residual stream.

Residuals are intermediate arrays of the model, whose dims have no logical names. To find the dims
that fsdp and tensor divide, the shapes are computed again with twice the rows and with twice the
heads and feed-forward width: those dims grow. An array from a shard_map inside the model, as around
a kernel, has a dim of the devices, which is found by computing the shapes without tensor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import LogicalAxes, auto_axis_sizes, local_shape
from maxbatch.training.model_parts import FlatParams, ModelParts, split_layers, trained


class StageInput(NamedTuple):
  """The input of a model chunk (a stage's layers of one repeat), or its shapes."""

  layers: FlatParams
  """The parameters of the layers, (layers, …)."""
  x_RTD: jax.Array
  """The input of the first of these layers."""
  rows: Rows
  """The microbatch."""
  first_layer: jax.Array
  """int32: the index in the model of the first of these layers."""


class Residual(NamedTuple):
  """One array that the stash keeps of a microbatch."""

  shape: tuple[int, ...]
  dtype: np.dtype
  axes: LogicalAxes

  @property
  def local_bytes(self) -> int:
    """Bytes on one device, with the mesh that is set where this is called."""
    return math.prod(local_shape(self.axes, self.shape)) * self.dtype.itemsize


def layers_vjp(
  parts: ModelParts, rest: FlatParams, stage_input: StageInput
) -> tuple[jax.Array, Callable[[jax.Array], tuple[FlatParams, jax.Array]]]:
  """The layers' output, and the vjp: from its gradient to those of the parameters that train and of
  the input."""

  def apply(layers: FlatParams, x_RTD: jax.Array) -> jax.Array:
    layers = stage_input.layers | layers
    return parts.apply_layers(layers, rest, x_RTD, stage_input.rows, stage_input.first_layer)

  return jax.vjp(apply, trained(parts.model, stage_input.layers), stage_input.x_RTD)


def stage_residuals(
  parts: ModelParts, rest: FlatParams, stage_input: StageInput, indices: Sequence[int | None]
) -> tuple[Residual, ...]:
  """The leaves of the vjp that have an index, in the order of the indices.

  Args:
    parts: the model.
    rest: parameters outside of the layers.
    stage_input: shapes of the input of a model chunk.
    indices: for each leaf of the vjp its index among the residuals, None if it is not kept.
  """
  leaves, sizes = _vjp_leaves(parts, rest, stage_input), auto_axis_sizes()
  axes: list[LogicalAxes] = [(None,) * leaf.ndim for leaf in leaves]
  if sizes["tensor"] > 1:
    axes = _name_changed_dims(
      "heads", axes, leaves, _vjp_leaves(*_with_twice_the_heads(parts, stage_input))
    )
  if sizes["fsdp"] > 1:
    axes = _name_changed_dims(
      "batch", axes, leaves, _vjp_leaves(parts, rest, _with_twice_the_rows(stage_input))
    )
  if sizes["tensor"] > 1:
    with jax.sharding.use_abstract_mesh(_mesh_without_tensor()):
      unsharded = _vjp_leaves(parts, rest, stage_input)
    axes = _name_changed_dims("device_part", axes, unsharded, leaves)
  by_index = dict(zip(indices, zip(leaves, axes, strict=True), strict=True))
  chosen = (by_index[index] for index in range(len(set(indices) - {None})))
  return tuple(Residual(leaf.shape, np.dtype(leaf.dtype), names) for leaf, names in chosen)


def _vjp_leaves(parts: ModelParts, rest: FlatParams, stage_input: StageInput) -> list[Any]:
  """Shapes of all leaves of the vjp."""
  _, vjp_fn = jax.eval_shape(lambda *some: layers_vjp(parts, *some), rest, stage_input)
  return jax.tree.leaves(vjp_fn)


def _name_changed_dims(
  name: str, axes: list[LogicalAxes], before: Sequence[Any], after: Sequence[Any]
) -> list[LogicalAxes]:
  """The axes, with `name` for dims that grow and None for dims that shrink.

  If the model has different residuals at the other size, the axes stay as they are: not divided.
  """
  if [leaf.ndim for leaf in before] != [leaf.ndim for leaf in after]:
    return axes

  def rename(axes: LogicalAxes, shape: Sequence[int], other: Sequence[int]) -> LogicalAxes:
    dims = zip(axes, shape, other, strict=True)
    return tuple(name if b > a else None if b < a else axis for axis, a, b in dims)

  each = zip(axes, before, after, strict=True)
  return [rename(names, leaf.shape, other.shape) for names, leaf, other in each]


def _with_twice_the_rows(stage_input: StageInput) -> StageInput:
  def twice(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

  return stage_input._replace(
    x_RTD=twice(stage_input.x_RTD), rows=jax.tree.map(twice, stage_input.rows)
  )


def _with_twice_the_heads(
  parts: ModelParts, stage_input: StageInput
) -> tuple[ModelParts, FlatParams, StageInput]:
  parts = parts.with_twice_the_heads(stage_input.x_RTD.shape[1])
  layers, rest = split_layers(parts.model, parts.model.shapes())
  shapes = {
    path: jax.ShapeDtypeStruct((stage_input.layers[path].shape[0], *leaf.shape[1:]), leaf.dtype)
    for path, leaf in layers.items()
  }
  return parts, rest, stage_input._replace(layers=shapes)


def _mesh_without_tensor() -> AbstractMesh:
  """The mesh with tensor=1 and as many devices, the others as stages: shapes do not depend on those."""
  mesh = jax.sharding.get_abstract_mesh()
  sizes = mesh.shape | {"tensor": 1, "stage": mesh.shape["stage"] * mesh.shape["tensor"]}
  return mesh.update(axis_sizes=tuple(sizes[name] for name in mesh.axis_names))
