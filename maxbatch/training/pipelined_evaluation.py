"""Loss of a batch with the layers divided over stages, without gradients.

B rows of the batch, R of a microbatch, T tokens, D width, C tokens of a stage's share.

The stages run as in training, each with its own layers only. Without backwards nothing is stashed:
a stage holds one microbatch at a time.
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
from maxbatch.pipeline_parallel.forward_only import forward_only_arrays
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays
from maxbatch.training.metrics import NO_METRICS, Metrics
from maxbatch.training.model_parts import FlatParams, ModelParts, split_layers
from maxbatch.training.pipelined_step import (
  OVER_STAGE,
  REPLICATED,
  TIMETABLE_SPECS,
  split_microbatches,
  split_repeats,
)
from maxbatch.training.stash import InputStash
from maxbatch.training.state import Measures, Sums, zero_sums
from maxbatch.training.tick import PipelineStage


class _ForwardState(NamedTuple):
  """The state of a stage between ticks."""

  outgoing_RTD: jax.Array
  received_RTD: jax.Array | None
  """With delayed forwarding, what the previous stage sent in the previous tick; else None."""
  sums: Sums
  """This stage's share of the loss and the weight."""


@dataclasses.dataclass(frozen=True)
class _ForwardStage(PipelineStage):
  """A stage that runs forwards only."""

  def evaluate(self) -> Sums:
    """Runs all ticks and returns this stage's share of the sums."""
    like = jax.eval_shape(lambda: self._embed(jnp.int32(0)))
    blank_RTD = jnp.zeros(like.shape, like.dtype)
    sums = zero_sums(self.parts.model, Measures(self.parts.metrics))
    initial = _ForwardState(blank_RTD, blank_RTD if self.forwarding_delay > 1 else None, sums)
    return lax.fori_loop(0, self.ticks.num_ticks, self._forward_tick, initial).sums

  def _forward_tick(self, tick: jax.Array, state: _ForwardState) -> _ForwardState:
    entry = jax.tree.map(lambda x: x[tick, 0], self.ticks.stages.forward)
    all_stages = jax.tree.map(lambda x: x[tick], self.ticks.all_stages)
    onward = [(stage, (stage + 1) % self.num_stages) for stage in range(self.num_stages)]
    sent_RTD = lax.ppermute(state.outgoing_RTD, "stage", onward)
    input_RTD = sent_RTD if state.received_RTD is None else state.received_RTD
    y_RTD = self._cond(
      "forward",
      all_stages.forward,
      lambda: self._forward(entry, all_stages.embedding, input_RTD).y_RTD,
      lambda: jnp.zeros_like(input_RTD),
    )
    sums = self._cond(
      "loss",
      all_stages.loss,
      lambda: self._add_loss_share(all_stages.loss_microbatch, y_RTD, state.sums),
      lambda: state.sums,
    )
    return _ForwardState(y_RTD, None if state.received_RTD is None else sent_RTD, sums)

  def _add_loss_share(self, microbatch: jax.Array, y_RTD: jax.Array, sums: Sums) -> Sums:
    """Adds the loss of this stage's share of the tokens of the last stage's output."""
    y_RCD, targets_RC, weights_RC = self._token_share(microbatch, y_RTD)
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
  microbatches = eval_microbatches(
    pipeline, rows.inputs.shape[0] // mesh.shape["data"] // mesh.shape["fsdp"]
  )
  parts = ModelParts(model, None, metrics)
  local = functools.partial(_local_sums, parts, pipeline, microbatches)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(OVER_STAGE, TIMETABLE_SPECS, PartitionSpec("data"), (OVER_STAGE, REPLICATED)),
    out_specs=REPLICATED,
    axis_names={"data", "stage"},
    check_vma=False,
  )(
    jnp.arange(pipeline.stages),
    jax.tree.map(jnp.asarray, forward_only_arrays(pipeline, microbatches.microbatches)),
    rows,
    split_layers(model, params),
  )


def _local_sums(
  parts: ModelParts,
  pipeline: Pipeline,
  microbatches: EvalMicrobatches,
  stage_index: jax.Array,
  ticks: TimetableArrays,
  rows: Rows,
  params: tuple[FlatParams, FlatParams],
) -> Sums:
  """Runs one stage of one replica, and sums its results over stages and replicas."""
  stage = _ForwardStage(
    parts=parts,
    layers=split_repeats(params[0], pipeline.repeats),
    rest=params[1],
    index=stage_index[0],
    num_stages=pipeline.stages,
    forwarding_delay=pipeline.forwarding_delay,
    microbatch=split_microbatches(_pad_rows(rows, microbatches), microbatches.microbatches),
    ticks=ticks,
    stash=InputStash(parts, params[1]),
  )
  return lax.psum(stage.evaluate(), ("data", "stage"))


def _pad_rows(rows: Rows, microbatches: EvalMicrobatches) -> Rows:
  """Pads the rows of every group of devices with zeros: (B, …) → (1, B', …)."""
  groups = jax.sharding.get_abstract_mesh().shape["fsdp"]

  def pad(x: jax.Array) -> jax.Array:
    by_group = x.reshape(groups, -1, *x.shape[1:])
    missing = microbatches.capacity - by_group.shape[1]
    ends = ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 1))
    return (jnp.pad(by_group, ends) if missing else by_group).reshape(1, -1, *x.shape[1:])

  return jax.tree.map(pad, rows)
