"""What a pipeline's stage holds between ticks, how its devices divide that, and how stages share a batch.

R rows of a microbatch, T tokens, D width of the residual stream, F devices along fsdp, S along tensor.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.core.topology import weight_groups
from maxbatch.hardware.sharding import auto_axis_sizes, constrain
from maxbatch.models.registry import Model
from maxbatch.precision.policy import cast_as_read
from maxbatch.training.model_parts import FlatParams, ModelParts, StageSums
from maxbatch.training.partial_sums import PARTS
from maxbatch.training.stage_noise import FromLoss, InParts, LossSquares, StageSquares
from maxbatch.training.stash import Arrays, Residual


class Buffers(NamedTuple):
  """What a stage keeps for its backwards."""

  inputs: jax.Array
  """[slots, R, T, D]: inputs until their backward."""
  gradients: jax.Array
  """[slots, R, T, D]: gradients of outputs until their backward."""
  residuals: Arrays
  """[slots, …]: residuals of a forward until its backward, in the same slot as its input."""


class StageState(NamedTuple):
  """The state of a stage between ticks."""

  buffers: Buffers | None
  """None in an evaluation."""
  outgoing: tuple[jax.Array, ...]
  """Output and, in training, input gradient of the previous tick, (R, T, D) each, still to be sent."""
  received: tuple[jax.Array, ...]
  """With delayed forwarding, what the neighbours sent in the previous tick; else empty."""
  d_layers: FlatParams
  """float32 sums of the gradients of this stage's layers that train: (repeats, layers, …)."""
  d_rest: FlatParams
  """float32 sums of this stage's share of the gradients of all other parameters that train."""
  sums: StageSums
  """This stage's share of the loss."""
  own: StageSums
  """What its layers hand out."""
  squares: StageSquares | None
  """Of its microbatches' gradients; None where they are not measured."""


class ForwardResult(NamedTuple):
  """The input and output of a stage's layers, the residuals to stash, and what the layers hand out."""

  x_RTD: Any
  """None in an evaluation, which keeps nothing for a backward."""
  y_RTD: jax.Array
  residuals: Arrays
  own: StageSums


Totals = tuple[FlatParams, InParts | None]
"""Sums of gradients, and of the squares of those of microbatches, where these are measured."""


@dataclasses.dataclass(frozen=True)
class StageLayout:
  """How the devices of a stage divide what is computed in a tick.

  Attributes:
    model: whose gradients are divided as its parameters are.
    residuals: what the stash keeps of a microbatch.
  """

  model: Model
  residuals: tuple[Residual, ...]

  def constrain(self, result: Any) -> Any:
    """Constrains the sharding of gradients of parameters, activations (R, T, D) and scalars."""
    if result is None:
      return None
    if isinstance(result, dict):
      return self.constrain_like_params(result)
    if isinstance(result, ForwardResult):
      x_RTD, y_RTD, own = (self.constrain(x) for x in (result.x_RTD, result.y_RTD, result.own))
      return ForwardResult(x_RTD, y_RTD, self._constrain_residuals(result.residuals), own)
    if isinstance(result, StageSums):
      return jax.tree.map(lambda x: constrain(x, (None,) * x.ndim), result)
    if isinstance(result, InParts):
      return jax.tree.map(lambda x: constrain(x, (None,) * (x.ndim - 2) + PARTS), result)
    if isinstance(result, (LossSquares, FromLoss)):
      return type(result)(*map(self.constrain, result))
    if isinstance(result, tuple):
      return tuple(self.constrain(each) for each in result)
    return constrain(result, ("batch", "length", "activation_embed") if result.ndim else ())

  def blank_residuals(self, *slots: int) -> Arrays:
    """Returns zeros for one microbatch's residuals, or buffers with a slot dimension in front."""
    blanks = [blank((*slots, *like.shape), like.dtype) for like in self.residuals]
    return self._constrain_residuals(tuple(blanks))

  def _constrain_residuals(self, residuals: Arrays) -> Arrays:
    """Divides residuals over fsdp and tensor, with or without a slot dimension in front."""
    each = zip(residuals, self.residuals, strict=True)
    return tuple(constrain(x, (None,) * (x.ndim - len(like.axes)) + like.axes) for x, like in each)

  def constrain_like_params(self, gradients: FlatParams) -> FlatParams:
    """Divides gradients as the parameters are; those of layers have a repeat dim in front."""
    axes = self.model.axes()
    return {
      path: constrain(leaf, (None,) * (leaf.ndim - len(axes[path])) + axes[path])
      for path, leaf in gradients.items()
    }


def cast_once(
  parts: ModelParts,
  layers: FlatParams,
  rest: FlatParams,
  microbatch: Callable[[jax.Array], Any],
) -> FlatParams:
  """Returns the layers' parameters in the formats in which layers compute with them: cast once in a step,
  not in every pass of every microbatch."""
  one = {
    path: jax.ShapeDtypeStruct((1, *leaf.shape[2:]), leaf.dtype) for path, leaf in layers.items()
  }

  def layer(one: FlatParams) -> Any:
    rows, first = parts.objective.rows(microbatch(jnp.int32(0))), jnp.int32(0)
    return parts.apply_layers(one, rest, parts.embed(layers, rest, rows), rows, first)

  read = cast_as_read(layer, one, layers)
  is_cast = any(leaf is not layers[path] for path, leaf in read.items())
  # Without the barrier the compiler casts in every pass after all, to hold no copy.
  return lax.optimization_barrier(read) if is_cast else layers


def split_repeats(layers: FlatParams, repeats: int) -> FlatParams:
  """Splits the layers of a stage by repeat: (repeats · layers, …) → (repeats, layers, …)."""
  return {path: leaf.reshape(repeats, -1, *leaf.shape[1:]) for path, leaf in layers.items()}


def split_microbatches(batch: Any, num_pipeline_microbatches: int) -> Callable[[jax.Array], Any]:
  """Returns a function from the number of a pipeline microbatch to its part of what a step is fed (k, B, …).

  The first `num_pipeline_microbatches` numbers are those of the first accumulation step. Each takes
  rows from every group of devices that has its own, so that no row moves between devices.
  """
  groups = row_groups(jax.sharding.get_abstract_mesh().shape)

  def split(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], groups, num_pipeline_microbatches, -1, *x.shape[2:])

  accumulation_steps = jax.tree.map(split, batch)

  def microbatch(number: jax.Array) -> Any:
    def select(x: Any) -> jax.Array:
      accumulation_step, index = jnp.divmod(number, x.shape[2])
      return x[accumulation_step, :, index].reshape(-1, *x.shape[4:])

    return jax.tree.map(select, accumulation_steps)

  return microbatch


def row_groups(sizes: Mapping[str, int]) -> int:
  """Returns the groups of a replica's devices that have rows of their own."""
  return weight_groups(sizes) // sizes.get("context", 1)


def split_tokens(x: jax.Array, shares: int) -> jax.Array:
  """Divides tokens over the stages: (R, T, …) → (R, shares, C, …), padded with zeros.

  Devices that share rows each divide the tokens that they have.
  """
  (R, T, *rest), sharing = x.shape, auto_axis_sizes()["context"]
  own = x.reshape(R, sharing, T // sharing, *rest)
  missing = -own.shape[2] % shares
  padded = jnp.pad(own, [(0, missing) if dim == 2 else (0, 0) for dim in range(own.ndim)])
  split = padded.reshape(R, sharing, shares, -1, *rest).swapaxes(1, 2)
  return constrain(
    split.reshape(R, shares, -1, *rest), ("batch", None, "length", *(None for _ in rest))
  )


def joined_tokens(x: jax.Array, length: int) -> jax.Array:
  """Returns the inverse of `split_tokens`: (R, shares, C, …) → (R, T, …) of this length."""
  (R, shares, _, *rest), sharing = x.shape, auto_axis_sizes()["context"]
  own = x.reshape(R, shares, sharing, -1, *rest).swapaxes(1, 2)
  return own.reshape(R, sharing, -1, *rest)[:, :, : length // sharing].reshape(R, length, *rest)


def split_rows(x: jax.Array, shares: int) -> jax.Array:
  """Divides rows over the stages: (R, …) → (shares, R', …), padded with zeros.

  Every group of devices divides the rows that it has.
  """
  groups = row_groups(jax.sharding.get_abstract_mesh().shape)
  own = x.reshape(groups, -1, *x.shape[1:])
  missing = -own.shape[1] % shares
  padded = jnp.pad(own, [(0, missing) if dim == 1 else (0, 0) for dim in range(own.ndim)])
  split = padded.reshape(groups, shares, -1, *x.shape[1:]).swapaxes(0, 1)
  axes = ("batch", "length", "activation_embed")[: x.ndim]
  return constrain(split.reshape(shares, -1, *x.shape[1:]), (None, *axes))


def joined_rows(x: jax.Array, rows: int) -> jax.Array:
  """Returns the inverse of `split_rows`: (shares, R', …) → (R, …) of so many rows."""
  groups, rest = row_groups(jax.sharding.get_abstract_mesh().shape), x.shape[2:]
  own = x.reshape(len(x), groups, -1, *rest).swapaxes(0, 1).reshape(groups, -1, *rest)
  return own[:, : rows // groups].reshape(rows, *rest)


def added(totals: FlatParams, new: FlatParams) -> FlatParams:
  """Returns sums of gradients, with those of some of the parameters added."""
  return totals | {path: totals[path] + g for path, g in new.items()}


def blank(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Returns an array whose values are never used, or only after they are written."""
  return jnp.zeros(shape, dtype)


def blank_like(x_RTD: jax.Array) -> jax.Array:
  """Returns `blank` of the shape of another array."""
  return blank(x_RTD.shape, x_RTD.dtype)


def mask(condition: jax.Array, value: jax.Array) -> jax.Array:
  """Returns the value, or zeros on an idle stage, even where it computed NaN."""
  return jnp.where(condition, value, jnp.zeros_like(value))


def add_at(total: jax.Array, place: tuple[jax.Array, jax.Array], value: jax.Array) -> jax.Array:
  """Returns total.at[place].add(value), as reads and writes of slices: no scatter."""
  starts, new = (*place, *(0,) * value.ndim), value[None, None].astype(total.dtype)
  return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, new.shape) + new, starts)


def write(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
  """Writes to a slot that there is: .at[slot].set also reads it, in case there is none."""
  return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), slot, 0)
