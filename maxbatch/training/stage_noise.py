"""What a stage measures of the microbatches of a pipeline, for the noise scale: squares of their gradients,
and of those of their rows.

R rows of a microbatch, T tokens, D width, F devices along fsdp, S along tensor.

In the tick of a backward a stage has the gradients of its own layers by one microbatch, and squares them
there. All other parameters get theirs in two ticks: from the loss, of which every stage has a share, and from
the embedding, later, on the first stage. Of parameters with both, as a table that is the output matrix too, with
gradients E of the embedding and H of the loss, ‖E + H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩. H, as large as the table, is
not kept: E is Jᵀ·d for the gradient d of what the embedding gives, so that ⟨E, H⟩ = ⟨d, J·H⟩, and J·H is as
large as d.

Rows are measured by probes (models/probes.py), those of layers in the same backward. For the head, stages
share the rows of a microbatch, not their tokens, since a row's gradient must be whole to be squared. Of a table
with both uses the head hands what it has at a row's tokens to the embedding's backward, as without a pipeline.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.data.rows import Rows
from maxbatch.training import partial_sums
from maxbatch.training.accumulate import group_squares
from maxbatch.training.model_parts import (
  FlatParams,
  LossProbes,
  ModelParts,
  trained,
  zero_probes,
)
from maxbatch.training.objective import LOSS
from maxbatch.training.state import num_groups


class InParts(NamedTuple):
  """This stage's part of sums of squares, of the gradients of its layers or of all other parameters."""

  squares: jax.Array | None
  """float32[F, S], or [G, F, S] by group: Σ over microbatches ‖gradient‖²; None: these are not measured."""
  of_rows: FlatParams
  """float32[repeats, layers, F, S] of layers, else [F, S] or [L, F, S]: for each probe Σ over rows."""


class FromLoss(NamedTuple):
  """What the embedding's backward needs of the loss of its microbatch, for parameters with both gradients."""

  direction: jax.Array | None
  """(R, T, D): J·H, for the microbatch's squares; None where these or such parameters are not there."""
  at_tokens: jax.Array | None
  """float32 (R, T, D): what H has at the tokens of each row, for the rows' squares; likewise."""


class StageSquares(NamedTuple):
  """The squares of a stage between ticks."""

  of_layers: InParts
  of_rest: InParts
  divisors: jax.Array
  """Σ (divisor of a microbatch)², on every stage that of all."""
  kept: FromLoss
  """[slots, R, T, D] each, of microbatches between their loss and the embedding's backward."""

  def on_replica(self) -> tuple[jax.Array, jax.Array]:
    """Returns Σ ‖gradient of a microbatch‖² and Σ (its divisor)² of this replica, the norms in parts."""
    assert self.of_layers.squares is not None
    assert self.of_rest.squares is not None
    return lax.psum(self.of_layers.squares + self.of_rest.squares, "stage"), self.divisors

  def by_probe(self, numbers: jax.Array, num_layers: int) -> FlatParams:
    """Returns for each probe Σ over the rows of this replica, in parts, those of layers in the model's order.

    Args:
      numbers: of this stage's layers, as they are stacked, among the `num_layers` that stages divide.
    """

    def in_order(x: jax.Array) -> jax.Array:
      zeros = jnp.zeros((num_layers, *x.shape[2:]))
      return zeros.at[numbers].set(x.reshape(-1, *x.shape[2:]))

    layers = {path: in_order(x) for path, x in self.of_layers.of_rows.items()}
    return lax.psum(layers | self.of_rest.of_rows, "stage")


class LossSquares(NamedTuple):
  """The sums with those of the loss of a microbatch, and what is kept of it."""

  of_rest: InParts
  divisors: jax.Array
  kept: FromLoss


@dataclasses.dataclass(frozen=True)
class StageNoise:
  """Squares the gradients of microbatches and rows on one stage.

  Attributes:
    parts: the model.
    index: of the stage, an int32 scalar.
    rest: parameters outside of the layers.
    embed: from some of these, the others as they are, rows and probes to what `measured_embed` returns.
    of_microbatches: whether the gradients of microbatches are squared; those of rows where there are probes.
    shared: parameters with a gradient both of the loss and of the embedding.
    is_tied: whether such a one is measured row by row.
    slots: microbatches between their loss and the embedding's backward, at most.
  """

  parts: ModelParts
  index: jax.Array
  rest: FlatParams
  embed: Callable[[FlatParams, Rows, FlatParams], tuple[jax.Array, jax.Array | None]]
  of_microbatches: bool
  shared: frozenset[tuple[str, ...]]
  is_tied: bool
  slots: int

  @property
  def of_rows(self) -> bool:
    """Whether the gradients of rows are squared."""
    return self.parts.model.has_probes

  def zeros(self, like: Any, chunks: tuple[int, int]) -> StageSquares:
    """Returns what there is before the first tick.

    Args:
      like: the shapes of a microbatch's embedding.
      chunks: repeats, and the layers of a stage in each.
    """
    groups, squares = num_groups(self.parts.model), None
    if self.of_microbatches:
      squares = partial_sums.of_one(jnp.zeros((groups,) if groups else ()))
    layers, rest = zero_probes(self.parts.model, 1)
    of_layers = {path: partial_sums.of_one(jnp.zeros(chunks)) for path in layers}
    of_rest = {path: partial_sums.of_one(jnp.zeros(x.shape[:-2])) for path, x in rest.items()}
    sums = InParts(squares, of_layers), InParts(squares, of_rest)
    slots = (self.slots + 1, *like.shape)
    kept = self._kept(jnp.zeros(slots, like.dtype), jnp.zeros(slots))
    return StageSquares(*sums, jnp.zeros(()), kept)

  def _kept(self, direction: jax.Array, at_tokens: jax.Array) -> FromLoss:
    """Returns those that are needed."""
    return FromLoss(direction if self.shared else None, at_tokens if self.is_tied else None)

  def add_layer(
    self,
    total: InParts,
    new: FlatParams,
    of_rows: FlatParams,
    at: tuple[jax.Array, jax.Array],
    number: jax.Array,
  ) -> InParts:
    """Adds the squares of one layer.

    Args:
      new: gradients of the layer.
      of_rows: squares of rows by probe, (R, S).
      at: repeat and layer within it.
      number: of the layer among those that stages divide.
    """
    squares = total.squares
    if squares is not None:
      stacked = {path: leaf[None] for path, leaf in new.items()}
      squares += group_squares(self.parts.model, stacked, number[None])
    sums = {
      path: x.at[at].add(partial_sums.of_rows(of_rows[path])) for path, x in total.of_rows.items()
    }
    return InParts(squares, sums)

  def loss_probes(self, like: jax.Array) -> LossProbes | None:
    """Returns zeros to differentiate the loss of whole rows by, with their hidden states."""
    if not self.of_rows:
      return None
    tied_RTD = jnp.zeros(like.shape, jnp.float32) if self.is_tied else None
    return LossProbes(self._probes(len(like)), tied_RTD)

  def add_loss(
    self,
    totals: StageSquares,
    new: FlatParams,
    divisor: jax.Array,
    rows: Rows,
    measured: tuple[FlatParams, jax.Array | None],
  ) -> LossSquares:
    """Adds the squares of what the loss of a microbatch gives, of which this stage has a share.

    Args:
      new: gradients of this share.
      divisor: of this share.
      rows: of the microbatch.
      measured: of the share's rows, by probe, (R, S); and what H has at the tokens of all rows.
    """
    of_rows, at_tokens_RTD = measured
    total, direction_RTD = self._add_rows(totals.of_rest, of_rows), None
    if total.squares is not None:
      whole = {path: lax.psum(leaf.astype(jnp.float32), "stage") for path, leaf in new.items()}
      squares = jnp.where(self.index == 0, group_squares(self.parts.model, whole), 0.0)
      total = total._replace(squares=total.squares + squares)
      direction_RTD = self._direction(whole, rows) if self.shared else None
    divisors = totals.divisors + jnp.square(lax.psum(divisor, "stage"))
    return LossSquares(total, divisors, FromLoss(direction_RTD, at_tokens_RTD))

  def no_loss(self, totals: StageSquares, x_RTD: jax.Array) -> LossSquares:
    """Returns what a tick without a loss adds: nothing."""
    kept = self._kept(jnp.zeros_like(x_RTD), jnp.zeros(x_RTD.shape))
    return LossSquares(totals.of_rest, totals.divisors, kept)

  def store(
    self, totals: StageSquares, new: LossSquares, is_there: jax.Array, microbatch: jax.Array
  ) -> StageSquares:
    """Returns the squares with those of a tick's loss, if it is there.

    Microbatches reach the backward of the embedding in the order of their losses.
    """
    slot = jnp.where(is_there, microbatch % self.slots, self.slots)
    kept = jax.tree.map(lambda to, x: to.at[slot].set(x), totals.kept, new.kept)
    return totals._replace(of_rest=new.of_rest, divisors=new.divisors, kept=kept)

  def from_loss(self, totals: StageSquares, microbatch: jax.Array) -> FromLoss:
    """Returns what was kept of the loss of a microbatch."""
    return jax.tree.map(lambda x: x[microbatch % self.slots], totals.kept)

  def embedding_vjp(
    self, used: FlatParams, rows: Rows
  ) -> Callable[[jax.Array, FromLoss], tuple[FlatParams, FlatParams]]:
    """Returns the function from the gradient of what the embedding gives, and what was kept of the loss, to
    the gradients of these parameters, and the squares of rows by probe, (R, S)."""

    def embed(used: FlatParams, probes: FlatParams) -> tuple[jax.Array, jax.Array | None]:
      return self.embed(used, rows, probes)

    _, vjp_fn = jax.vjp(embed, used, self._probes(len(rows.inputs)))
    return lambda d_x_RTD, of_loss: vjp_fn((d_x_RTD, of_loss.at_tokens))

  def add_embedding(
    self,
    total: InParts,
    new: FlatParams,
    of_rows: FlatParams,
    d_x_RTD: jax.Array,
    of_loss: FromLoss,
  ) -> InParts:
    """Adds the squares of what the embedding of a microbatch gives, and their products with the loss's.

    Zeros, on all stages but the first, add nothing.
    """
    total = self._add_rows(total, of_rows)
    if total.squares is None:
      return total
    squares = total.squares + group_squares(self.parts.model, new)
    if of_loss.direction is not None:
      cross = 2 * (d_x_RTD.astype(jnp.float32) * of_loss.direction.astype(jnp.float32)).sum()
      both = partial_sums.of_one(cross)
      # Of a mixture in groups, they are of the first: neither a router's nor an expert's.
      squares = squares.at[0].add(both) if squares.ndim > both.ndim else squares + both
    return total._replace(squares=squares)

  def _probes(self, rows: int) -> FlatParams:
    return zero_probes(self.parts.model, rows)[1]

  def _add_rows(self, total: InParts, of_rows: FlatParams) -> InParts:
    sums = {path: x + partial_sums.of_rows(of_rows[path]) for path, x in total.of_rows.items()}
    return total._replace(of_rows=sums)

  def _direction(self, whole: FlatParams, rows: Rows) -> jax.Array:
    """Returns J·H: as the gradient of ⟨Jᵀ·d, H⟩ by d, since not all that is differentiated forwards can be."""
    used = {path: self.rest[path] for path in self.shared}
    x_RTD, vjp_fn = jax.vjp(lambda used: self.embed(used, rows, {})[0], used)

    def product(d_RTD: jax.Array) -> jax.Array:
      of_embedding = vjp_fn(d_RTD)[0]
      each = [(of_embedding[path].astype(jnp.float32) * whole[path]).sum() for path in self.shared]
      return jnp.stack(each).sum()

    return jax.grad(product)(jnp.zeros_like(x_RTD))


def used_params(function: Callable[[FlatParams], Any], rest: FlatParams) -> FlatParams:
  """Returns those of some parameters that the function uses: gradients of the others are zero, not added."""
  traced = jax.make_jaxpr(function)(rest).jaxpr
  read = {id(variable) for equation in traced.eqns for variable in equation.invars}
  given = zip(sorted(rest), traced.invars, strict=True)
  return {path: rest[path] for path, variable in given if id(variable) in read}


def stage_noise(
  parts: ModelParts,
  index: jax.Array,
  layers: FlatParams,
  rest: FlatParams,
  microbatch: Any,
  slots: int,
  *,
  of_microbatches: bool,
) -> StageNoise:
  """Returns what squares the gradients of rows, if the model has probes, and of microbatches on a stage.

  Args:
    parts: the model.
    index: of the stage.
    layers: parameters of its layers, (repeats, layers, …).
    rest: all others.
    microbatch: what the step is fed of any microbatch.
    slots: of the stage's inputs.
    of_microbatches: whether those of microbatches are squared.
  """
  rows = parts.objective.rows(microbatch)
  _, probes = zero_probes(parts.model, len(rows.inputs))

  def embed(used: FlatParams, rows: Rows, probes: FlatParams) -> tuple[jax.Array, jax.Array | None]:
    return parts.measured_embed(layers, rest | used, rows, probes)

  x, cross = jax.eval_shape(lambda: embed({}, rows, probes))
  shared = frozenset[tuple[str, ...]]()
  if of_microbatches:

    def loss(used: FlatParams) -> jax.Array:
      whole = parts.loss(layers, rest | used, jnp.zeros(x.shape, x.dtype), microbatch)
      return whole.terms[LOSS].numerator

    of_loss = used_params(loss, trained(parts.model, rest))
    shared = frozenset(used_params(lambda used: embed(used, rows, {})[0], of_loss))
  is_tied = cross is not None
  return StageNoise(parts, index, rest, embed, of_microbatches, shared, is_tied, slots)
