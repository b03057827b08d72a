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
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters
from maxbatch.pipeline_parallel.schedule import BufferLimits
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays
from maxbatch.training.metrics import NO_METRICS, Metrics
from maxbatch.training.stage_parts import Leaves, ModelParts, divided, joined
from maxbatch.training.stage_residuals import StageInput
from maxbatch.training.stash import Stash, make_stash
from maxbatch.training.state import Sums
from maxbatch.training.tick import PipelineStage

WHOLE, ON_STAGE = PartitionSpec(), PartitionSpec("stage")
BY_STAGE = TimetableArrays(WHOLE, PartitionSpec(None, "stage"), WHOLE)  # pyright: ignore
"""How a timetable is divided: of what differs between stages each has its own."""
_ON_DATA, _PARAMETERS = PartitionSpec(None, "data"), (ON_STAGE, WHOLE)
_TAKEN = {"data", "stage"}


def pipelined_gradients(
  model: Model,
  pipeline: Pipeline,
  mesh: Mesh,
  params: Parameters,
  zeros: Parameters,
  rows: Rows,
  ticks: TimetableArrays,
  capacity: BufferLimits,
  dropout_key: jax.Array,
  metrics: Metrics = NO_METRICS,
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
    metrics: those whose sums are formed.

  Returns:
    Gradients in float32, laid out like the parameters, and the sums of loss, weight and metrics.
  """
  parts = ModelParts(model, dropout_key, metrics)
  local = functools.partial(_local_gradients, parts, pipeline, capacity)
  d_layers, d_rest, sums = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(ON_STAGE, BY_STAGE, _ON_DATA, *(_PARAMETERS,) * 2),
    out_specs=(*_PARAMETERS, WHOLE),
    axis_names=_TAKEN,
    check_vma=False,
  )(jnp.arange(pipeline.stages), ticks, rows, divided(model, params), divided(model, zeros))
  return joined(d_layers, d_rest), sums


def stage_residual_bytes(
  model: Model,
  pipeline: Pipeline,
  mesh: Mesh | AbstractMesh,
  params: Parameters,
  rows: Rows,
  dropout_key: jax.Array,
) -> int:
  """Bytes that a device keeps of one microbatch beside its input, of shapes as above.

  Computes nothing: the mesh may be one whose devices are not here.
  """
  found = 0

  def look(rows: Rows, params: tuple[Leaves, Leaves]) -> None:
    nonlocal found
    layers, microbatch = (
      by_repeat(params[0], pipeline.repeats),
      split_microbatches(rows, pipeline.num_pipeline_microbatches),
    )
    stash = _stash(ModelParts(model, dropout_key), pipeline, layers, params[1], microbatch)
    found = sum(one.local_bytes for one in stash.kept)

  looked = jax.shard_map(
    look,
    mesh=mesh,
    in_specs=(_ON_DATA, _PARAMETERS),
    out_specs=WHOLE,
    axis_names=_TAKEN,
    check_vma=False,
  )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.eval_shape(looked, rows, divided(model, params))
  return found


def _local_gradients(
  parts: ModelParts,
  pipeline: Pipeline,
  capacity: BufferLimits,
  number: jax.Array,
  ticks: TimetableArrays,
  rows: Rows,
  params: tuple[Leaves, Leaves],
  zeros: tuple[Leaves, Leaves],
) -> tuple[Leaves, Leaves, Sums]:
  """What one stage of one replica computes, summed over stages and replicas where it must be."""
  repeats = pipeline.repeats
  layers, rest, microbatch = (
    by_repeat(params[0], repeats),
    params[1],
    split_microbatches(rows, pipeline.num_pipeline_microbatches),
  )
  stage = PipelineStage(
    parts=parts,
    layers=layers,
    rest=rest,
    number=number[0],
    count=pipeline.stages,
    hop=pipeline.hop,
    microbatch=microbatch,
    ticks=ticks,
    stash=_stash(parts, pipeline, layers, rest, microbatch),
  )
  held = stage.run(by_repeat(zeros[0], repeats), zeros[1], capacity)
  d_layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), held.d_layers)
  d_rest, sums = lax.psum((held.d_rest, held.sums), ("data", "stage"))
  return lax.psum(d_layers, "data"), d_rest, sums


def _stash(
  parts: ModelParts,
  pipeline: Pipeline,
  layers: Leaves,
  rest: Leaves,
  microbatch: Callable[[jax.Array], Rows],
) -> Stash:
  """The way from a forward to its backward, for what the layers of a repeat will be given."""

  def given() -> StageInput:
    rows, first = microbatch(jnp.int32(0)), jnp.int32(0)
    one = {path: leaf[0] for path, leaf in layers.items()}
    return StageInput(one, parts.embed(layers, rest, rows), rows, first)

  return make_stash(pipeline.stash, parts, rest, jax.eval_shape(given))


def by_repeat(layers: Leaves, repeats: int) -> Leaves:
  """One repeat's layers after the other's: (repeats · layers, …) → (repeats, layers, …)."""
  return {path: leaf.reshape(repeats, -1, *leaf.shape[1:]) for path, leaf in layers.items()}


def split_microbatches(rows: Rows, num_pipeline_microbatches: int) -> Callable[[jax.Array], Rows]:
  """Microbatches by number: `num_pipeline_microbatches` of the first microbatch, then those of the next.

  Each is cut from the rows of every group of devices that fsdp sets apart, so that no row moves.
  """
  groups = jax.sharding.get_abstract_mesh().shape["fsdp"]

  def split(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], groups, num_pipeline_microbatches, -1, *x.shape[2:])

  passes = jax.tree.map(split, rows)

  def microbatch(number: jax.Array) -> Rows:
    def one(x: Any) -> jax.Array:
      microbatch, chunk = jnp.divmod(number, x.shape[2])
      return x[microbatch, :, chunk].reshape(-1, *x.shape[4:])

    return jax.tree.map(one, passes)

  return microbatch
