"""One optimizer update as a compiled function of pytrees, fed in one of two ways.

fused: all microbatches in one dispatch; streamed: one dispatch per microbatch, summed by
optax.MultiSteps across dispatches. Both are built from the same two pieces, summed gradients and
their update, and agree to rounding.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from maxbatch.data.rows import Rows
from maxbatch.hardware.compiler_flags import NO_FLAGS, CompilerFlags
from maxbatch.hardware.sharding import replicated, sharding
from maxbatch.models.registry import Model, Parameters, Probed, by_path
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import (
  TimetableArrays,
  buffer_capacity,
  step_arrays,
)
from maxbatch.precision.loss_scale import LossScaling
from maxbatch.precision.policy import PLAIN
from maxbatch.precision.rounding import stochastically_updated
from maxbatch.training import partial_sums
from maxbatch.training.accumulate import summed_gradients
from maxbatch.training.loss import loss_parts
from maxbatch.training.loss_scaling import (
  Applied,
  ScalingMetrics,
  next_scale,
  unless_skipped,
  unscaled,
)
from maxbatch.training.metrics import TokenSums, Update, token_values, update_values
from maxbatch.training.model_parts import to_layer_order, to_stage_order
from maxbatch.training.objective import TEXT, Loss
from maxbatch.training.optimizer import AverageState
from maxbatch.training.pipelined_step import pipelined_gradients, pipelined_sums
from maxbatch.training.row_check import first_wrong_row
from maxbatch.training.state import (
  NOTHING,
  Measures,
  NoiseSums,
  Sums,
  TrainState,
  abstract_state,
  from_saved,
  joined_sums,
  moved,
  shardings,
  state_beginner,
  state_initializer,
  to_save,
  zero_sums,
)
from maxbatch.training.stop_flags import flagged_shardings, unflagged


class StepMetrics(NamedTuple):
  """What a step reports, as scalars on the devices."""

  loss: jax.Array
  """float32: mean over the step's tokens of the loss, in nats."""
  grad_norm: jax.Array
  """float32: global norm of the mean gradient, before clipping."""
  weight: jax.Array
  """float32: tokens that counted."""
  metrics: dict[str, jax.Array]
  """float32: the metrics that the run lists, by name (training/metrics.py)."""
  noise: NoiseSums | None = None
  """What the noise scale is estimated from; None where it is not measured."""
  of_step: Parameters | None = None
  """float32[L or none]: for each probe, ‖gradient of the step's summed loss‖²."""
  wrong_row: jax.Array | tuple[jax.Array | None, ...] | None = None
  """int32: `first_wrong_row`; of a streamed step one for each dispatch."""
  stop: jax.Array | None = None
  """int32: the largest of the processes' flags (training/stop_flags.py); None where one trains."""
  scaling: ScalingMetrics | None = None
  """None where the loss is not scaled."""


class EvalMetrics(NamedTuple):
  """What an evaluation of a batch reports: float32 sums over its tokens, on the devices."""

  loss: jax.Array
  weight: jax.Array
  metrics: TokenSums
  wrong_row: jax.Array | None
  """int32: `first_wrong_row`."""


Step = Callable[..., tuple[TrainState, StepMetrics]]
"""(state, rows, control, learning_rate) → (state, metrics); the given state is donated.

`control` is, fused, `Trainer.control` of the number of microbatches; streamed, whether this
microbatch is the last of its step; of several processes, `flagged`.
"""
POLICIES = "policies"
"""In what is saved: parameters of earlier steps that train, the oldest first."""
EvalStep = Callable[[Parameters, Rows], EvalMetrics]


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """The pieces a step is made of; what is compiled for one of them is of no use to another."""

  model: Model
  optimizer: optax.MultiSteps
  mesh: Mesh
  dropout_key: jax.Array
  pipeline: Pipeline | None = None
  measures: Measures = NOTHING
  keeps_frozen: bool = True
  """Whether checkpoints hold the frozen parameters, which can be had nowhere else."""
  loss: Loss = TEXT
  """Of what a step is fed."""
  num_saved_policies: int = 0
  """Parameters of earlier steps that checkpoints hold as well."""
  loss_scaling: LossScaling | None = None
  """None: the loss is not scaled."""
  compiler_flags: CompilerFlags = NO_FLAGS
  """Of steps and evaluations."""
  optimizer_on_host: bool = False
  """Whether the optimizer's state is in the memory of the devices' hosts between updates."""

  @functools.cached_property
  def abstract(self) -> TrainState:
    """The state's shapes, dtypes and shardings."""
    parts = self.model, self.optimizer, self.mesh, self.measures, self.loss_scaling
    return abstract_state(*parts, optimizer_on_host=self.optimizer_on_host)

  @functools.cached_property
  def _create(self) -> Callable[[jax.Array], TrainState]:
    parts = self.model, self.optimizer, self.abstract, self.measures
    return state_initializer(*parts, self.loss_scaling)

  def init(self, seed: int) -> TrainState:
    """A fresh state, divided over the devices."""
    return self._by_stage(self._create(jax.random.key(seed)))

  def begin(self, seed: int, loaded: Parameters) -> TrainState:
    """As `init`, with loaded parameters, layers in the model's order, where there are any."""
    parts = self.model, self.optimizer, self.abstract, self.measures
    begin = state_beginner(*parts, self.loss_scaling)
    return self._by_stage(begin(jax.random.key(seed), loaded))

  @property
  def formats(self) -> str:
    """In which formats it computes and keeps what, in words; empty where all is float32."""
    policy, scaling = self.model.policy, self.loss_scaling
    parts = [str(policy)] if policy != PLAIN or scaling else []
    return ", ".join([*parts, *([str(scaling)] if scaling else [])])

  @property
  def abstract_saved(self) -> dict[str, Any]:
    """Shapes, dtypes and shardings of what a checkpoint holds."""
    policies = [self.abstract.params] * self.num_saved_policies
    return to_save(self.abstract, keeps_frozen=self.keeps_frozen) | _named(policies)

  def control(self, num_microbatches: int) -> np.int32 | TimetableArrays:
    """The argument of a fused step that trains on the first `num_microbatches` of its rows."""
    return (
      np.int32(num_microbatches)
      if self.pipeline is None
      else step_arrays(self.pipeline, num_microbatches)
    )

  def to_save(self, state: TrainState, policies: Sequence[Parameters] = ()) -> dict[str, Any]:
    """What a checkpoint holds of a state, its layers in the model's order, and of earlier policies."""
    inner = self.by_layer(state.opt_state.inner_opt_state)
    opt_state = state.opt_state._replace(inner_opt_state=inner)
    frozen = self.by_layer(state.frozen) if self.keeps_frozen else {}
    ordered = TrainState(self.by_layer(state.params), opt_state, state.sums, frozen)
    return to_save(ordered, keeps_frozen=self.keeps_frozen) | _named(policies)

  def from_saved(
    self, saved: dict[str, Any], loss_scale: Mapping[str, float] | None = None
  ) -> TrainState:
    """The state that `to_save` came from, of what it gave and the frozen parameters if it had none.

    `loss_scale` is what a checkpoint notes of it; None where it begins anew.
    """
    parts = self.model, saved, self.abstract, self.loss_scaling
    return self._by_stage(from_saved(*parts, loss_scale))

  def by_layer(self, tree: Any) -> Any:
    """Parameters, or what mirrors them, in the model's order of layers."""
    return to_layer_order(self.model, self.pipeline, tree)

  def _by_stage(self, state: TrainState) -> TrainState:
    staged = functools.partial(to_stage_order, self.model, self.pipeline)
    inner = staged(state.opt_state.inner_opt_state)
    opt_state = state.opt_state._replace(inner_opt_state=inner)
    return state._replace(
      params=staged(state.params), opt_state=opt_state, frozen=staged(state.frozen)
    )


def _named(policies: Sequence[Parameters]) -> dict[str, Any]:
  return {POLICIES: list(policies)} if policies else {}


def fused_step(
  trainer: Trainer, state: TrainState, rows: Any, control: Any, learning_rate: jax.Array
) -> tuple[TrainState, StepMetrics]:
  """A whole step.

  Args:
    trainer: model, optimizer and mesh.
    state: the state before.
    rows: microbatches (k, B, T), of which the first are trained on.
    control: `Trainer.control` of their number.
    learning_rate: float32 scalar.
  """
  # Between steps MultiSteps' accumulators are zeros: the sums are formed in them, and MultiSteps
  # is given constant zeros, so that the compiler drops its own addition.
  zeros = state.opt_state.acc_grads
  gradients, sums = _summed(trainer, state, zeros, rows, control)
  opt_state = state.opt_state._replace(
    mini_step=jnp.zeros((), jnp.int32),
    acc_grads=jax.tree.map(jnp.zeros_like, zeros),
  )
  state = state._replace(opt_state=opt_state, sums=zero_sums(trainer.model, trainer.measures))
  return _update(trainer, state, gradients, sums, last=jnp.array(True), rate=learning_rate)


def streamed_step(
  trainer: Trainer, state: TrainState, rows: Any, last: jax.Array, learning_rate: jax.Array
) -> tuple[TrainState, StepMetrics]:
  """One microbatch of a step: rows (1, B, T), or its halves (2, B, T). The update happens when `last`
  is true."""
  zeros = jax.tree.map(jnp.zeros_like, state.opt_state.acc_grads)
  parts = trainer.loss.rows(rows).inputs.shape[0]
  gradients, sums = _summed(trainer, state, zeros, rows, trainer.control(parts))
  return _update(trainer, state, gradients, sums, last=last, rate=learning_rate)


def _summed(
  trainer: Trainer, state: TrainState, zeros: Parameters, rows: Any, control: Any
) -> tuple[Parameters, Sums]:
  """Gradients of the microbatches of one dispatch, and their other sums in parts."""
  model, mesh, pipeline, key = trainer.model, trainer.mesh, trainer.pipeline, trainer.dropout_key
  scale = None if state.loss_scale is None else state.loss_scale.scale
  if pipeline is None:
    num_microbatches = jnp.asarray(control)
    arguments = state.params, zeros, rows, num_microbatches, key, trainer.measures, state.frozen
    return summed_gradients(model, mesh, *arguments, trainer.loss, scale)
  ticks, capacity = jax.tree.map(jnp.asarray, control), buffer_capacity(pipeline)
  arguments = state.parameters, zeros, rows, ticks, capacity, key, trainer.measures.metrics
  gradients, sums = pipelined_gradients(model, pipeline, mesh, *arguments, scale)
  return gradients, jax.tree.map(partial_sums.of_one, sums)


@jax.named_scope("optimizer")
def _update(
  trainer: Trainer,
  state: TrainState,
  gradients: Parameters,
  sums: Sums,
  *,
  last: jax.Array,
  rate: jax.Array,
) -> tuple[TrainState, StepMetrics]:
  """Hands one sum of gradients to MultiSteps, which updates the parameters when `last`."""
  gradients, sums = unscaled(gradients, sums, state.loss_scale)
  summed = jax.tree.map(jnp.add, state.opt_state.acc_grads, gradients)
  in_parts = sums._replace(largest=None), _squares(trainer.model, summed)
  new, of_step = partial_sums.joined(in_parts)
  sums = joined_sums(state.sums, new._replace(largest=sums.largest))
  updates, opt_state = trainer.optimizer.update(
    gradients, state.opt_state, state.params, weight=sums.weight, learning_rate=rate, last=last
  )
  updates, params = cast(Parameters, updates), _applied(trainer, state, updates)
  loss, grad_norm = sums.loss / jnp.maximum(sums.weight, 1.0), _average_state(opt_state).grad_norm
  scale, scaling = state.loss_scale, None
  if scale is not None and trainer.loss_scaling is not None:
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    before = Applied(state.params, updates, state.opt_state)
    params, updates, opt_state = unless_skipped(
      before, Applied(params, updates, opt_state), is_finite, last
    )
    scale, scaling = next_scale(trainer.loss_scaling, scale, is_finite, last)
  mean = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1.0), summed)
  update = Update(params, updates, mean, loss, grad_norm, sums.weight, rate)
  metrics = StepMetrics(
    loss=loss,
    grad_norm=grad_norm,
    weight=sums.weight,
    metrics=token_values(sums.metrics, sums.weight)
    | (sums.largest or {})
    | update_values(trainer.measures.metrics, update),
    noise=sums.noise,
    of_step=of_step if sums.noise else None,
    scaling=scaling,
  )
  carried = jax.tree.map(lambda x: jnp.where(last, 0.0, x), sums)
  return TrainState(params, opt_state, carried, state.frozen, scale), metrics


def _applied(trainer: Trainer, state: TrainState, updates: Any) -> Parameters:
  """The parameters after the updates, rounded to the format that they are kept in."""
  policy = trainer.model.policy
  if policy.weight_rounding != "stochastic":
    return cast(Parameters, optax.apply_updates(state.params, updates))
  # A key that no sample has, and of it one for each update.
  key = jax.random.fold_in(trainer.dropout_key, np.uint32(2**32 - 1))
  key = jax.random.fold_in(key, state.opt_state.gradient_step)
  return stochastically_updated(state.params, updates, key)


def _squares(model: Model, gradients: Parameters) -> Parameters:
  """For every probe, the squares of the gradients of what it measures, in parts."""
  axes, flat = model.axes(), {}
  by_path(lambda path, gradient: flat.update({path: gradient}), gradients)

  def of(probed: Probed) -> jax.Array:
    lead = 1 if probed.num_layers else 0
    squares = [partial_sums.of_squares(flat[path], axes[path], lead) for path in probed.parameters]
    return functools.reduce(jnp.add, squares)

  structure = jax.tree.structure(model.probes(1, 1))
  return jax.tree.unflatten(structure, [of(probed) for probed in model.probed()])


def _average_state(opt_state: optax.MultiStepsState) -> AverageState:
  states = jax.tree.leaves(opt_state, is_leaf=lambda leaf: isinstance(leaf, AverageState))
  return next(leaf for leaf in states if isinstance(leaf, AverageState))


def step_function(trainer: Trainer, rows: Any, *, streamed: bool) -> jax.stages.Wrapped:
  """The step as a jitted function with its buffers donated and every sharding fixed.

  Args:
    trainer: model, optimizer and mesh.
    rows: shapes of what the step is fed (arrays or ShapeDtypeStructs): `Loss.fed` of rows.
    streamed: one microbatch per dispatch instead of all.
  """
  body = streamed_step if streamed else fused_step

  def step(
    state: TrainState, rows: Any, control: Any, rate: jax.Array
  ) -> tuple[TrainState, StepMetrics]:
    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      control, stop = unflagged(trainer.mesh, control)
      wrong = first_wrong_row(trainer.loss.rows(rows))
      if isinstance(rows, Rows):
        rows = rows._replace(checksums=None)
      state = moved(state, trainer.abstract, to_host=False)
      state, metrics = body(trainer, state, rows, control, rate)
      state = moved(state, trainer.abstract, to_host=True)
      return state, metrics._replace(stop=stop, wrong_row=wrong)

  places = shardings(trainer.abstract)
  whole = replicated(trainer.mesh)
  return jax.jit(
    step,
    in_shardings=(
      places,
      rows_shardings(rows, trainer.mesh),
      flagged_shardings(trainer.mesh),
      whole,
    ),
    out_shardings=(places, whole),
    donate_argnums=0,
  )


def rows_shardings(rows: Any, mesh: Mesh) -> Any:
  """Of arrays of microbatches (k, B, …): divided along B."""
  return jax.tree.map(
    lambda x: sharding((None, "batch", *(None,) * (x.ndim - 2)), x.shape, mesh), rows
  )


def eval_function(trainer: Trainer, rows: Rows) -> jax.stages.Wrapped:
  """Loss, weight and metrics of a batch (B, T), without dropout, as a jitted EvalStep."""

  metrics = trainer.measures.metrics

  def summed(params: Parameters, rows: Rows) -> Sums:
    if trainer.pipeline is not None:
      return pipelined_sums(trainer.model, trainer.pipeline, trainer.mesh, params, rows, metrics)
    parts = loss_parts(trainer.model, params, rows, None, metrics=metrics)
    loss, of_tokens = jax.tree.map(jnp.sum, parts)
    return Sums(loss, rows.weights.sum(), of_tokens)

  def evaluate(params: Parameters, rows: Rows) -> EvalMetrics:
    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      sums, wrong = summed(params, rows._replace(checksums=None)), first_wrong_row(rows)
      return EvalMetrics(sums.loss, sums.weight, sums.metrics, wrong)

  places = shardings(trainer.abstract.parameters)
  return jax.jit(
    evaluate,
    in_shardings=(places, eval_shardings(rows, trainer.mesh)),
    out_shardings=replicated(trainer.mesh),
  )


def eval_shardings(rows: Rows, mesh: Mesh) -> Rows:
  """Rows (B, …): divided along B."""
  return jax.tree.map(lambda x: sharding(("batch", *(None,) * (x.ndim - 1)), x.shape, mesh), rows)
