"""From a Config to a Job ready to run: every part built, checked and compiled in order."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxbatch.batch.host_loads import loading_hosts
from maxbatch.batch.loads import load_factor
from maxbatch.batch.plan import BatchPlan, Position
from maxbatch.batch.row_plan import Segment, dispatches
from maxbatch.config.schema import Config
from maxbatch.data.dataset import Dataset, RowSource
from maxbatch.data.loader import ChainedLoader, Loader, eval_loader, train_loader
from maxbatch.data.placement import RowPlacement
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device
from maxbatch.hardware.sharding import make_mesh, num_processes, replicated_dims, sharding
from maxbatch.models.flash import resolve_attention
from maxbatch.models.registry import Model, build_model
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.training.metrics import chosen_metrics
from maxbatch.training.model_parts import bind_layered
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import EvalStep, Step, Trainer, eval_function, step_function


def build_trainer(config: Config, plan: BatchPlan, devices: Sequence[Device]) -> Trainer:
  """Model, optimizer and mesh, none of which holds an array yet.

  Raises:
    UserError: keys that contradict each other.
  """
  tokens = build_tokenizer(config.data).vocab_size
  if config.model.vocab_size < tokens:
    raise UserError(
      f"vocab_size={config.model.vocab_size} must be at least the {tokens} tokens of "
      f"tokenizer_type={config.data.tokenizer_type}; for example vocab_size={tokens}"
    )
  length = config.batch.max_target_length
  model_config = resolve_attention(config.model, length, devices[0])
  model = build_model(model_config, length, config.noise.gns)
  every_k = _microbatches_per_update(config, plan)
  pipeline = None
  if config.pipeline.pipeline_schedule != "none":
    pipeline = pipeline_of(config, plan.topology, plan)
    bind_layered(model, model.shapes())
  mesh = make_mesh(plan.topology, devices)
  loading_hosts(plan, num_processes(mesh))
  return Trainer(
    model=model,
    optimizer=make_optimizer(config.optimizer, model.axes(), every_k),
    mesh=mesh,
    # Another key than the weights', from the same seed.
    dropout_key=jax.random.fold_in(jax.random.key(config.model.init_weights_seed), 1),
    pipeline=pipeline,
    measures=Measures(chosen_metrics(config.run.metrics), config.noise.gns_from_microbatches),
  )


def following(trainer: Trainer, config: Config, plan: BatchPlan) -> Trainer:
  """The trainer for a plan whose phases begin elsewhere, as those of a resumed run do."""
  if not streams(config):
    return trainer
  every_k = _microbatches_per_update(config, plan)
  optimizer = make_optimizer(config.optimizer, trainer.model.axes(), every_k)
  return dataclasses.replace(trainer, optimizer=optimizer)


def _microbatches_per_update(config: Config, plan: BatchPlan) -> optax.Schedule | int:
  """Dispatches that MultiSteps sums up: one when fused, else the microbatches of each phase."""
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
  """Whether a step is one dispatch per microbatch."""
  return config.batch.accumulation == "streamed"


def undivided_parameters(trainer: Trainer) -> list[str]:
  """Parameters that the mesh cannot divide as the table says, a line each."""
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
  """What training loses to the type of its weights, in lines; none where it is float32."""
  if model.config.weight_dtype == "float32":
    return []
  return [
    "weight_dtype=bfloat16: there is no float32 copy of the weights. They have 8 significant bits,",
    "and an update of less than 1/512 (0.2%) of a weight is rounded away; weight_dtype=float32",
    "keeps it",
  ]


def num_parameters(model: Model) -> int:
  """Parameters of a model."""
  return sum(leaf.size for leaf in jax.tree.leaves(model.shapes()))


def step_rows(config: Config, plan: BatchPlan, source: RowSource, micro_batch: int) -> Rows:
  """The shapes of what phases of `micro_batch` feed the step."""
  return _shapes(source, (1 if streams(config) else plan.microbatch_capacity, micro_batch))


def traced_step(config: Config, trainer: Trainer, rows: Rows) -> jax.stages.Traced:
  """The training step, traced for these rows, with every sharding fixed."""
  function = step_function(trainer, rows, streamed=streams(config))
  control = np.bool_(True) if streams(config) else trainer.control(1)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), control)
  rate = jax.ShapeDtypeStruct((), np.float32)
  return function.trace(trainer.abstract, rows, shapes, rate)


def compiled_step(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource, micro_batch: int
) -> Step:
  """The training step, compiled for exactly the arrays that phases of `micro_batch` feed it."""
  rows = step_rows(config, plan, source, micro_batch)
  return traced_step(config, trainer, rows).lower().compile()


def compiled_eval(plan: BatchPlan, trainer: Trainer, source: RowSource) -> EvalStep:
  """The evaluation of one batch, compiled."""
  rows = _shapes(source, (plan.eval_batch,))
  return eval_function(trainer, rows).lower(trainer.abstract.params, rows).compile()


def _shapes(source: RowSource, leading: tuple[int, ...]) -> Rows:
  """What a loader of `source` yields, without reading a row."""
  one = source.rows(np.zeros(0, np.int64))
  one |= {"sample_ids": np.zeros(0, np.int32), "checksums": np.zeros(0, np.uint32)}
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
      sharding=sharding((None, "batch", None), shape, trainer.mesh),
      load_factor=load_factor(plan, streamed=streamed),
      worker_count=config.data.grain_worker_count,
      loading=loading_hosts(plan, num_processes(trainer.mesh)),
    )

  return open_at


def row_hosts(trainer: Trainer, plan: BatchPlan) -> Callable[[int, int], str]:
  """Says, of a microbatch size and a column of such microbatches, which hosts its rows pass through."""

  def hosts(micro_batch: int, column: int) -> str:
    place = sharding((None, "batch"), (1, micro_batch), trainer.mesh)
    loading = loading_hosts(plan, num_processes(trainer.mesh))
    return RowPlacement(place, row_dim=1, num_rows=micro_batch, loading=loading).hosts(column)

  return hosts


def eval_rows(
  config: Config, plan: BatchPlan, trainer: Trainer, dataset: Dataset
) -> Callable[[], Loader] | None:
  """Opens the validation rows from their beginning; None without validation data."""
  source = dataset.validation
  if source is None:
    return None
  shape = (plan.eval_batch, config.batch.max_target_length)
  place = sharding(("batch", None), shape, trainer.mesh)

  def open_all() -> Loader:
    return eval_loader(
      source,
      eval_batch=plan.eval_batch,
      eval_samples=config.run.eval_samples,
      sharding=place,
      worker_count=config.data.grain_worker_count,
      loading=loading_hosts(plan, num_processes(trainer.mesh)),
    )

  return open_all
