"""Gradients of many microbatches as one sum, reduced over the data axis once.

k microbatches, B rows of a microbatch over all devices, T tokens.

A plain loop under jit would sum gradients between devices after every microbatch. Here a shard_map
takes over the data axis: each replica adds up its own microbatches, and one psum after the loop
joins the replicas. The other axes stay with the compiler. The number of microbatches is data, so that
another number of microbatches runs the same program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import auto_axis_sizes, constrain
from maxbatch.models.registry import Model, Parameters, by_path, joined
from maxbatch.training import partial_sums
from maxbatch.training.objective import TEXT, Loss, MicrobatchLoss, SkippingLoss
from maxbatch.training.state import (
  NOTHING,
  Measures,
  NoiseSums,
  Sums,
  joined_sums,
  zero_sums,
)


def summed_gradients(
  model: Model,
  mesh: Mesh,
  params: Parameters,
  zeros: Parameters,
  rows: Any,
  num_microbatches: jax.Array,
  dropout_key: jax.Array,
  measures: Measures = NOTHING,
  frozen: Parameters | None = None,
  loss: Loss = TEXT,
  scale: jax.Array | None = None,
) -> tuple[Parameters, Sums]:
  """Gradients and loss, summed over all tokens of the first `num_microbatches` microbatches.

  Args:
    model: the model.
    mesh: the devices.
    params: the parameters that train.
    zeros: float32 zeros of the parameters' shapes, where the sums may be formed: donated ones
      save the memory of a second set.
    rows: microbatches (k, B, T) as the loss takes them, B divided over the data and fsdp axes.
    num_microbatches: int32 scalar, at most k; the rows beyond are never read. With k of 1 it must
      be 1.
    dropout_key: the run's dropout key.
    measures: what is summed up besides.
    frozen: the other parameters, of which no gradient is formed; None: there are none.
    loss: of a microbatch.
    scale: float32 scalar by which the gradients, not the loss, are multiplied; None: by nothing.

  Returns:
    Gradients in float32, laid out like the parameters, and the other sums of the step in parts,
    (…, F, S), for partial_sums.joined.
  """
  local = functools.partial(_local_sums, model, measures, loss)
  fixed = frozen or {}
  live_k = loss.has_gradient(rows) if isinstance(loss, SkippingLoss) else None
  if mesh.shape["data"] == 1:
    return local(params, fixed, zeros, rows, live_k, num_microbatches, dropout_key, scale)
  on_data = jax.tree.map(lambda _: PartitionSpec(None, "data"), rows)
  whole = PartitionSpec()
  return jax.shard_map(
    lambda *arguments: _over_replicas(*local(*arguments)),
    mesh=mesh,
    in_specs=(whole, whole, whole, on_data, whole, whole, whole, whole),
    out_specs=whole,
    axis_names={"data"},
    check_vma=False,
  )(params, fixed, zeros, rows, live_k, num_microbatches, dropout_key, scale)


def _over_replicas(gradients: Parameters, sums: Sums) -> tuple[Parameters, Sums]:
  join = functools.partial(jax.lax.psum, axis_name="data")
  largest = jax.tree.map(lambda x: jax.lax.pmax(x, "data"), sums.largest)
  summed = partial_sums.in_one(sums._replace(largest=None), join)
  return join(gradients), summed._replace(largest=largest)


def _local_sums(
  model: Model,
  measures: Measures,
  loss: Loss,
  params: Parameters,
  frozen: Parameters,
  zeros: Parameters,
  fed: Any,
  live_k: jax.Array | None,
  num_microbatches: jax.Array,
  dropout_key: jax.Array,
  scale: jax.Array | None,
) -> tuple[Parameters, Sums]:
  """The sums of one replica's microbatches."""
  axes, sizes, rows = model.axes(), auto_axis_sizes(), loss.rows(fed)
  probes = model.probes(rows.inputs.shape[1], sizes["tensor"])
  # Summed over fsdp here and not in the loop: one message for all microbatches.
  tokens_k = rows.weights.sum((1, 2))

  def laid_out(gradients: Parameters) -> Parameters:
    return by_path(lambda path, g: constrain(g, axes[path]), gradients)

  def lost(params: Parameters, probes: Parameters, micro: Any) -> tuple[jax.Array, MicrobatchLoss]:
    whole = joined(params, frozen)
    found = loss(model, whole, micro, dropout_key, probes, measures.metrics, scale)
    return found.sums.loss.sum(), found

  def differentiated(micro: Any) -> tuple[MicrobatchLoss, Parameters, Parameters]:
    differentiate = jax.value_and_grad(lost, argnums=(0, 1), has_aux=True)
    (_, found), (new, squares) = differentiate(params, probes, micro)
    return found, new, squares

  def skipped(micro: Any) -> tuple[MicrobatchLoss, Parameters, Parameters]:
    assert isinstance(loss, SkippingLoss)
    return loss.without_gradient(micro), *jax.tree.map(jnp.zeros_like, (params, probes))

  def add_microbatch(index: jax.Array, carry: tuple[Parameters, Sums]) -> tuple[Parameters, Sums]:
    gradients, sums = carry
    micro = jax.tree.map(lambda x: x[index], fed)
    if live_k is None:
      found, new, squares = differentiated(micro)
    else:
      found, new, squares = jax.lax.cond(live_k[index], differentiated, skipped, micro)
    # Without the barrier XLA moves reductions over fsdp behind the loop, and the loop then carries
    # whole gradients on every device: for Llama-2-7B on 256 TPUs 2 of 5.7 GiB.
    new = jax.lax.optimization_barrier(new)
    gradients = jax.tree.map(lambda total, g: total + model.policy.summand(g), gradients, new)
    seen = _seen(model, measures, loss.rows(micro), tokens_k[index], found, new, squares)
    return laid_out(gradients), joined_sums(sums, seen)

  nothing = laid_out(zeros), zero_sums(model, measures, (sizes["fsdp"], sizes["tensor"]))
  if rows.inputs.shape[0] == 1:
    # No loop around a single microbatch: the TPU compiler otherwise computes parts of it twice.
    return add_microbatch(jnp.int32(0), nothing)
  found = jax.lax.fori_loop(0, num_microbatches, add_microbatch, nothing)
  return _with_squares_of_both(model, *found) if measures.halves else found


def _seen(
  model: Model,
  measures: Measures,
  micro: Rows,
  tokens: jax.Array,
  found: MicrobatchLoss,
  gradients: Parameters,
  squares: Parameters,
) -> Sums:
  """What one microbatch of so many tokens adds to the sums, in parts."""
  loss, metrics = jax.tree.map(lambda x_F: partial_sums.of_rows(x_F[:, None]), found.sums)
  weight = partial_sums.of_rows(found.weight_B[:, None])
  if not measures.noise(model):
    return Sums(loss, weight, metrics, largest=found.largest)
  tokens_B = micro.weights.sum(1)
  rows = partial_sums.of_rows((tokens_B > 0).astype(jnp.float32)[:, None])
  row_tokens_squared = partial_sums.of_rows(jnp.square(tokens_B)[:, None])
  microbatch_tokens_squared = of_microbatches = jnp.zeros_like(loss)
  if measures.microbatch_squares:
    microbatch_tokens_squared = partial_sums.of_one(jnp.square(tokens))
    of_microbatches = _squared(model, gradients)
  of_rows = jax.tree.map(partial_sums.of_rows, squares)
  noise = NoiseSums(rows, row_tokens_squared, of_rows, microbatch_tokens_squared, of_microbatches)
  if measures.halves:
    noise = noise._replace(of_microbatches=jnp.zeros_like(loss), of_halves=of_microbatches)
  return Sums(loss, weight, metrics, noise, found.largest)


def _with_squares_of_both(
  model: Model, gradients: Parameters, sums: Sums
) -> tuple[Parameters, Sums]:
  """With what is squared of the one microbatch whose two halves the sums are over."""
  assert sums.noise is not None
  noise = sums.noise._replace(
    microbatch_tokens_squared=partial_sums.of_one(jnp.square(sums.weight.sum())),
    of_microbatches=_squared(model, gradients),
  )
  return gradients, sums._replace(noise=noise)


def _squared(model: Model, gradients: Parameters) -> jax.Array:
  """The squared norm of all gradients, in parts."""
  axes = model.axes()
  squares = by_path(lambda path, g: partial_sums.of_squares(g, axes[path]), gradients)
  return functools.reduce(jnp.add, jax.tree.leaves(squares))
