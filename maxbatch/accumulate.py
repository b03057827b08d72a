"""Gradients of many microbatches as one sum, reduced over the data axis once.

k microbatches, B rows of a microbatch over all devices, T tokens.

A plain loop under jit would sum gradients between devices after every microbatch. Here a shard_map
takes over the data axis: each replica adds up its own microbatches, and one psum after the loop
joins the replicas. The other axes stay with the compiler. The number of trips is data, so that
another number of microbatches runs the same program.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from maxbatch.loss import loss_sum
from maxbatch.models.registry import Model, Parameters
from maxbatch.rows import Rows
from maxbatch.sharding import constrain
from maxbatch.state import Sums, zero_sums


def summed_gradients(
  model: Model,
  mesh: Mesh,
  params: Parameters,
  zeros: Parameters,
  rows: Rows,
  trips: jax.Array,
  dropout_key: jax.Array,
) -> tuple[Parameters, Sums]:
  """Gradients and loss, summed over all tokens of the first `trips` microbatches.

  Args:
    model: the model.
    mesh: the devices.
    params: the parameters.
    zeros: float32 zeros of the parameters' shapes, where the sums may be formed: donated ones
      save the memory of a second set.
    rows: microbatches (k, B, T), B divided over the data and fsdp axes.
    trips: int32 scalar, at most k; what lies beyond is never read. With k of 1 it must be 1.
    dropout_key: the run's dropout key.

  Returns:
    Gradients in float32, laid out like the parameters, and the sums of loss and weight.
  """
  local = functools.partial(_local_sums, model)
  if mesh.shape["data"] == 1:
    return local(params, zeros, rows, trips, dropout_key)
  on_data = jax.tree.map(lambda _: PartitionSpec(None, "data"), rows)
  whole = PartitionSpec()
  return jax.shard_map(
    lambda *arguments: jax.lax.psum(local(*arguments), "data"),
    mesh=mesh,
    in_specs=(whole, whole, on_data, whole, whole),
    out_specs=whole,
    axis_names={"data"},
    check_vma=False,
  )(params, zeros, rows, trips, dropout_key)


def _local_sums(
  model: Model,
  params: Parameters,
  zeros: Parameters,
  rows: Rows,
  trips: jax.Array,
  dropout_key: jax.Array,
) -> tuple[Parameters, Sums]:
  """The sums of one replica's microbatches."""
  axes = model.axes()

  def laid_out(gradients: Parameters) -> Parameters:
    return jax.tree_util.tree_map_with_path(
      lambda path, g: constrain(g, axes[tuple(entry.key for entry in path)]), gradients
    )

  def add_microbatch(index: jax.Array, carry: tuple[Parameters, Sums]) -> tuple[Parameters, Sums]:
    gradients, sums = carry
    micro = jax.tree.map(lambda x: x[index], rows)
    loss, new = jax.value_and_grad(lambda p: loss_sum(model, p, micro, dropout_key))(params)
    # Without the barrier XLA moves reductions over fsdp behind the loop, and the loop then carries
    # whole gradients on every device: for Llama-2-7B on 256 TPUs 2 of 5.7 GiB.
    new = jax.lax.optimization_barrier(new)
    gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, new)
    return laid_out(gradients), Sums(sums.loss + loss, sums.weight + micro.weights.sum())

  nothing = laid_out(zeros), zero_sums()
  if rows.inputs.shape[0] == 1:
    # No loop around a single microbatch: the TPU compiler otherwise computes parts of it twice.
    return add_microbatch(jnp.int32(0), nothing)
  return jax.lax.fori_loop(0, trips, add_microbatch, nothing)
