"""From a Config to a Job ready to run: every part built, checked and compiled in order."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxbatch.batch.host_loads import load_factor, loading_hosts
from maxbatch.batch.row_plan import Segment, dispatches
from maxbatch.config.schema import Config, OptimizerConfig
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology
from maxbatch.data.loader import ChainedLoader, EvalRows, Loader, eval_loader, train_loader
from maxbatch.data.placement import CHECKSUMS, RowPlacement, alone_at_first
from maxbatch.data.reading import read_ahead
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.rows import Dataset, Rows, RowSource, SourceRows
from maxbatch.errors import UserError
from maxbatch.hardware.compiler_flags import (
  CompilerFlags,
  compiled_with,
  compiler_flags,
  is_short_of_vector_memory,
  writes_operands,
)
from maxbatch.hardware.devices import Device
from maxbatch.hardware.sharding import (
  LogicalAxes,
  make_mesh,
  num_processes,
  read_by,
  replicated_dims,
  sharding,
)
from maxbatch.models.flash import resolve_attention
from maxbatch.models.registry import Model, build_model
from maxbatch.models.remat import offload_obstacle
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.precision.loss_scale import LossScaling, scaling_of
from maxbatch.precision.policy import check_quantization, check_range, policy_of
from maxbatch.training.evaluation import EvalStep, traced_eval
from maxbatch.training.expert_load import check_balance
from maxbatch.training.metrics import chosen_metrics
from maxbatch.training.model_parts import bind_layered
from maxbatch.training.objective import TEXT, Loss
from maxbatch.training.optimizer import make_optimizer, without_rate
from maxbatch.training.state import Measures, abstract_stop_flags
from maxbatch.training.step import Step, Trainer, step_function

_KEPT = 8
"""Trainers, and programs of each kind, that this process keeps: one that trains several times, as
critical_batch does, builds, traces and compiles what those runs share only once."""

_FAST_MULTIPLE = 128
"""Multiples for the vocabulary's size: lanes of a TPU's vector unit, columns of its matrix unit."""


def build_trainer(
  config: Config,
  plan: BatchPlan,
  devices: Sequence[Device],
  *,
  keep: bool = True,
  loss: Loss = TEXT,
  num_saved_policies: int = 0,
) -> Trainer:
  """Builds model, optimizer and mesh, none of which holds an array yet.

  Args:
    keep: whether later calls may return this one; not while jax traces, when its random key is none.
    num_saved_policies: parameters of earlier steps that checkpoints hold as well.

  Raises:
    UserError: keys that contradict each other.
  """
  _check_vocabulary(config)
  _check_offloading(config, devices[0].platform)
  _check_calibration(config)
  length = config.batch.max_target_length
  policy = policy_of(config.precision)
  model_config = resolve_attention(config.model, length, devices[0], policy.compute)
  check_range(config.model, policy)
  check_quantization(config, policy)
  model = build_model(model_config, length, config.noise.gns, config.optimizer.trainable, policy)
  _check_rounding(model)
  every_k = _microbatches_per_update(config, plan)
  metrics = loss.metrics(chosen_metrics(config.run.metrics, config.run.plugins))
  pipeline = None
  if config.pipeline.pipeline_schedule != "none":
    pipeline = pipeline_of(config, plan.topology, plan)
    bind_layered(model, model.shapes())
  check_balance(model, pipeline, streamed=streams(config))
  trainer = (_trainer if keep else _trainer.__wrapped__)(
    model,
    without_rate(config.optimizer),
    every_k,
    plan.topology,
    tuple(devices),
    pipeline,
    Measures(metrics, config.noise.gns_from_microbatches),
    streams(config),
    loss,
    num_saved_policies,
    scaling_of(config.precision),
    compiler_flags(config.compile.compiler_flags, devices[0]),
  )
  loading_hosts(plan, num_processes(trainer.mesh))
  return trainer


@functools.lru_cache(_KEPT)
def _trainer(
  model: Model,
  optimizer: OptimizerConfig,
  every_k: optax.Schedule | int,
  layout: Topology,
  devices: tuple[Device, ...],
  pipeline: Pipeline | None,
  measures: Measures,
  streamed: bool,
  loss: Loss,
  num_saved_policies: int,
  loss_scaling: LossScaling | None,
  flags: CompilerFlags,
) -> Trainer:
  return Trainer(
    model=model,
    optimizer=make_optimizer(optimizer, _trained_axes(model), every_k),
    mesh=make_mesh(layout, devices),
    # Another key than the weights', from the same seed.
    dropout_key=jax.random.fold_in(jax.random.key(model.config.init_weights_seed), 1),
    streamed=streamed,
    pipeline=pipeline,
    measures=measures,
    loss=loss,
    num_saved_policies=num_saved_policies,
    loss_scaling=loss_scaling,
    compiler_flags=flags,
    optimizer_on_host=optimizer.optimizer_memory_host_offload,
    over_data=optimizer.shard_optimizer_over_data and layout.shape["data"] > 1,
  )


def _check_calibration(config: Config) -> None:
  experts, every = config.model.num_experts, config.noise.gns_calibrate_every
  if config.noise.gns == "norm" and every and experts > 1:
    raise UserError(
      f"gns=norm measures all matrices in every gns_calibrate_every={every}th step, and those of "
      f"num_experts={experts} experts cannot be; for example gns_calibrate_every=0, which measures the "
      "normalization layers alone, or gns_from_microbatches=true"
    )


def _check_rounding(model: Model) -> None:
  """Refuses weights that round their updates where nobody has said how."""
  if _rounds_updates(model) and model.policy.weight_rounding == "none":
    raise UserError(
      "weight_dtype=bfloat16 weight_rounding=none: weights of 8 significant bits without a float32 copy "
      "round every update; weight_rounding=stochastic keeps small ones on average, "
      "weight_rounding=nearest loses those under 1/512 (0.2%) of a weight, and weight_dtype=float32 "
      "keeps all"
    )


def _rounds_updates(model: Model) -> bool:
  trained, _ = model.split(model.shapes())
  return any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(trained))


def _check_offloading(config: Config, platform: str) -> None:
  """Refuses what would keep activations or the optimizer's state on the host where it cannot, and what
  has not been chosen."""
  if config.model.remat_policy in ("auto", "explore"):
    raise UserError(
      f"remat_policy={config.model.remat_policy} is not chosen here: a run on text and its compile_only choose "
      "auto, and micro_batch_size=explore compile_only=true tries explore; for example remat_policy=full"
    )
  is_pipeline = config.pipeline.pipeline_schedule != "none"
  obstacle = offload_obstacle(config.model, platform, is_pipeline=is_pipeline)
  if obstacle:
    raise UserError(obstacle)
  if config.optimizer.optimizer_memory_host_offload and platform == "cpu":
    raise UserError(
      "optimizer_memory_host_offload=true: the devices are CPUs, whose memory is the host's already; use "
      "optimizer_memory_host_offload=false"
    )


def _check_vocabulary(config: Config) -> None:
  """Refuses a model that has no logit for some token."""
  data, tokens = config.data, build_tokenizer(config.data).vocab_size
  if config.model.vocab_size >= tokens:
    return
  path = f" tokenizer_path={data.tokenizer_path}" if data.tokenizer_path else ""
  padded = -(-tokens // _FAST_MULTIPLE) * _FAST_MULTIPLE
  larger = f", or vocab_size={padded}, a multiple of {_FAST_MULTIPLE} as matrix units like it"
  raise UserError(
    f"vocab_size={config.model.vocab_size} must be at least the {tokens} tokens of "
    f"tokenizer_type={data.tokenizer_type}{path}; for example vocab_size={tokens}"
    + (larger if padded > tokens else "")
  )


def following(trainer: Trainer, config: Config, plan: BatchPlan) -> Trainer:
  """Returns the trainer for a plan whose phases begin elsewhere, as those of a resumed run do."""
  if not streams(config):
    return trainer
  every_k = _microbatches_per_update(config, plan)
  optimizer = make_optimizer(config.optimizer, _trained_axes(trainer.model), every_k)
  return dataclasses.replace(trainer, optimizer=optimizer)


def _trained_axes(model: Model) -> dict[tuple[str, ...], LogicalAxes]:
  return {path: axes for path, axes in model.axes().items() if path not in model.frozen}


def _microbatches_per_update(config: Config, plan: BatchPlan) -> optax.Schedule | int:
  """Returns how many dispatches MultiSteps sums: one when fused, else a phase's microbatches."""
  if not streams(config):
    return 1
  # Where a plan begins is no part of the program: a resumed run takes the same one.
  firsts = np.array([phase.first.step for phase in plan.phases[1:]])
  num_microbatches = np.array([phase.num_microbatches for phase in plan.phases])
  if len(set(num_microbatches.tolist())) == 1:
    return int(num_microbatches[0])

  def every_k(step: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(num_microbatches)[jnp.searchsorted(firsts, step, side="right")]

  return every_k


def streams(config: Config) -> bool:
  """Returns whether a step is one dispatch per microbatch."""
  return config.batch.accumulation == "streamed"


def undivided_parameters(trainer: Trainer) -> list[str]:
  """Lists parameters that the mesh cannot divide as the table says, a line each."""
  shapes = {
    tuple(entry.key for entry in path): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.model.shapes())
  }
  return [
    f"{'.'.join(path)}: {problem}"
    for path, axes in trainer.model.axes().items()
    for problem in replicated_dims(axes, shapes[path], trainer.mesh)
  ]


def lost_updates(model: Model) -> list[str]:
  """Says what training loses to the rounding of its weights, in lines; none if nothing."""
  if not _rounds_updates(model) or model.policy.weight_rounding == "stochastic":
    return []
  return [
    "weight_dtype=bfloat16: there is no float32 copy of the weights. They have 8 significant bits,",
    "and an update of less than 1/512 (0.2%) of a weight is rounded away; weight_rounding=stochastic",
    "keeps it on average, weight_dtype=float32 exactly",
  ]


def step_rows(plan: BatchPlan, trainer: Trainer, source: RowSource, micro_batch: int) -> Rows:
  """Returns the shapes of the rows in the steps of phases of `micro_batch`."""
  leading = 1 if trainer.streamed else plan.microbatch_capacity, micro_batch
  return _shapes(source, leading, _row_placement(trainer, plan, micro_batch))


def traced_step(trainer: Trainer, rows: Rows) -> jax.stages.Traced:
  """Traces the training step for these rows, with every sharding fixed."""
  return _traced_step(trainer, rows)


def _traced_step(trainer: Trainer, rows: Rows) -> jax.stages.Traced:
  batch = trainer.loss.batch_shapes(rows)
  parameters = trainer.abstract.parameters
  denominators = jax.eval_shape(lambda *x: trainer.denominators([x[0]], x[1]), batch, parameters)
  microbatches = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trainer.microbatches(1, denominators)
  )
  flags = abstract_stop_flags(trainer.mesh)
  inputs = trainer.abstract, batch, microbatches, jax.ShapeDtypeStruct((), np.float32)
  device = trainer.mesh.devices.flat[0]
  is_short = is_short_of_vector_memory(trainer.compiler_flags, device)
  with writes_operands(is_short), read_by(rows.inputs, trainer.mesh):
    return step_function(trainer, batch).trace(*inputs, *(() if flags is None else (flags,)))


def compiled_step(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource, micro_batch: int
) -> Step:
  """Compiles the training step for exactly the arrays that phases of `micro_batch` have."""
  # What is saved must come from the compiler itself.
  compiled = _compiled_step.__wrapped__ if config.compile.save_compiled_step else _compiled_step
  return compiled(trainer, step_rows(plan, trainer, source, micro_batch))


@functools.lru_cache(_KEPT)
def _compiled_step(trainer: Trainer, rows: Rows) -> Step:
  traced = _traced_step(trainer, rows)
  return compiled_with(trainer.compiler_flags, traced, trainer.mesh)


def eval_batch_rows(plan: BatchPlan, trainer: Trainer, source: RowSource) -> Rows:
  """Returns the shapes of the rows in an evaluation batch."""
  return _shapes(source, (plan.eval_batch,), _row_placement(trainer, plan, plan.eval_batch))


def compiled_eval(plan: BatchPlan, trainer: Trainer, source: RowSource) -> EvalStep:
  """Compiles the evaluation of one batch."""
  return _compiled_eval(trainer, eval_batch_rows(plan, trainer, source))


@functools.lru_cache(_KEPT)
def _compiled_eval(trainer: Trainer, rows: Rows) -> EvalStep:
  traced = traced_eval(trainer, rows)
  return alone_at_first(compiled_with(trainer.compiler_flags, traced, trainer.mesh))


def _shapes(source: RowSource, leading: tuple[int, ...], place: RowPlacement) -> Rows:
  """Returns what a loader of `source` yields, without reading a row."""
  one = source.rows(np.zeros(0, np.int64)) | {"sample_ids": np.zeros(0, np.int32)}
  if place.sends:
    one[CHECKSUMS] = np.zeros(0, np.uint32)
  fields: dict[str, Any] = {
    name: jax.ShapeDtypeStruct(leading + x.shape[1:], x.dtype) for name, x in one.items()
  }
  return Rows(**fields)


def train_rows(
  config: Config, trainer: Trainer, dataset: Dataset
) -> Callable[[BatchPlan, Position], ChainedLoader]:
  """Opens a plan's training rows from any position on."""
  streamed = streams(config)

  def open_at(plan: BatchPlan, position: Position) -> ChainedLoader:
    return ChainedLoader(
      functools.partial(_open_segment, plan, segment)
      for segment in dispatches(plan, position, streamed=streamed)
    )

  def _open_segment(plan: BatchPlan, segment: Segment) -> Loader:
    capacity = 1 if streamed else plan.microbatch_capacity
    shape = (capacity, segment.micro_batch, config.batch.max_target_length)
    return train_loader(
      dataset.train,
      config.data.data_shuffle_seed,
      segment.steps,
      micro_batch=segment.micro_batch,
      capacity=capacity,
      sharding=sharding((None, "batch", "length"), shape, trainer.mesh),
      load_factor=load_factor(plan, streamed=streamed),
      worker_count=config.data.grain_worker_count,
      ahead=read_ahead(config.data),
      loading=loading_hosts(plan, num_processes(trainer.mesh)),
    )

  return open_at


def row_hosts(trainer: Trainer, plan: BatchPlan) -> Callable[[int, int], str]:
  """Says, of a microbatch size and a column of such microbatches, which hosts its rows pass through."""
  return lambda micro_batch, column: _row_placement(trainer, plan, micro_batch).hosts(column)


def _row_placement(trainer: Trainer, plan: BatchPlan, micro_batch: int) -> RowPlacement:
  """Returns how the rows of microbatches of this size come to their devices."""
  place = sharding((None, "batch"), (1, micro_batch), trainer.mesh)
  loading = loading_hosts(plan, num_processes(trainer.mesh))
  return RowPlacement(place, row_dim=1, num_rows=micro_batch, loading=loading)


def eval_rows(
  config: Config, plan: BatchPlan, trainer: Trainer, dataset: Dataset
) -> Sequence[EvalRows]:
  """Returns the validation rows, by source where each has its own; none without data."""
  shape = (plan.eval_batch, config.batch.max_target_length)
  place = sharding(("batch", "length"), shape, trainer.mesh)

  def open_all(source: RowSource) -> Loader:
    return eval_loader(
      source,
      eval_batch=plan.eval_batch,
      eval_samples=config.run.eval_samples,
      sharding=place,
      worker_count=config.data.grain_worker_count,
      ahead=read_ahead(config.data),
      loading=loading_hosts(plan, num_processes(trainer.mesh)),
    )

  sources = dataset.validation_by_source
  if not sources and dataset.validation:
    sources = (SourceRows("", 1.0, dataset.validation),)
  return [EvalRows(one.name, one.share, functools.partial(open_all, one.rows)) for one in sources]
