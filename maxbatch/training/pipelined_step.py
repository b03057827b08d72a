"""Gradients of a step, and the loss of a batch, with the layers divided over pipeline stages.

B rows of a batch, R of a microbatch, T tokens.

A shard_map makes the mesh axes `stage` and `data` manual: each stage runs the ticks of the timetable
on its own layers, and each replica on its own microbatches. The other axes are left to the
compiler. The timetable is an argument, so that any number of accumulation steps runs the same
program.
"""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from maxbatch.core.accumulate import Accumulate, Accumulated, Squares
from maxbatch.core.terms import Ratio, Sum, over_replicas, zeros_of
from maxbatch.core.terms import joined as joined_sums
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters, joined
from maxbatch.pipeline_parallel.schedule import BufferLimits
from maxbatch.pipeline_parallel.sizes import EvalMicrobatches, Pipeline, eval_microbatches
from maxbatch.pipeline_parallel.timetable_arrays import (
  TimetableArrays,
  buffer_capacity,
  forward_only_arrays,
)
from maxbatch.training.accumulate import group_squares
from maxbatch.training.expert_load import tokens_of
from maxbatch.training.metrics import NO_METRICS, Metrics, Quotient
from maxbatch.training.model_parts import (
  FlatParams,
  ModelParts,
  StageSums,
  merge_layers,
  split_layers,
  stage_order,
  step_denominators,
  term_gradients,
  zero_stage_sums,
)
from maxbatch.training.objective import LOSS, PROBES, TEXT, Loss, model_sums, noise_stats
from maxbatch.training.stage_noise import StageSquares, stage_noise
from maxbatch.training.stage_state import cast_once, row_groups, split_microbatches, split_repeats
from maxbatch.training.stash import NoStash, StageInput, Stash, make_stash
from maxbatch.training.state import NOTHING, Measures, Sums
from maxbatch.training.tick import PipelineStage

_REPLICATED, _OVER_STAGE = PartitionSpec(), PartitionSpec("stage")
_TIMETABLE_SPECS = TimetableArrays(_REPLICATED, PartitionSpec(None, "stage"), _REPLICATED)  # pyright: ignore
"""Specs of arrays [ticks, stages], of which every stage has its own column."""
_OVER_DATA, _PARAMETER_SPECS = PartitionSpec(None, "data"), (_OVER_STAGE, _REPLICATED)
_MANUAL_AXES = {"data", "stage"}


def pipelined_accumulate(
  model: Model,
  pipeline: Pipeline,
  mesh: Mesh,
  frozen: Parameters | None = None,
  dropout_key: jax.Array | None = None,
  measures: Measures = NOTHING,
  scale: jax.Array | None = None,
  capacity: BufferLimits | None = None,
  loss: Loss = TEXT,
) -> Accumulate:
  """Returns the function that sums a model's loss and gradients over a step's microbatches.

  Its rows are accumulation steps (k, B, T), B divided over the axes that divide batches. Each is divided
  into num_pipeline_microbatches; they are numbered one accumulation step after another. In place of a
  number of microbatches it takes their timetable. Layers are in the order of the stages.

  Args:
    measures: what is summed up besides. The squares are those of the pipeline's microbatches, or where the
      parts of a dispatch are compared, of these: each then has a timetable of its own.
    scale: float32 scalar by which the gradients, not the loss, are multiplied; None: by nothing.
    capacity: slots of a stage's buffers; None: as many as the pipeline's schedule needs.
    loss: what is minimized.
  """
  parts = ModelParts(model, dropout_key, measures.metrics, loss)
  capacity = capacity or buffer_capacity(pipeline)
  local = functools.partial(_local_gradients, parts, pipeline, capacity, measures)

  def run(
    params: Parameters,
    rows: Any,
    num_microbatches: TimetableArrays,
    keys: jax.Array | None = None,
    *,
    zeros: Any = None,
    denominators: Any = None,
  ) -> Accumulated:
    del keys  # They are made of the rows' samples.
    if zeros is None:
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    needed, ticks = any(model.own_sums) or measures.noise(model), num_microbatches
    if skipped := None if needed else loss.without_gradient(rows):
      ticks = ticks._replace(num_ticks=jnp.where(skipped[0], 0, ticks.num_ticks))
    d_layers, d_rest, sums, own, squares, of_probes = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(
        *(_OVER_STAGE, _TIMETABLE_SPECS, _OVER_DATA),
        *(_PARAMETER_SPECS, _PARAMETER_SPECS, _REPLICATED, _REPLICATED),
      ),
      out_specs=(*_PARAMETER_SPECS, *(_REPLICATED,) * 4),
      axis_names=_MANUAL_AXES,
      check_vma=False,
    )(
      jnp.arange(pipeline.stages),
      jax.tree.map(jnp.asarray, ticks),
      rows,
      split_layers(model, joined(params, frozen or {})),
      split_layers(model, zeros),
      scale,
      denominators,
    )
    if skipped:
      sums = jax.tree.map(functools.partial(jnp.where, skipped[0]), StageSums(*skipped[1]), sums)
    of_loss, of_model = model_sums(sums[0], sums[1], None), model_sums(*own, None)
    terms = OrderedDict(of_loss[0] | of_model[0])
    stats = of_loss[1] | of_model[1]
    if measures.noise(model):
      of_rows = jax.tree.map(lambda x_k: x_k.sum(0), jax.vmap(noise_stats)(loss.rows(rows)))
      stats |= of_rows | {PROBES: Sum(unflatten_dict(of_probes))}
    return Accumulated(merge_layers(d_layers, d_rest), terms, stats, squares)

  return run


def pipelined_sums(
  model: Model,
  pipeline: Pipeline,
  mesh: Mesh,
  params: Parameters,
  rows: Rows,
  metrics: Metrics = NO_METRICS,
) -> Sums:
  """Returns loss, without dropout and z-loss, weight and metrics, summed over all tokens of any batch
  (B, T) with B divided over the axes that divide batches; the layers are in the order of the stages."""
  rows_each = rows.inputs.shape[0] // mesh.shape["data"] // row_groups(mesh.shape)
  sizes = eval_microbatches(pipeline, rows_each)
  local = functools.partial(_local_sums, ModelParts(model, None, metrics), pipeline, sizes)
  terms, stats = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(_OVER_STAGE, _TIMETABLE_SPECS, PartitionSpec("data"), _PARAMETER_SPECS),
    out_specs=_REPLICATED,
    axis_names=_MANUAL_AXES,
    check_vma=False,
  )(
    jnp.arange(pipeline.stages),
    jax.tree.map(jnp.asarray, forward_only_arrays(pipeline, sizes.microbatches)),
    rows,
    split_layers(model, params),
  )
  of_tokens = {
    name: Quotient(stat.numerator, None if metric.per is None else stat.denominator)
    for name, metric in metrics.of_tokens
    if isinstance(stat := stats[name], Ratio)
  }
  return Sums(terms[LOSS].numerator, terms[LOSS].denominator, of_tokens)


def pipelined_tokens(
  model: Model, mesh: Mesh, loss: Loss, dropout_key: jax.Array, pipeline: Pipeline
) -> Callable[[Parameters, Any, TimetableArrays], jax.Array]:
  """Returns the function from parameters, what a dispatch is fed, and its timetable to the tokens of each
  expert, int32[L, E]: all forwards of the timetable, without the head.

  The timetable must use inputs as they arrive, as all do but circular ones with repeats.
  """
  local = functools.partial(_local_tokens, ModelParts(model, dropout_key, objective=loss), pipeline)
  sharded = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(_OVER_STAGE, _TIMETABLE_SPECS, _OVER_DATA, _PARAMETER_SPECS),
    out_specs=_REPLICATED,
    axis_names=_MANUAL_AXES,
    check_vma=False,
  )

  def run(parameters: Parameters, rows: Any, ticks: TimetableArrays) -> jax.Array:
    given = jax.tree.map(jnp.asarray, ticks), rows, split_layers(model, parameters)
    return sharded(jnp.arange(pipeline.stages), *given)

  return run


def stage_residual_bytes(
  model: Model,
  pipeline: Pipeline,
  mesh: Mesh | AbstractMesh,
  params: Parameters,
  rows: Rows,
  dropout_key: jax.Array,
) -> int:
  """Returns bytes of one microbatch's residuals on one device, without its input.

  `params` are all parameters, `rows` accumulation steps (k, B, T), or shapes: it is only traced.
  """
  result = 0

  def trace(rows: Rows, params: tuple[FlatParams, FlatParams]) -> None:
    nonlocal result
    layers, microbatch = (
      split_repeats(params[0], pipeline.repeats),
      split_microbatches(rows, pipeline.num_pipeline_microbatches),
    )
    stash = _make_stash(ModelParts(model, dropout_key), pipeline, layers, params[1], microbatch)
    result = sum(residual.local_bytes for residual in stash.residuals)

  sharded_trace = jax.shard_map(
    trace,
    mesh=mesh,
    in_specs=(_OVER_DATA, _PARAMETER_SPECS),
    out_specs=_REPLICATED,
    axis_names=_MANUAL_AXES,
    check_vma=False,
  )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.eval_shape(sharded_trace, rows, split_layers(model, params))
  return result


def _local_gradients(
  parts: ModelParts,
  pipeline: Pipeline,
  capacity: BufferLimits,
  measures: Measures,
  stage_index: jax.Array,
  ticks: TimetableArrays,
  rows: Any,
  params: tuple[FlatParams, FlatParams],
  zeros: tuple[FlatParams, FlatParams],
  scale: jax.Array | None,
  denominators: Mapping[str, jax.Array] | None,
) -> tuple[FlatParams, FlatParams, StageSums, StageSums, Squares | None, FlatParams]:
  """Runs one stage of one replica, and sums its results over stages and replicas as needed."""
  layers, rest = split_repeats(params[0], pipeline.repeats), params[1]
  microbatch = split_microbatches(parts.in_order(rows), pipeline.num_pipeline_microbatches)
  layers = cast_once(parts, layers, rest, microbatch)
  stash = _make_stash(parts, pipeline, layers, rest, microbatch)
  own, d_terms = zero_stage_sums(parts.model), {}
  if own.terms:
    if denominators is None:
      given = stage_index[0], (layers, rest), microbatch, ticks
      denominators = step_denominators(parts, pipeline, *given)
    d_terms = term_gradients(parts.model, denominators, scale)
  of_step = ticks, stash, capacity, scale, own, d_terms
  stage = PipelineStage(parts, pipeline, stage_index[0], layers, rest, microbatch, *of_step)
  if not measures.noise(parts.model):
    result, _ = _run(stage, zeros)
    d_layers = lax.psum(result.d_layers, "data")
    return d_layers, *over_replicas(result.others, ("data", "stage")), None, {}
  order, of_rows, squares = stage_order(pipeline), {}, None
  numbers = jnp.asarray(order.reshape(pipeline.stages, -1))[stage_index[0]]
  if parts.objective.compares_parts:
    result, of_parts = _by_part(stage, zeros, numbers, jax.tree.leaves(rows)[0].shape[0])
    of_microbatches = of_parts.of_replicas, of_parts.replica_divisors
  else:
    of_microbatches, given = (
      measures.microbatch_squares,
      (microbatch(jnp.int32(0)), capacity.inputs),
    )
    noise = stage_noise(
      parts, stage_index[0], layers, rest, *given, of_microbatches=of_microbatches
    )
    result, measured = _run(dataclasses.replace(stage, noise=noise), zeros)
    assert measured is not None
    result = result._replace(others=over_replicas(result.others, "stage"))
    of_rows = measured.by_probe(numbers, order.size)
    of_microbatches = measured.on_replica() if of_microbatches else None
  if of_microbatches:
    of_replica = _squares(parts.model, numbers, result)
    squares = Squares(*of_microbatches, of_replica.of_replicas, of_replica.replica_divisors)
  others = over_replicas((*result.others, squares, of_rows), "data")
  return lax.psum(result.d_layers, "data"), *others


class _StageResult(NamedTuple):
  """What a stage sums over a timetable."""

  d_layers: FlatParams
  others: tuple[FlatParams, StageSums, StageSums]
  """Gradients of the other parameters, the loss, and what the layers hand out: its share, or all stages'."""


def _run(
  stage: PipelineStage, zeros: tuple[FlatParams, FlatParams]
) -> tuple[_StageResult, StageSquares | None]:
  """Runs a timetable."""
  state = stage.run(split_repeats(zeros[0], stage.pipeline.repeats), zeros[1])
  d_layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state.d_layers)
  return _StageResult(d_layers, (state.d_rest, state.sums, state.own)), state.squares


def _by_part(
  stage: PipelineStage, zeros: tuple[FlatParams, FlatParams], numbers: jax.Array, num_parts: int
) -> tuple[_StageResult, Squares]:
  """Runs the timetable for one part of a dispatch after the other; returns the sums, of all stages, and the
  squares of the parts."""

  def of_part(part: jax.Array) -> tuple[_StageResult, Squares]:
    first = part * stage.pipeline.num_pipeline_microbatches
    one = dataclasses.replace(stage, microbatch=lambda number: stage.microbatch(first + number))
    new, _ = _run(one, jax.tree.map(jnp.zeros_like, zeros))
    new = new._replace(others=over_replicas(new.others, "stage"))
    return new, _squares(stage.parts.model, numbers, new)

  def add(part: jax.Array, total: Any) -> Any:
    result, squares = joined_sums(total, of_part(part))
    d_rest, *sums = result.others
    like_params = stage.layout.constrain_like_params
    return _StageResult(like_params(result.d_layers), (like_params(d_rest), *sums)), squares

  none = _StageResult(zeros[0], (zeros[1], stage.parts.zero_loss, stage.own))
  of_none = zeros_of(jax.eval_shape(of_part, jnp.int32(0))[1])
  return lax.fori_loop(0, num_parts, add, (none, of_none))


def _squares(model: Model, numbers: jax.Array, result: _StageResult) -> Squares:
  """Returns the squares of this replica as one part, of which this stage has layers of these numbers; norms
  in parts."""
  d_rest, sums, _ = result.others
  norm = lax.psum(group_squares(model, result.d_layers, numbers), "stage")
  norm += group_squares(model, d_rest)
  weight_squared = jnp.square(sums.terms[LOSS].denominator)
  return Squares(norm, weight_squared, norm, weight_squared)


def _local_sums(
  parts: ModelParts,
  pipeline: Pipeline,
  sizes: EvalMicrobatches,
  stage_index: jax.Array,
  ticks: TimetableArrays,
  rows: Rows,
  params: tuple[FlatParams, FlatParams],
) -> StageSums:
  """Runs the forwards of one stage of one replica, and sums its results over both."""
  layers, rest = split_repeats(params[0], pipeline.repeats), params[1]
  microbatch = split_microbatches(parts.in_order(_pad_rows(rows, sizes)), sizes.microbatches)
  stash = NoStash(parts, rest)
  stage = PipelineStage(parts, pipeline, stage_index[0], layers, rest, microbatch, ticks, stash)
  return over_replicas(stage.run({}, {}).sums, ("data", "stage"))


def _local_tokens(
  parts: ModelParts,
  pipeline: Pipeline,
  stage_index: jax.Array,
  ticks: TimetableArrays,
  rows: Any,
  params: tuple[FlatParams, FlatParams],
) -> jax.Array:
  """Runs the forwards of one stage of one replica, and sums the tokens of its experts over both."""
  layers, rest = split_repeats(params[0], pipeline.repeats), params[1]
  microbatch = split_microbatches(parts.in_order(rows), pipeline.num_pipeline_microbatches)
  no_loss = ticks.all_stages._replace(loss=jnp.zeros_like(ticks.all_stages.loss))
  ticks, stash = ticks._replace(all_stages=no_loss), NoStash(parts, rest)
  given = parts, pipeline, stage_index[0], layers, rest, microbatch, ticks, stash
  stage = PipelineStage(*given, own=zero_stage_sums(parts.model))
  return lax.psum(tokens_of(stage.run({}, {}).own.stats), ("data", "stage"))


def _pad_rows(rows: Rows, sizes: EvalMicrobatches) -> Rows:
  """Pads the rows of every group of devices with zeros: (B, …) → (1, B', …)."""
  groups = row_groups(jax.sharding.get_abstract_mesh().shape)

  def pad(x: jax.Array) -> jax.Array:
    by_group = x.reshape(groups, -1, *x.shape[1:])
    missing = sizes.capacity - by_group.shape[1]
    ends = ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 1))
    return (jnp.pad(by_group, ends) if missing else by_group).reshape(1, -1, *x.shape[1:])

  return jax.tree.map(pad, rows)


def _make_stash(
  parts: ModelParts,
  pipeline: Pipeline,
  layers: FlatParams,
  rest: FlatParams,
  microbatch: Callable[[jax.Array], Any],
) -> Stash:
  """Returns the stash for the shapes that the layers of one repeat get."""

  def stage_input() -> StageInput:
    rows, first = parts.objective.rows(microbatch(jnp.int32(0))), jnp.int32(0)
    return StageInput(layers, first, parts.embed(layers, rest, rows), rows, first)

  return make_stash(pipeline.stash, parts, rest, jax.eval_shape(stage_input))
