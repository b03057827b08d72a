"""What a stage keeps of a forward until its backward, beside its input (pipeline_saved_activations).

R rows of a microbatch, T tokens, D width of the residual stream.

- input: nothing more. The backward recomputes the stage's layers.
- residuals: the input of each layer and the residuals of its vjp, as remat_policy decides, if they
  depend on that input. What depends on parameters or rows alone (casts, gathered copies, rotations,
  masks of dropout) is recomputed for the backward and takes up no slot.

One layer is traced, and both passes are loops over a stage's layers: so the backward adds a layer's
gradients to the stage's sums as soon as they are there, and never holds those of all layers beside them.

Residuals are intermediate arrays of the model, whose dims have no logical names. To find the dims
that fsdp and tensor divide, the shapes are computed again with twice the rows and with twice the
heads and feed-forward width: those dims grow. An array from a shard_map inside the model, as around
a kernel, has a dim of the devices, which is found by computing the shapes without tensor.

"Stash" is PipeDream's word.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh

from maxbatch.core.topology import weight_groups
from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import LogicalAxes, auto_axis_sizes, local_shape
from maxbatch.models.layers import Outputs, over_layers
from maxbatch.training.model_parts import FlatParams, ModelParts, split_layers, trained, zero_probes


class StageInput(NamedTuple):
  """The input of a model chunk (a stage's layers of one repeat), or its shapes."""

  layers: FlatParams
  """Of all repeats: (repeats, layers, …)."""
  repeat: jax.Array
  """int32: whose layers are meant."""
  x_RTD: jax.Array
  """The input of the first of these layers."""
  rows: Rows
  first_layer: jax.Array
  """int32: the index in the model of the first of these layers."""


class LayerInput(NamedTuple):
  """The input of one layer, or its shapes."""

  parameters: FlatParams
  """(1, …): with the dim of stacked layers."""
  x_RTD: jax.Array
  rows: Rows
  number: jax.Array
  """int32: the index of the layer in the model."""


class Residual(NamedTuple):
  """One array that the stash keeps of a microbatch, or of one of its layers."""

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


Totals = TypeVar("Totals")


class Gradients(Protocol[Totals]):
  """Adds the gradients of one layer of a stage to sums."""

  def __call__(
    self, totals: Totals, layer: jax.Array, new: FlatParams, of_rows: FlatParams
  ) -> Totals:
    """Returns the sums, with gradients of the stage's layer of this number and with its rows' squares, (R, S)
    for each probe, without a dim of layers."""
    ...


def layer_vjp(
  parts: ModelParts, rest: FlatParams, layer_input: LayerInput
) -> tuple[Outputs, Callable[[OutputGradients], tuple[FlatParams, jax.Array, FlatParams]]]:
  """Returns one layer's outputs, and the vjp to gradients of trained parameters, input and probes."""
  parameters, x_RTD, rows, number = layer_input
  probes, _ = zero_probes(parts.model, len(x_RTD))

  def apply(
    trains: FlatParams, x_RTD: jax.Array, probes: FlatParams
  ) -> tuple[OutputGradients, Outputs]:
    outputs = parts.apply_layers(parameters | trains, rest, x_RTD, rows, number, probes)
    numerators = {name: term.numerator for name, term in (outputs.terms or {}).items()}
    return OutputGradients(outputs.hidden_BTD, numerators), outputs

  trains = trained(parts.model, parameters)
  _, vjp_fn, outputs = jax.vjp(apply, trains, x_RTD, probes, has_aux=True)
  return outputs, vjp_fn


def layer_residuals(
  parts: ModelParts, rest: FlatParams, layer_input: LayerInput, indices: Sequence[int | None]
) -> tuple[Residual, ...]:
  """Returns the leaves of the vjp that have an index among the residuals, in the order of the indices.

  None stands for a leaf that is not kept; `layer_input` are shapes.
  """
  leaves, sizes = _vjp_leaves(parts, rest, layer_input), auto_axis_sizes()
  axes: list[LogicalAxes] = [(None,) * leaf.ndim for leaf in leaves]
  if sizes["tensor"] > 1:
    twice = _vjp_leaves(*_with_twice_the_heads(parts, layer_input))
    axes = _name_changed_dims("heads", axes, leaves, twice)
  if weight_groups(sizes) > sizes["context"]:
    twice = _vjp_leaves(parts, rest, _with_twice(0, layer_input))
    axes = _name_changed_dims("batch", axes, leaves, twice)
  if sizes["context"] > 1:
    twice = _vjp_leaves(parts, rest, _with_twice(1, layer_input))
    axes = _name_changed_dims("length", axes, leaves, twice)
  if sizes["tensor"] * sizes["context"] > 1:
    with jax.sharding.use_abstract_mesh(_mesh_without("tensor", "context")):
      unsharded = _vjp_leaves(parts, rest, layer_input)
    axes = _name_changed_dims("device_part", axes, unsharded, leaves)
  by_index = dict(zip(indices, zip(leaves, axes, strict=True), strict=True))
  chosen = (by_index[index] for index in range(len(set(indices) - {None})))
  return tuple(Residual(leaf.shape, np.dtype(leaf.dtype), names) for leaf, names in chosen)


def _vjp_leaves(parts: ModelParts, rest: FlatParams, layer_input: LayerInput) -> list[Any]:
  """Returns shapes of all leaves of the vjp."""
  _, vjp_fn = jax.eval_shape(lambda *some: layer_vjp(parts, *some), rest, layer_input)
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


def _with_twice(dim: int, layer_input: LayerInput) -> LayerInput:
  """Returns shapes of twice the rows (dim 0) or their tokens (dim 1)."""

  def twice(x: Any) -> jax.ShapeDtypeStruct:
    shape = tuple(2 * size if at == dim else size for at, size in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)

  rows = jax.tree.map(twice, layer_input.rows)
  return layer_input._replace(x_RTD=twice(layer_input.x_RTD), rows=rows)


def _with_twice_the_heads(
  parts: ModelParts, layer_input: LayerInput
) -> tuple[ModelParts, FlatParams, LayerInput]:
  parts = parts.with_twice_the_heads(layer_input.x_RTD.shape[1])
  layers, rest = split_layers(parts.model, parts.model.shapes())
  shapes = {
    path: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype) for path, leaf in layers.items()
  }
  return parts, rest, layer_input._replace(parameters=shapes)


def _mesh_without(*names: str) -> AbstractMesh:
  """Returns the mesh without these axes, their devices as stages: shapes do not depend on those."""
  mesh = jax.sharding.get_abstract_mesh()
  there = [name for name in names if name in mesh.shape]
  ways = math.prod(mesh.shape[name] for name in there)
  sizes = mesh.shape | dict.fromkeys(there, 1) | {"stage": mesh.shape["stage"] * ways}
  return mesh.update(axis_sizes=tuple(sizes[name] for name in mesh.axis_names))


Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class NoStash:
  """Keeps nothing, in an evaluation."""

  parts: ModelParts
  rest: FlatParams
  residuals: tuple[Residual, ...] = ()

  def forward(self, stage_input: StageInput) -> tuple[Outputs, Arrays]:
    """Returns the outputs, without residuals."""
    repeat, each = stage_input.repeat, stage_input.layers.items()
    # Without repeats nothing is copied.
    layers = {path: leaf[repeat if len(leaf) > 1 else 0] for path, leaf in each}
    rows, first = stage_input.rows, stage_input.first_layer
    return self.parts.apply_layers(layers, self.rest, stage_input.x_RTD, rows, first), ()


@dataclasses.dataclass(frozen=True)
class Stash:
  """Keeps the residuals that depend on the input, or recomputes them from it.

  Attributes:
    forward_fn: from the leaves of a LayerInput to those of the outputs and of the vjp.
    outputs: the tree structure of the outputs.
    recompute_fn: from the leaves of a LayerInput to the leaves of the vjp that are recomputed.
    vjp_fn: the tree structure of the vjp, which is a function and a tree of arrays.
    residual_indices: for each leaf of the vjp its index in a layer's residuals; None if recomputed.
    residuals: what is kept of one microbatch, (layers, …) each: the layers' inputs, then the
      residuals. Empty if they are recomputed.
    unroll: whether the loops over layers are unrolled.
  """

  forward_fn: Callable[..., Sequence[jax.Array]]
  outputs: Any
  recompute_fn: Callable[..., Sequence[jax.Array]]
  vjp_fn: Any
  residual_indices: tuple[int | None, ...]
  residuals: tuple[Residual, ...]
  unroll: bool

  def forward(self, stage_input: StageInput) -> tuple[Outputs, Arrays]:
    """Returns the outputs, and what is kept."""
    outputs, residuals = self._forward(stage_input)
    return outputs, residuals if self.residuals else ()

  def backward(
    self,
    stage_input: StageInput,
    arrays: Arrays,
    gradients: OutputGradients,
    totals: Totals,
    add: Gradients[Totals],
  ) -> tuple[Totals, jax.Array]:
    """Runs the layers' vjps, from the last layer to the first.

    Returns the sums, with the gradients of all layers added, and the gradient of the input.
    """
    if not self.residuals:
      _, arrays = self._forward(stage_input)

    def layer(
      carry: tuple[jax.Array, Totals], item: tuple[jax.Array, Arrays]
    ) -> tuple[tuple[jax.Array, Totals], None]:
      (d_y_RTD, totals), (index, (x_RTD, *saved)) = carry, item
      given = jax.tree.leaves(_layer_input(stage_input, index, x_RTD))
      recomputed = iter(self.recompute_fn(*given))
      leaves = [next(recomputed) if at is None else saved[at] for at in self.residual_indices]
      vjp_fn = jax.tree.unflatten(self.vjp_fn, leaves)
      new, d_x_RTD, of_rows = vjp_fn(gradients._replace(y_RTD=d_y_RTD))
      new, of_rows = jax.tree.map(lambda leaf: leaf.squeeze(0), (new, of_rows))
      return (d_x_RTD, add(totals, index, new, of_rows)), None

    carry, items = (gradients.y_RTD, totals), (_indices(stage_input), arrays)
    (d_x_RTD, totals), _ = lax.scan(layer, carry, items, reverse=True, unroll=self.unroll)
    return totals, d_x_RTD

  def _forward(self, stage_input: StageInput) -> tuple[Outputs, Arrays]:
    """Returns the outputs, and of each layer its input and its residuals, (layers, …)."""
    count = self.outputs.num_leaves

    def layer(x_RTD: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
      leaves = self.forward_fn(*jax.tree.leaves(_layer_input(stage_input, index, x_RTD)))
      outputs = jax.tree.unflatten(self.outputs, leaves[:count])
      by_index = dict(zip(self.residual_indices, leaves[count:], strict=True))
      by_index.pop(None, None)
      kept = (x_RTD, *(by_index[index] for index in range(len(by_index))))
      return outputs.hidden_BTD, ((outputs.terms, outputs.stats), kept)

    x_RTD, indices = stage_input.x_RTD, _indices(stage_input)
    y_RTD, (sums, kept) = lax.scan(layer, x_RTD, indices, unroll=self.unroll)
    return Outputs(y_RTD, *over_layers(sums)), kept


def make_stash(name: str, parts: ModelParts, rest: FlatParams, stage_input: StageInput) -> Stash:
  """Returns the stash of `pipeline_saved_activations=name` for layers of an input of these shapes."""
  one: Any = {
    path: jax.ShapeDtypeStruct((1, *leaf.shape[2:]), leaf.dtype)
    for path, leaf in stage_input.layers.items()
  }
  layer_input = LayerInput(one, *stage_input[2:])
  traced, (outputs, vjp_fn) = jax.make_jaxpr(
    lambda layer_input: layer_vjp(parts, rest, layer_input), return_shape=True
  )(layer_input)
  x_index, first = len(one), len(jax.tree.leaves(outputs))
  leaves = traced.jaxpr.outvars[first:]
  is_saved = [_depends_on(traced.jaxpr, first + at, x_index) for at in range(len(leaves))]
  wanted = [False] * first + [not saved for saved in is_saved]
  recomputed, _ = dce_jaxpr(traced.jaxpr, wanted, instantiate=True)
  residual_indices = _unique_indices(leaves, is_saved)
  residuals = ()
  if name == "residuals":
    each = layer_residuals(parts, rest, layer_input, residual_indices)
    x = Residual(stage_input.x_RTD.shape, np.dtype(stage_input.x_RTD.dtype), _INPUT_AXES)
    num_layers = _num_layers(stage_input)
    residuals = tuple(
      Residual((num_layers, *one.shape), one.dtype, (None, *one.axes)) for one in (x, *each)
    )
  return Stash(
    forward_fn=core.jaxpr_as_fun(traced),
    outputs=jax.tree.structure(outputs),
    recompute_fn=core.jaxpr_as_fun(core.ClosedJaxpr(recomputed, traced.consts)),
    vjp_fn=jax.tree.structure(vjp_fn),
    residual_indices=residual_indices,
    residuals=residuals,
    unroll=not parts.model.config.scan_layers,
  )


_INPUT_AXES: LogicalAxes = ("batch", "length", "activation_embed")


def _num_layers(stage_input: StageInput) -> int:
  return next(iter(stage_input.layers.values())).shape[1]


def _indices(stage_input: StageInput) -> jax.Array:
  """Returns the index in the chunk of each of its layers."""
  return jnp.arange(_num_layers(stage_input))


def _layer_input(stage_input: StageInput, index: jax.Array, x_RTD: jax.Array) -> LayerInput:
  """Returns the input of one layer of the chunk; its parameters are one slice, without a copy of the
  chunk's."""

  def of_layer(leaf: jax.Array) -> jax.Array:
    starts = (stage_input.repeat, index, *(0,) * (leaf.ndim - 2))
    return lax.dynamic_slice(leaf, starts, (1, 1, *leaf.shape[2:])).squeeze(0)

  parameters = {path: of_layer(leaf) for path, leaf in stage_input.layers.items()}
  return LayerInput(parameters, x_RTD, stage_input.rows, stage_input.first_layer + index)


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
