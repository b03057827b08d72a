"""Loss of a batch with the layers divided over stages, without gradients.

B rows of the batch, R of a microbatch, T tokens, D width, C tokens of a stage's share.

The stages run as in training, and each needs its own layers only. As nothing goes back, nothing is
kept: a stage holds the one microbatch that passes through it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters
from maxbatch.pipeline_parallel.evaluation import EvalMicrobatches, eval_microbatches
from maxbatch.pipeline_parallel.forward_only import forward_ticks
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays
from maxbatch.training.metrics import NO_METRICS, Metrics
from maxbatch.training.pipelined_step import (
  BY_STAGE,
  ON_STAGE,
  WHOLE,
  by_repeat,
  split_microbatches,
)
from maxbatch.training.stage_parts import Leaves, ModelParts, divided
from maxbatch.training.stash import Inputs
from maxbatch.training.state import Measures, Sums, zero_sums
from maxbatch.training.tick import PipelineStage


class _Passing(NamedTuple):
  """What a stage has from the tick before."""

  made_RTD: jax.Array
  sent_RTD: jax.Array | None
  """With delayed forwarding, the neighbour's output, a tick older."""
  sums: Sums
  """This stage's share of them."""


@dataclasses.dataclass(frozen=True)
class _ForwardStage(PipelineStage):
  """A stage that only goes forward."""

  def evaluate(self) -> Sums:
    """This stage's share of the sums."""
    one = jax.eval_shape(lambda: self._embedded(jnp.int32(0)))
    blank_RTD = jnp.zeros(one.shape, one.dtype)
    sums = zero_sums(self.parts.model, Measures(self.parts.metrics))
    nothing = _Passing(blank_RTD, blank_RTD if self.hop > 1 else None, sums)
    return lax.fori_loop(0, self.ticks.count, self._passed_on, nothing).sums

  def _passed_on(self, tick: jax.Array, before: _Passing) -> _Passing:
    work = jax.tree.map(lambda x: x[tick, 0], self.ticks.stages.forward)
    together = jax.tree.map(lambda x: x[tick], self.ticks.together)
    onward = [(stage, (stage + 1) % self.count) for stage in range(self.count)]
    sent_RTD = lax.ppermute(before.made_RTD, "stage", onward)
    input_RTD = sent_RTD if before.sent_RTD is None else before.sent_RTD
    y_RTD = self._either(
      "forward",
      together.forward,
      lambda: self._forward(work, together.embedding, input_RTD).y_RTD,
      lambda: jnp.zeros_like(input_RTD),
    )
    sums = self._either(
      "loss",
      together.loss,
      lambda: self._with_share(together.loss_microbatch, y_RTD, before.sums),
      lambda: before.sums,
    )
    return _Passing(y_RTD, None if before.sent_RTD is None else sent_RTD, sums)

  def _with_share(self, microbatch: jax.Array, y_RTD: jax.Array, sums: Sums) -> Sums:
    """With the loss of this stage's share of the last stage's output."""
    y_RCD, targets_RC, weights_RC = self._share(microbatch, y_RTD)
    found = self.parts.loss(self.layers, self.rest, y_RCD, targets_RC, weights_RC)
    return sums.add(found, weights_RC.sum())


def pipelined_sums(
  model: Model,
  pipeline: Pipeline,
  mesh: Mesh,
  params: Parameters,
  rows: Rows,
  metrics: Metrics = NO_METRICS,
) -> Sums:
  """Loss, without dropout and z-loss, weight and metrics, summed over all tokens.

  Args:
    model: the model.
    pipeline: how layers and batch are divided.
    mesh: the devices.
    params: the parameters, the layers in the order of the stages.
    rows: any batch (B, T) with B divided over the data and fsdp axes.
    metrics: those whose sums are formed.
  """
  num_pipeline_microbatches = eval_microbatches(
    pipeline, rows.inputs.shape[0] // mesh.shape["data"] // mesh.shape["fsdp"]
  )
  local = functools.partial(
    _local_sums, ModelParts(model, None, metrics), pipeline, num_pipeline_microbatches
  )
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(ON_STAGE, BY_STAGE, PartitionSpec("data"), (ON_STAGE, WHOLE)),
    out_specs=WHOLE,
    axis_names={"data", "stage"},
    check_vma=False,
  )(
    jnp.arange(pipeline.stages),
    jax.tree.map(jnp.asarray, forward_ticks(pipeline, num_pipeline_microbatches.microbatches)),
    rows,
    divided(model, params),
  )


def _local_sums(
  parts: ModelParts,
  pipeline: Pipeline,
  num_pipeline_microbatches: EvalMicrobatches,
  number: jax.Array,
  ticks: TimetableArrays,
  rows: Rows,
  params: tuple[Leaves, Leaves],
) -> Sums:
  """What one stage of one replica computes, summed over stages and replicas."""
  stage = _ForwardStage(
    parts=parts,
    layers=by_repeat(params[0], pipeline.repeats),
    rest=params[1],
    number=number[0],
    count=pipeline.stages,
    hop=pipeline.hop,
    microbatch=split_microbatches(
      _filled_up(rows, num_pipeline_microbatches), num_pipeline_microbatches.microbatches
    ),
    ticks=ticks,
    stash=Inputs(parts, params[1]),
  )
  return lax.psum(stage.evaluate(), ("data", "stage"))


def _filled_up(rows: Rows, num_pipeline_microbatches: EvalMicrobatches) -> Rows:
  """Rows (B, …) with zeros behind those of every group of devices: one pass (1, B', …)."""
  groups = jax.sharding.get_abstract_mesh().shape["fsdp"]

  def filled(x: jax.Array) -> jax.Array:
    by_group = x.reshape(groups, -1, *x.shape[1:])
    missing = num_pipeline_microbatches.capacity - by_group.shape[1]
    ends = ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 1))
    return (jnp.pad(by_group, ends) if missing else by_group).reshape(1, -1, *x.shape[1:])

  return jax.tree.map(filled, rows)
