"""What a stage keeps of a forward until its backward, beside its input (pipeline_saved_activations).

R rows of a microbatch, T tokens, D width of the residual stream.

- input: nothing more. The backward recomputes the stage's layers.
- residuals: the residuals of the vjp, as remat_policy decides, if they depend on the input. What
  depends on parameters or rows alone (casts, gathered copies, rotations, masks of dropout) is
  recomputed for the backward and takes up no slot.

Residuals are intermediate arrays of the model, whose dims have no logical names. To find the dims
that fsdp and tensor divide, the shapes are computed again with twice the rows and with twice the
heads and feed-forward width: those dims grow. An array from a shard_map inside the model, as around
a kernel, has a dim of the devices, which is found by computing the shapes without tensor.

"Stash" is PipeDream's word.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh

from maxbatch.core.topology import weight_groups
from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import LogicalAxes, auto_axis_sizes, local_shape
from maxbatch.models.layers import Outputs
from maxbatch.training.model_parts import FlatParams, ModelParts, split_layers, trained


class StageInput(NamedTuple):
  """The input of a model chunk (a stage's layers of one repeat), or its shapes."""

  layers: FlatParams
  x_RTD: jax.Array
  """The input of the first of these layers."""
  rows: Rows
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


class OutputGradients(NamedTuple):
  """Gradients of the objective by what layers hand out."""

  y_RTD: jax.Array
  numerators: dict[str, jax.Array]
  """Of the layers' own terms, float32 scalars."""


def layers_vjp(
  parts: ModelParts, rest: FlatParams, stage_input: StageInput
) -> tuple[Outputs, Callable[[OutputGradients], tuple[FlatParams, jax.Array]]]:
  """Returns the layers' outputs, and the vjp to gradients of trained parameters and input."""

  def apply(layers: FlatParams, x_RTD: jax.Array) -> tuple[OutputGradients, Outputs]:
    layers = stage_input.layers | layers
    rows, first = stage_input.rows, stage_input.first_layer
    outputs = parts.apply_layers(layers, rest, x_RTD, rows, first)
    numerators = {name: term.numerator for name, term in (outputs.terms or {}).items()}
    return OutputGradients(outputs.hidden_BTD, numerators), outputs

  trains = trained(parts.model, stage_input.layers)
  _, vjp_fn, outputs = jax.vjp(apply, trains, stage_input.x_RTD, has_aux=True)
  return outputs, vjp_fn


def stage_residuals(
  parts: ModelParts, rest: FlatParams, stage_input: StageInput, indices: Sequence[int | None]
) -> tuple[Residual, ...]:
  """Returns the leaves of the vjp that have an index among the residuals, in the order of the indices.

  None stands for a leaf that is not kept; `stage_input` are shapes.
  """
  leaves, sizes = _vjp_leaves(parts, rest, stage_input), auto_axis_sizes()
  axes: list[LogicalAxes] = [(None,) * leaf.ndim for leaf in leaves]
  if sizes["tensor"] > 1:
    twice = _vjp_leaves(*_with_twice_the_heads(parts, stage_input))
    axes = _name_changed_dims("heads", axes, leaves, twice)
  if weight_groups(sizes) > sizes["context"]:
    twice = _vjp_leaves(parts, rest, _with_twice(0, stage_input))
    axes = _name_changed_dims("batch", axes, leaves, twice)
  if sizes["context"] > 1:
    twice = _vjp_leaves(parts, rest, _with_twice(1, stage_input))
    axes = _name_changed_dims("length", axes, leaves, twice)
  if sizes["tensor"] * sizes["context"] > 1:
    with jax.sharding.use_abstract_mesh(_mesh_without("tensor", "context")):
      unsharded = _vjp_leaves(parts, rest, stage_input)
    axes = _name_changed_dims("device_part", axes, unsharded, leaves)
  by_index = dict(zip(indices, zip(leaves, axes, strict=True), strict=True))
  chosen = (by_index[index] for index in range(len(set(indices) - {None})))
  return tuple(Residual(leaf.shape, np.dtype(leaf.dtype), names) for leaf, names in chosen)


def _vjp_leaves(parts: ModelParts, rest: FlatParams, stage_input: StageInput) -> list[Any]:
  """Returns shapes of all leaves of the vjp."""
  _, vjp_fn = jax.eval_shape(lambda *some: layers_vjp(parts, *some), rest, stage_input)
  return jax.tree.leaves(vjp_fn)


def _name_changed_dims(
  name: str, axes: list[LogicalAxes], before: Sequence[Any], after: Sequence[Any]
) -> list[LogicalAxes]:
  """Returns the axes, with `name` for dims that grow and None for dims that shrink.

  If the model has different residuals at the other size, the axes stay as they are: not divided.
  """
  if [leaf.ndim for leaf in before] != [leaf.ndim for leaf in after]:
    return axes

  def rename(axes: LogicalAxes, shape: Sequence[int], other: Sequence[int]) -> LogicalAxes:
    dims = zip(axes, shape, other, strict=True)
    return tuple(name if b > a else None if b < a else axis for axis, a, b in dims)

  each = zip(axes, before, after, strict=True)
  return [rename(names, leaf.shape, other.shape) for names, leaf, other in each]


def _with_twice(dim: int, stage_input: StageInput) -> StageInput:
  """Returns shapes of twice the rows (dim 0) or their tokens (dim 1)."""

  def twice(x: Any) -> jax.ShapeDtypeStruct:
    shape = tuple(2 * size if at == dim else size for at, size in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)

  rows = jax.tree.map(twice, stage_input.rows)
  return stage_input._replace(x_RTD=twice(stage_input.x_RTD), rows=rows)


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


def _mesh_without(*names: str) -> AbstractMesh:
  """Returns the mesh without these axes, their devices as stages: shapes do not depend on those."""
  mesh = jax.sharding.get_abstract_mesh()
  there = [name for name in names if name in mesh.shape]
  ways = math.prod(mesh.shape[name] for name in there)
  sizes = mesh.shape | dict.fromkeys(there, 1) | {"stage": mesh.shape["stage"] * ways}
  return mesh.update(axis_sizes=tuple(sizes[name] for name in mesh.axis_names))


Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class InputStash:
  """Keeps no residuals; the input itself is in the buffers of tick.py."""

  parts: ModelParts
  rest: FlatParams
  residuals: tuple[Residual, ...] = ()

  def forward(self, stage_input: StageInput) -> tuple[Outputs, Arrays]:
    """Returns the outputs, without residuals."""
    rows, first = stage_input.rows, stage_input.first_layer
    return self.parts.apply_layers(
      stage_input.layers, self.rest, stage_input.x_RTD, rows, first
    ), ()

  def backward(
    self, stage_input: StageInput, arrays: Arrays, gradients: OutputGradients
  ) -> tuple[FlatParams, jax.Array]:
    """Recomputes the layers, then runs their vjp."""
    del arrays
    _, vjp_fn = layers_vjp(self.parts, self.rest, stage_input)
    return vjp_fn(gradients)


@dataclasses.dataclass(frozen=True)
class ResidualStash:
  """Keeps the residuals that depend on the input.

  Attributes:
    forward_fn: from the leaves of a StageInput to those of the outputs and of the vjp.
    outputs: the tree structure of the outputs.
    recompute_fn: from the leaves of a StageInput to the leaves of the vjp that are recomputed.
    vjp_fn: the tree structure of the vjp, which is a function and a tree of arrays.
    residual_indices: for each leaf of the vjp its index in `residuals`; None if recomputed.
    residuals: what is kept of one microbatch.
  """

  forward_fn: Callable[..., Sequence[jax.Array]]
  outputs: Any
  recompute_fn: Callable[..., Sequence[jax.Array]]
  vjp_fn: Any
  residual_indices: tuple[int | None, ...]
  residuals: tuple[Residual, ...]

  def forward(self, stage_input: StageInput) -> tuple[Outputs, Arrays]:
    """Returns the outputs, and the residuals that depend on the input."""
    leaves = self.forward_fn(*jax.tree.leaves(stage_input))
    count = self.outputs.num_leaves
    by_index = dict(zip(self.residual_indices, leaves[count:], strict=True))
    residuals = tuple(by_index[index] for index in range(len(self.residuals)))
    return jax.tree.unflatten(self.outputs, leaves[:count]), residuals

  def backward(
    self, stage_input: StageInput, arrays: Arrays, gradients: OutputGradients
  ) -> tuple[FlatParams, jax.Array]:
    """Runs the vjp with the residuals and with the leaves that are recomputed."""
    recomputed = iter(self.recompute_fn(*jax.tree.leaves(stage_input)))
    leaves = [
      next(recomputed) if index is None else arrays[index] for index in self.residual_indices
    ]
    return jax.tree.unflatten(self.vjp_fn, leaves)(gradients)


Stash = InputStash | ResidualStash


def make_stash(name: str, parts: ModelParts, rest: FlatParams, stage_input: StageInput) -> Stash:
  """Returns the stash of `pipeline_saved_activations=name` for layers of an input of these shapes."""
  return (
    InputStash(parts, rest) if name == "input" else _make_residual_stash(parts, rest, stage_input)
  )


def _make_residual_stash(
  parts: ModelParts, rest: FlatParams, stage_input: StageInput
) -> ResidualStash:
  traced, (outputs, vjp_fn) = jax.make_jaxpr(
    lambda stage_input: layers_vjp(parts, rest, stage_input), return_shape=True
  )(stage_input)
  x_index, first = len(stage_input.layers), len(jax.tree.leaves(outputs))
  leaves = traced.jaxpr.outvars[first:]
  is_saved = [_depends_on(traced.jaxpr, first + at, x_index) for at in range(len(leaves))]
  wanted = [False] * first + [not saved for saved in is_saved]
  recomputed, _ = dce_jaxpr(traced.jaxpr, wanted, instantiate=True)
  residual_indices = _unique_indices(leaves, is_saved)
  return ResidualStash(
    forward_fn=core.jaxpr_as_fun(traced),
    outputs=jax.tree.structure(outputs),
    recompute_fn=core.jaxpr_as_fun(core.ClosedJaxpr(recomputed, traced.consts)),
    vjp_fn=jax.tree.structure(vjp_fn),
    residual_indices=residual_indices,
    residuals=stage_residuals(parts, rest, stage_input, residual_indices),
  )


def _depends_on(jaxpr: core.Jaxpr, output: int, argument: int) -> bool:
  """Returns whether an output depends on an argument and is not the argument itself."""
  if jaxpr.outvars[output] is jaxpr.invars[argument]:
    return False
  _, used = dce_jaxpr(jaxpr, [at == output for at in range(len(jaxpr.outvars))])
  return used[argument]


def _unique_indices(leaves: Sequence[Any], is_saved: Sequence[bool]) -> tuple[int | None, ...]:
  """Returns an index for every saved leaf, equal for identical leaves; None for the others."""
  numbers: dict[int, int] = {}
  return tuple(
    numbers.setdefault(id(leaf), len(numbers)) if saved else None
    for leaf, saved in zip(leaves, is_saved, strict=True)
  )
