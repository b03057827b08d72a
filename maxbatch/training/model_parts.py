"""A model in parts that a pipeline runs at different times: embedding, layers, loss.

R rows of a microbatch, T tokens, D width of the residual stream.

In memory the layers are in stage order: stage by stage, and within a stage repeat by repeat. With
repeats this differs from the model's order, but no step then moves parameters between stages.
Checkpoints are in the model's order, so a run can resume with another schedule or without one.

Terms and statistics that layers hand out are summed over ticks, stages and replicas. A term enters the
backward of the stage that forms it, with its weight in the step's objective. That takes the denominators
of the whole step, which are summed over its rows before the first tick.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.core import Tracer

from maxbatch.core.terms import (
  Ratio,
  Stats,
  Terms,
  joined,
  over_replicas,
  term_weights,
  zeros_of,
)
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import auto_axis_sizes
from maxbatch.models.layers import Outputs, outputs_of, whole_sums
from maxbatch.models.probes import TiedProbe
from maxbatch.models.registry import (
  DENSE_LAYERS,
  LayeredModel,
  MeasuredModel,
  Model,
  Parameters,
  UnevenModel,
  build_model,
)
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays
from maxbatch.training.loss import TokenShare, row_keys, row_order
from maxbatch.training.metrics import NO_METRICS, Metrics
from maxbatch.training.objective import LOSS, TEXT, Loss, zero_model_sums, zero_stats
from maxbatch.training.optimizer import parameter_of
from maxbatch.training.partial_sums import AT_ONCE

FlatParams = dict[tuple[str, ...], jax.Array]
"""Parameters, or an array for each of them (gradients, sums), by path."""


def is_layered(model: Model, path: tuple[str, ...]) -> bool:
  """Returns whether a parameter belongs to the layers that stages divide, which are stacked along its first
  dim."""
  return model.axes()[path][:1] == ("layers",) and path[0] != DENSE_LAYERS


def split_layers(model: Model, tree: Parameters) -> tuple[FlatParams, FlatParams]:
  """Splits parameters into those of the layers and all others."""
  flat = cast(FlatParams, flatten_dict(tree))
  layers = {path: leaf for path, leaf in flat.items() if is_layered(model, path)}
  return layers, {path: leaf for path, leaf in flat.items() if path not in layers}


def trained(model: Model, flat: FlatParams) -> FlatParams:
  """Returns those of some parameters that train."""
  return {path: leaf for path, leaf in flat.items() if path not in model.frozen}


def merge_layers(layers: FlatParams, rest: FlatParams) -> Parameters:
  """Returns the inverse of `split_layers`."""
  return unflatten_dict(layers | rest)


def zero_probes(model: Model, rows: int) -> tuple[FlatParams, FlatParams]:
  """Returns zeros for the probes of one of the layers that stages divide, (1, R, S), and for all others, of
  which those of other layers have their number in front, to differentiate by (models/probes.py)."""
  probes = cast(FlatParams, flatten_dict(model.probes(rows, auto_axis_sizes()["tensor"])))
  layers = {path: leaf[:1] for path, leaf in probes.items() if _is_of_layers(path, leaf.ndim - 2)}
  return layers, {path: leaf for path, leaf in probes.items() if path not in layers}


def _is_of_layers(path: tuple[str, ...], lead: int) -> bool:
  return lead > 0 and path[0] != DENSE_LAYERS


class LossProbes(NamedTuple):
  """Zeros to differentiate the loss of whole rows by."""

  by_path: FlatParams
  """(R, S) each."""
  tied_RTD: jax.Array | None
  """Of a table that is the output matrix too, to whose gradient both add: `TiedProbe.cross_BTD`."""


@dataclasses.dataclass(frozen=True)
class ModelParts:
  """The parts of a model, each a function of the layers' and the other parameters."""

  model: Model
  dropout_key: jax.Array | None
  """None for evaluation: without dropout and without z-loss."""
  metrics: Metrics = NO_METRICS
  objective: Loss = TEXT

  def embed(self, layers: FlatParams, rest: FlatParams, rows: Rows) -> jax.Array:
    """Returns the input of the first of the layers that stages divide: (R, T, D)."""
    return self.measured_embed(layers, rest, rows, {})[0]

  def measured_embed(
    self, layers: FlatParams, rest: FlatParams, rows: Rows, probes: FlatParams
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns `embed`, with these probes, and of a table that is the output matrix too the zeros by which
    the loss of the rows is to be differentiated: `LossProbes.tied_RTD`."""
    bound, keys_R = self._bind(layers, rest, probes), row_keys(self.model, self.dropout_key, rows)
    rows = self._placed(rows)
    x_RTD = bound.embed(rows, keys_R)
    tied = bound.output_probe() if isinstance(bound, MeasuredModel) else None
    x_RTD = bound.first_layers(x_RTD, rows, keys_R) if isinstance(bound, UnevenModel) else x_RTD
    return x_RTD, tied.cross_BTD if isinstance(tied, TiedProbe) else None

  @property
  def num_first_layers(self) -> int:
    """Layers that `embed` applies."""
    return self.model.config.first_num_dense_layers

  def apply_layers(
    self,
    layers: FlatParams,
    rest: FlatParams,
    x_RTD: jax.Array,
    rows: Rows,
    first_layer: jax.Array,
    probes: FlatParams | None = None,
  ) -> Outputs:
    """Applies the layers, the first of which is layer `first_layer` of the model, with their probes, if any.

    Their terms are scalars; all sums of floats are in float32.
    """
    keys_R = row_keys(self.model, self.dropout_key, rows)
    bound = self._bind(layers, rest, probes)
    y_RTD, terms, stats = outputs_of(
      bound.apply_layers(x_RTD, self._placed(rows), keys_R, first_layer)
    )
    return Outputs(y_RTD, *whole_sums(terms, stats))

  def loss(
    self,
    layers: FlatParams,
    rest: FlatParams,
    y_RCD: jax.Array,
    microbatch: Any,
    cut: Callable[[jax.Array], jax.Array] = lambda x_RT: x_RT,
    counts_rows: jax.Array | None = None,
    scale: jax.Array | None = None,
    probes: LossProbes | None = None,
  ) -> "StageSums":
    """Returns the loss of some tokens, and its statistics, as scalars.

    Args:
      y_RCD: of the last layer.
      microbatch: what the step is fed of it, all of its tokens.
      cut: from an array of all tokens to that of these, as in `TokenShare`.
      counts_rows: whether what is counted by row is counted here, likewise.
      scale: by which gradients are multiplied.
      probes: of whole rows; None: nothing is measured.
    """
    bound = self._bind(layers, rest, probes.by_path if probes else None)
    share = TokenShare(
      self.model,
      bound.normalize(y_RCD),
      bound.output_matrix(),
      self._output_probe(bound, self.objective.rows(microbatch), cut, probes),
      cut=cut,
      counts_rows=counts_rows,
      form=AT_ONCE,
      is_training=self.dropout_key is not None,
    )
    loss, stats = self.objective.of_share(share, microbatch, self.metrics, scale)
    return StageSums({LOSS: loss}, stats)

  @property
  def zero_loss(self) -> "StageSums":
    """The loss of no tokens, and its statistics."""
    zero, (_, of_model) = jnp.zeros((), jnp.float32), self.model.own_sums
    stats = zero_stats(self.metrics)
    own = {name: stat for name, stat in stats.items() if name not in of_model}
    return StageSums({LOSS: Ratio(zero, zero)}, own)

  def with_twice_the_heads(self, length: int) -> "ModelParts":
    """Returns the model with twice the heads and feed-forward width, for rows of `length`."""
    config = self.model.config
    wider = dataclasses.replace(
      config,
      base_num_query_heads=2 * config.base_num_query_heads,
      base_num_kv_heads=2 * config.base_num_kv_heads,
      base_mlp_dim=2 * config.base_mlp_dim,
    )
    given, probes = (self.model.trainable, self.model.policy), self.model.probes_kept
    model = build_model(wider, length, probes, *given)
    return dataclasses.replace(self, model=model)

  def in_order(self, batch: Any) -> Any:
    """Returns what a step is fed (k, B, T) with the tokens of rows in the order in which all parts take them."""
    order_T = row_order(self.model, self.objective.rows(batch))
    if order_T is None:
      return batch
    return jax.vmap(lambda one: self.objective.in_order(one, order_T))(batch)

  def _placed(self, rows: Rows) -> Rows:
    """Returns rows that say where their tokens were read; while parts hand them on they are arrays alone."""
    return rows._replace(places=row_order(self.model, rows))

  def _bind(
    self, layers: FlatParams, rest: FlatParams, probes: FlatParams | None = None
  ) -> LayeredModel:
    parameters = merge_layers(layers, rest)
    if not self.model.has_probes:
      return bind_layered(self.model, parameters)
    # Those that measure nothing are scalars, of layers one for each that is bound.
    count = len(next(iter(layers.values())))
    unmeasured = {
      probed.path: jnp.zeros(count)
      for probed in self.model.probed()
      if _is_of_layers(probed.path, probed.num_layers)
    }
    return bind_layered(self.model, parameters, unflatten_dict(unmeasured | (probes or {})))

  def _output_probe(
    self,
    bound: LayeredModel,
    rows: Rows,
    cut: Callable[[jax.Array], jax.Array],
    probes: LossProbes | None,
  ) -> jax.Array | TiedProbe | None:
    if probes is None or not isinstance(bound, MeasuredModel):
      return None
    if probes.tied_RTD is None:
      return bound.output_probe()
    # The lookup hands it over; nothing else of this one is used.
    bound.embed(jax.tree.map(cut, rows), None)
    tied = bound.output_probe()
    return tied._replace(cross_BTD=probes.tied_RTD) if isinstance(tied, TiedProbe) else tied


def bind_layered(
  model: Model, parameters: Parameters, probes: Parameters | None = None
) -> LayeredModel:
  """Returns the model with these parameters and probes, to be called part by part.

  Raises:
    UserError: the model cannot be called in parts.
  """
  bound = model.bind(parameters, probes)
  if not isinstance(bound, LayeredModel):
    raise UserError(
      f"decoder_block={model.config.decoder_block} cannot be divided over a pipeline's stages: it "
      "has no embed, apply_layers and normalize; for example pipeline_schedule=none"
    )
  return bound


def stage_order(pipeline: Pipeline) -> np.ndarray:
  """Returns, for each position in stage order, the index of the layer in the model: int[layers]."""
  sizes = (pipeline.repeats, pipeline.stages, pipeline.layers)
  return np.arange(np.prod(sizes)).reshape(sizes).transpose(1, 0, 2).ravel()


def to_stage_order(model: Model, pipeline: Pipeline | None, tree: Any) -> Any:
  """Returns parameters, or trees like them, from the model's order to the stage order."""
  return _reorder(model, pipeline, tree, inverse=False)


def to_layer_order(model: Model, pipeline: Pipeline | None, tree: Any) -> Any:
  """Returns parameters, or trees like them, from the stage order to the model's order."""
  return _reorder(model, pipeline, tree, inverse=True)


def _reorder(model: Model, pipeline: Pipeline | None, tree: Any, *, inverse: bool) -> Any:
  if pipeline is None or pipeline.repeats == 1:
    return tree
  order = stage_order(pipeline)
  order = np.argsort(order) if inverse else order
  axes = model.axes()

  def reorder_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    # Adafactor's row and column statistics have the layers in front too.
    owner = parameter_of(path, axes)
    layered = owner and is_layered(model, owner) and leaf.shape[:1] == order.shape
    return _take(leaf, order) if layered else leaf

  return jax.tree_util.tree_map_with_path(reorder_leaf, tree)


def _take(leaf: jax.Array, order: np.ndarray) -> jax.Array:
  """Returns `leaf[order]`; outside of jit one array at a time, on the devices, with its sharding kept."""
  if isinstance(leaf, Tracer):
    return leaf[order]
  there = jax.memory.Space.Device
  return jax.jit(lambda x: jax.device_put(x, there)[order], out_shardings=leaf.sharding)(leaf)


class StageSums(NamedTuple):
  """What a stage's layers hand out, or its share of the loss, summed over ticks."""

  terms: Terms
  stats: Stats

  def add(self, new: "StageSums", is_active: jax.Array) -> "StageSums":
    """Returns the sums with those of a forward; what an idle stage computes, NaN too, adds nothing."""
    masked = jax.tree.map(lambda x, zero: jnp.where(is_active, x, zero), new, zeros_of(new))
    return joined(self, masked)


NO_SUMS = StageSums({}, {})


def zero_stage_sums(model: Model) -> StageSums:
  """Returns the sums before the first tick."""
  return StageSums(*zero_model_sums(model))


def stage_sums(model: Model, outputs: Outputs) -> StageSums:
  """Returns what layers hand out.

  Raises:
    UserError: the rest of the model returns something too, and a pipeline never calls the whole of it.
  """
  sums = StageSums(outputs.terms or {}, outputs.stats or {})
  whole, layers = ({*terms, *stats} for terms, stats in (model.own_sums, sums))
  if other := sorted(whole ^ layers):
    raise UserError(
      f"decoder_block={model.config.decoder_block} returns {', '.join(other)} beside what its layers do, "
      "and in a pipeline only layers can; for example pipeline_schedule=none, with "
      "ici_fsdp_parallelism instead of ici_pipeline_parallelism"
    )
  return sums


def term_gradients(
  model: Model, denominators: Mapping[str, jax.Array], scale: jax.Array | None
) -> dict[str, jax.Array]:
  """Returns the gradient of the step's objective by each of the model's numerators, float32 scalars.

  Args:
    denominators: of the whole step, that of the loss included.
    scale: by which gradients are multiplied; None: by nothing.
  """
  own, zero = dict(zero_stage_sums(model).terms), jnp.zeros((), jnp.float32)
  weights = term_weights(OrderedDict({LOSS: Ratio(zero, zero)} | own), denominators)
  return {name: weights[name] * (1.0 if scale is None else scale) for name in own}


def step_denominators(
  parts: ModelParts,
  pipeline: Pipeline,
  stage_index: jax.Array,
  params: tuple[FlatParams, FlatParams],
  microbatch: Callable[[jax.Array], Any],
  ticks: TimetableArrays,
) -> dict[str, jax.Array]:
  """Returns the denominators of a step's terms, summed over its microbatches, stages and replicas.

  They do not depend on the parameters, so the compiler drops the model from this loop.

  Args:
    params: of this stage's layers, (repeats, layers, …), and all others.
    microbatch: a function from the number of a microbatch to what the step is fed of it.
    ticks: the step's timetable.
  """
  layers, rest = params

  def of_microbatch(number: jax.Array) -> dict[str, jax.Array]:
    batch = microbatch(number)
    rows = parts.objective.rows(batch)
    x_RTD = parts.embed(layers, rest, rows)
    of_loss = parts.loss(layers, rest, x_RTD, batch).terms[LOSS]
    total = {LOSS: jnp.where(stage_index == 0, of_loss.denominator, 0.0)}
    for repeat in range(pipeline.repeats):
      chunk = {path: leaf[repeat] for path, leaf in layers.items()}
      first = (repeat * pipeline.stages + stage_index) * pipeline.layers + parts.num_first_layers
      terms = parts.apply_layers(chunk, rest, x_RTD, rows, first).terms or {}
      for name, term in terms.items():
        total[name] = total.get(name, 0.0) + term.denominator
    return total

  def add(number: jax.Array, total: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return joined(total, of_microbatch(number))

  count = ticks.stages.forward.is_active.sum() // pipeline.repeats
  zeros = zeros_of(jax.eval_shape(of_microbatch, jnp.int32(0)))
  return over_replicas(jax.lax.fori_loop(0, count, add, zeros), ("data", "stage"))
