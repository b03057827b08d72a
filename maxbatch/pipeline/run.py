"""Gradients of a step's microbatches with the layers divided over stages, as a timetable says.

R rows of a microbatch, T tokens.

A shard_map takes over the axes `stage` and `data`: each stage runs its ticks on its own layers, and
each replica its own microbatches. The other axes stay with the compiler. The timetable is data, so
that another number of passes runs the same program.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxbatch.batch.pipelining import Pipeline
from maxbatch.models.registry import Model, Parameters
from maxbatch.pipeline.parts import Leaves, Parts, divided, joined
from maxbatch.pipeline.rows_of_ticks import Ticks
from maxbatch.pipeline.schedule import Limits
from maxbatch.pipeline.tick import Stage
from maxbatch.rows import Rows
from maxbatch.state import Sums

WHOLE, ON_STAGE = PartitionSpec(), PartitionSpec("stage")
BY_STAGE = Ticks(WHOLE, PartitionSpec(None, "stage"), WHOLE)  # pyright: ignore
"""How a timetable is divided: of what differs between stages each has its own."""
_ON_DATA = PartitionSpec(None, "data")


def pipelined_gradients(
  model: Model,
  pipeline: Pipeline,
  mesh: Mesh,
  params: Parameters,
  zeros: Parameters,
  rows: Rows,
  ticks: Ticks,
  room: Limits,
  dropout_key: jax.Array,
) -> tuple[Parameters, Sums]:
  """Gradients and loss, summed over all tokens of the timetable's microbatches.

  Args:
    model: the model.
    pipeline: how layers and batch are divided.
    mesh: the devices.
    params: the parameters, the layers in the order of the stages.
    zeros: float32 zeros of their shapes, where the sums may be formed.
    rows: passes (k, B, T), B divided over the data and fsdp axes; each is cut into microbatches,
      numbered pass by pass.
    ticks: the timetable.
    room: the slots of its buffers.
    dropout_key: the run's dropout key.

  Returns:
    Gradients in float32, laid out like the parameters, and the sums of loss and weight.
  """
  local = functools.partial(_local_gradients, Parts(model, dropout_key), pipeline, room)
  d_layers, d_rest, sums = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(ON_STAGE, BY_STAGE, _ON_DATA, *((ON_STAGE, WHOLE),) * 2),
    out_specs=(ON_STAGE, WHOLE, WHOLE),
    axis_names={"data", "stage"},
    check_vma=False,
  )(jnp.arange(pipeline.stages), ticks, rows, divided(model, params), divided(model, zeros))
  return joined(d_layers, d_rest), sums


def _local_gradients(
  parts: Parts,
  pipeline: Pipeline,
  room: Limits,
  number: jax.Array,
  ticks: Ticks,
  rows: Rows,
  params: tuple[Leaves, Leaves],
  zeros: tuple[Leaves, Leaves],
) -> tuple[Leaves, Leaves, Sums]:
  """What one stage of one replica computes, summed over stages and replicas where it must be."""
  repeats = pipeline.repeats
  stage = Stage(
    parts=parts,
    layers=by_repeat(params[0], repeats),
    rest=params[1],
    number=number[0],
    count=pipeline.stages,
    hop=pipeline.hop,
    microbatch=cut(rows, pipeline.cuts),
    ticks=ticks,
  )
  held = stage.run(by_repeat(zeros[0], repeats), zeros[1], room)
  d_layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), held.d_layers)
  d_rest, sums = lax.psum((held.d_rest, held.sums), ("data", "stage"))
  return lax.psum(d_layers, "data"), d_rest, sums


def by_repeat(layers: Leaves, repeats: int) -> Leaves:
  """One repeat's layers after the other's: (repeats · layers, …) → (repeats, layers, …)."""
  return {path: leaf.reshape(repeats, -1, *leaf.shape[1:]) for path, leaf in layers.items()}


def cut(rows: Rows, cuts: int) -> Callable[[jax.Array], Rows]:
  """Microbatches by number: `cuts` of the first pass, then those of the next.

  Each is cut from the rows of every group of devices that fsdp sets apart, so that no row moves.
  """
  groups = jax.sharding.get_abstract_mesh().shape["fsdp"]

  def split(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], groups, cuts, -1, *x.shape[2:])

  passes = jax.tree.map(split, rows)

  def microbatch(number: jax.Array) -> Rows:
    def one(x: Any) -> jax.Array:
      return x[number // cuts, :, number % cuts].reshape(-1, *x.shape[4:])

    return jax.tree.map(one, passes)

  return microbatch
