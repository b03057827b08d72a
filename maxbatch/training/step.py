"""One optimizer update as a compiled function of pytrees, fed in one of two ways.

fused: all microbatches in one dispatch; streamed: one per microbatch, summed by optax.MultiSteps. Both are
the core's train_step (core/train_step.py) around the same sums, and agree to rounding.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from maxbatch.core.accumulate import Accumulate, Squares
from maxbatch.core.terms import Sum
from maxbatch.core.train_step import (
  StepOptimizer,
  StepResult,
  StepState,
  Sums,
  mean_gradient,
  train_step,
)
from maxbatch.data.rows import Rows, first_wrong_row
from maxbatch.hardware.compiler_flags import NO_FLAGS, CompilerFlags
from maxbatch.hardware.sharding import replicated, sharding
from maxbatch.models.experts import LOAD, TOKENS
from maxbatch.models.registry import Model, Parameters
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays, step_arrays
from maxbatch.precision.loss_scale import LossScaling
from maxbatch.precision.policy import PLAIN
from maxbatch.training import partial_sums
from maxbatch.training.accumulate import (
  dispatch_denominators,
  dispatch_tokens,
  expert_squares,
  flat_gradients,
  group_squares,
  model_accumulate,
  probe_squares,
)
from maxbatch.training.expert_load import counts_twice, load_metrics, with_buffers, with_load
from maxbatch.training.loss_scaling import (
  Applied,
  ScalingMetrics,
  next_scale,
  unless_skipped,
  unscaled,
)
from maxbatch.training.metrics import Update, update_values
from maxbatch.training.model_parts import stage_order, to_layer_order, to_stage_order
from maxbatch.training.objective import LOSS, PROBES, ROW_TOKENS_SQUARED, ROWS, TEXT, Loss
from maxbatch.training.optimizer import apply_updates
from maxbatch.training.pipelined_step import pipelined_accumulate, pipelined_tokens
from maxbatch.training.state import (
  NOTHING,
  Measures,
  StateParts,
  TrainState,
  abstract_state,
  from_saved,
  has_flags,
  moved,
  num_groups,
  shardings,
  state_beginner,
  state_initializer,
  stop_flags_sharding,
  to_save,
)


class NoiseSums(NamedTuple):
  """What the noise scale is estimated from, summed over a step's microbatches so far."""

  rows: jax.Array
  """float32: rows with at least one token that counts."""
  row_tokens_squared: jax.Array
  """float32: Σ (tokens of a row that count)² over the rows."""
  of_rows: Parameters
  """float32[L or none]: for each probe, Σ ‖gradient of a row's summed loss‖² over the rows."""
  squares: Squares | None = None
  """Squares by microbatch and replica; None where they are not measured."""
  of_experts: tuple[jax.Array, jax.Array] | None = None
  """float32[2], of the routers, and [2, L, E]: squares by microbatch, and of the step; None: no mixture."""


class StepMetrics(NamedTuple):
  """What a step reports, as scalars on the devices."""

  loss: jax.Array
  """float32: mean over the step's tokens of the loss, in nats, without what the model adds to it."""
  grad_norm: jax.Array
  """float32: global norm of the mean gradient, before clipping."""
  weight: jax.Array
  """float32: tokens that counted."""
  metrics: dict[str, jax.Array]
  """float32: the run's metrics (training/metrics.py), and the model's terms and statistics."""
  noise: NoiseSums | None = None
  """What the noise scale is estimated from; None where it is not measured."""
  of_step: Parameters | None = None
  """float32[L or none]: for each probe, ‖gradient of the step's summed loss‖²."""
  wrong_row: jax.Array | tuple[jax.Array | None, ...] | None = None
  """int32: `first_wrong_row`; of a streamed step one for each dispatch."""
  stop: jax.Array | None = None
  """int32: the largest of the processes' flags (training/state.py); None where one trains."""
  scaling: ScalingMetrics | None = None
  """None where the loss is not scaled."""


Denominators = Mapping[str, jax.Array]
"""Of a whole step's terms, float32 scalars by name."""
Microbatches = np.int32 | TimetableArrays | Denominators | None
"""What a dispatch is told of its step, see `Trainer.microbatches`."""
Step = Callable[..., tuple[TrainState, StepMetrics]]
"""(state, rows, microbatches, learning_rate, stop_flags) → (state, metrics); the given state is donated.

`stop_flags` are those of training/state.py.
"""
POLICIES = "policies"
"""In what is saved: parameters of earlier steps that train, the oldest first."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """The pieces a step is made of; what is compiled for one of them is of no use to another."""

  model: Model
  optimizer: StepOptimizer
  mesh: Mesh
  dropout_key: jax.Array
  streamed: bool = False
  """Whether a step is one dispatch for each microbatch instead of one for all."""
  pipeline: Pipeline | None = None
  measures: Measures = NOTHING
  keeps_frozen: bool = True
  """Whether checkpoints hold the frozen parameters, which can be had nowhere else."""
  loss: Loss = TEXT
  num_saved_policies: int = 0
  """Parameters of earlier steps that checkpoints hold as well."""
  loss_scaling: LossScaling | None = None
  """None: the loss is not scaled."""
  compiler_flags: CompilerFlags = NO_FLAGS
  optimizer_on_host: bool = False
  """Whether the optimizer's state is in the memory of the devices' hosts between updates."""
  over_data: bool = False
  """Whether replicas divide among themselves what is updated: state, accumulators, parameters that train."""

  @property
  def _state_parts(self) -> StateParts:
    parts = self.model, self.optimizer, self.measures, self.loss_scaling
    return StateParts(*parts, streamed=self.streamed)

  @functools.cached_property
  def abstract(self) -> TrainState:
    """The state's shapes, dtypes and shardings."""
    where = {"optimizer_on_host": self.optimizer_on_host, "over_data": self.over_data}
    return abstract_state(self._state_parts, self.mesh, **where)

  @functools.cached_property
  def _create(self) -> Callable[[jax.Array], TrainState]:
    return state_initializer(self._state_parts, self.abstract)

  def init(self, seed: int) -> TrainState:
    """Returns a fresh state, divided over the devices."""
    return self._by_stage(self._create(jax.random.key(seed)))

  def begin(self, seed: int, loaded: Parameters) -> TrainState:
    """Returns `init`'s state with loaded parameters, layers in the model's order, where there are any."""
    begin = state_beginner(self._state_parts, self.abstract)
    return self._by_stage(begin(jax.random.key(seed), loaded))

  @property
  def formats(self) -> str:
    """The formats in which it computes and keeps what, in words; empty where all is float32."""
    policy, scaling = self.model.policy, self.loss_scaling
    parts = [str(policy)] if policy != PLAIN or scaling else []
    return ", ".join([*parts, *([str(scaling)] if scaling else [])])

  @property
  def abstract_saved(self) -> dict[str, Any]:
    """Shapes, dtypes and shardings of what a checkpoint holds."""
    policies = [self.abstract.params] * self.num_saved_policies
    return to_save(self.abstract, keeps_frozen=self.keeps_frozen) | _named(policies)

  def microbatches(self, count: int, denominators: Denominators | None = None) -> Microbatches:
    """Returns what a dispatch is told of its step: fused, to train on the first `count` microbatches of
    its rows; streamed, the `denominators` of the step's terms."""
    if self.streamed:
      return denominators
    return np.int32(count) if self.pipeline is None else step_arrays(self.pipeline, count)

  @property
  def needs_denominators(self) -> bool:
    """Whether a dispatch must be told the denominators of its step: it is one of several, and the model
    has terms of its own."""
    return self.streamed and bool(self.model.own_sums[0])

  @functools.cached_property
  def _denominators(self) -> jax.stages.Wrapped:
    parts = self.model, self.mesh, self.loss, self.dropout_key
    return jax.jit(dispatch_denominators(*parts), out_shardings=replicated(self.mesh))

  def denominators(self, dispatches: Sequence[Any], parameters: Parameters) -> Denominators | None:
    """Returns those of the terms of a streamed step, given what its dispatches are fed and, for a balance
    over the whole step, the parameters; None where each has what it needs."""
    if not self.needs_denominators:
      return None
    each = [self._denominators(rows, parameters) for rows in dispatches]
    return jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *each)

  def to_save(self, state: TrainState, policies: Sequence[Parameters] = ()) -> dict[str, Any]:
    """Returns what a checkpoint holds of a state, layers in the model's order, and of policies."""
    inner = self.by_layer(state.opt_state.inner_opt_state)
    opt_state = state.opt_state._replace(inner_opt_state=inner)
    frozen = self.by_layer(state.frozen) if self.keeps_frozen else {}
    ordered = TrainState(self.by_layer(state.params), opt_state, state.sums, frozen)
    return to_save(ordered, keeps_frozen=self.keeps_frozen) | _named(policies)

  def from_saved(
    self, saved: dict[str, Any], loss_scale: Mapping[str, float] | None = None
  ) -> TrainState:
    """Returns the state that `to_save` came from, of what it gave and the frozen parameters.

    `loss_scale` is what a checkpoint notes of it; None where it begins anew.
    """
    parts = self.model, saved, self.abstract, self.loss_scaling
    return self._by_stage(from_saved(*parts, loss_scale))

  def by_layer(self, tree: Any) -> Any:
    """Returns parameters, or what mirrors them, in the model's order of layers."""
    return to_layer_order(self.model, self.pipeline, tree)

  def _by_stage(self, state: TrainState) -> TrainState:
    staged = functools.partial(to_stage_order, self.model, self.pipeline)
    inner = staged(state.opt_state.inner_opt_state)
    opt_state = state.opt_state._replace(inner_opt_state=inner)
    params, frozen = staged(state.params), staged(state.frozen)
    return state._replace(params=params, opt_state=opt_state, frozen=frozen)


def _named(policies: Sequence[Parameters]) -> dict[str, Any]:
  return {POLICIES: list(policies)} if policies else {}


def update(
  trainer: Trainer, state: TrainState, rows: Any, microbatches: Any, learning_rate: jax.Array
) -> tuple[TrainState, StepMetrics]:
  """Returns the state and the metrics after a dispatch, which ends a step if it is the last of it.

  Args:
    rows: microbatches (k, B, T), of which the first are trained on; streamed: one, in one or more parts.
    microbatches: of `Trainer.microbatches`.
  """
  if counts_twice(trainer.model.config):
    state = _with_load(trainer, state, rows, microbatches)
  accumulate, count, denominators = _accumulate(trainer, state), microbatches, None
  if trainer.streamed:
    denominators = microbatches
    parts = trainer.loss.rows(rows).inputs.shape[0]
    in_timetable = 1 if trainer.loss.compares_parts else parts
    count = parts if trainer.pipeline is None else step_arrays(trainer.pipeline, in_timetable)
  step = train_step(
    accumulate,
    trainer.optimizer,
    streamed=trainer.streamed,
    lends=not trainer.over_data,
    reduce=functools.partial(_reduce, trainer),
    apply_updates=functools.partial(
      apply_updates, trainer.model.policy, trainer.dropout_key, state.opt_state.gradient_step
    ),
  )
  keys = trainer.loss.keys(trainer.model, trainer.dropout_key, rows)
  before = StepState(state.params, state.opt_state, state.sums)
  after, result = step(before, rows, count, keys, denominators, learning_rate=learning_rate)
  after, updates = with_buffers(trainer.model, trainer.pipeline, before, after, result)
  loss, scale, scaling = result.sums.terms[LOSS].value(), state.loss_scale, None
  if scale is not None and trainer.loss_scaling is not None:
    is_finite = jnp.isfinite(loss) & jnp.isfinite(result.grad_norm)
    kept = Applied(before.params, updates, before.opt_state)
    made = Applied(after.params, updates, after.opt_state)
    params, updates, opt_state = unless_skipped(kept, made, is_finite, result.is_last)
    after = after._replace(params=params, opt_state=opt_state)
    scale, scaling = next_scale(trainer.loss_scaling, scale, is_finite, result.is_last)
  metrics = _metrics(trainer, result, after.params, updates, learning_rate)
  state = TrainState(after.params, after.opt_state, after.sums, state.frozen, scale)
  return state, metrics._replace(scaling=scaling)


def _with_load(trainer: Trainer, state: TrainState, rows: Any, microbatches: Any) -> TrainState:
  """Returns the state with the load of this step, by which the balance of its experts is minimized."""
  model = trainer.model
  if trainer.streamed:
    tokens_LE = microbatches[TOKENS]
  else:
    given, pipeline = (model, trainer.mesh, trainer.loss, trainer.dropout_key), trainer.pipeline
    count = dispatch_tokens(*given) if pipeline is None else pipelined_tokens(*given, pipeline)
    tokens_LE = count(state.parameters, rows, microbatches)
  ordered = to_stage_order(model, trainer.pipeline, unflatten_dict({LOAD: tokens_LE}))
  (tokens_LE,) = jax.tree.leaves(ordered)
  parts = (with_load(model, part, tokens_LE) for part in (state.params, state.frozen))
  return state._replace(**dict(zip(("params", "frozen"), parts, strict=True)))


def _accumulate(trainer: Trainer, state: TrainState) -> Accumulate:
  """Returns what sums gradients, the loss and statistics of one dispatch, without the loss's scale."""
  scale = None if state.loss_scale is None else state.loss_scale.scale
  if trainer.pipeline is None:
    parts = trainer.model, trainer.mesh, state.frozen, trainer.measures, trainer.loss, scale
    places = shardings(trainer.abstract.params) if trainer.over_data else None
    return unscaled(model_accumulate(*parts, places=places), state.loss_scale)
  parts = trainer.model, trainer.pipeline, trainer.mesh, state.frozen, trainer.dropout_key
  pipelined = pipelined_accumulate(*parts, trainer.measures, scale, loss=trainer.loss)
  return unscaled(pipelined, state.loss_scale)


def _reduce(trainer: Trainer, sums: Sums, gradients: Parameters) -> tuple[Sums, Any]:
  """Returns sums that were in parts, and for every probe the square of what it measures, so far, with
  those of groups."""
  layers = None if trainer.pipeline is None else stage_order(trainer.pipeline)
  squares, groups = probe_squares(trainer.model, gradients, layers), None
  if sums.squares is not None and num_groups(trainer.model):
    groups = group_squares(trainer.model, flat_gradients(gradients), layers)
  return partial_sums.joined_sums(sums, (squares, groups))


def _metrics(
  trainer: Trainer,
  result: StepResult,
  params: Parameters,
  updates: Parameters,
  learning_rate: jax.Array,
) -> StepMetrics:
  """Returns what a dispatch reports, of the step so far."""
  sums = result.sums
  loss, weight = sums.terms[LOSS].value(), sums.terms[LOSS].denominator
  stats, loads = load_metrics(sums.stats)
  noise = None
  if ROWS in stats:
    names = ROWS, ROW_TOKENS_SQUARED, PROBES
    rows, tokens, of_rows = (cast(Sum, stats.pop(name)) for name in names)
    of_experts = expert_squares(trainer.model, sums.squares, result.measured[1])
    of_all = cast(Parameters, of_rows.total), jax.tree.map(jnp.sum, sums.squares)
    noise = NoiseSums(rows.total, tokens.total, *of_all, of_experts)
  mean = mean_gradient(result)
  update = Update(params, updates, mean, loss, result.grad_norm, weight, learning_rate)
  own = {name: term.value() for name, term in sums.terms.items() if name != LOSS}
  return StepMetrics(
    loss=loss,
    grad_norm=result.grad_norm,
    weight=weight,
    metrics=own
    | {name: stat.value() for name, stat in stats.items()}
    | loads
    | update_values(trainer.measures.metrics, update),
    noise=noise,
    of_step=result.measured[0] if noise else None,
  )


def step_function(trainer: Trainer, rows: Any) -> jax.stages.Wrapped:
  """Returns the step as a jitted function with its buffers donated and every sharding fixed.

  Args:
    rows: shapes of what the step is fed (arrays or ShapeDtypeStructs): `Loss.batch_shapes` of rows.
  """

  def step(
    state: TrainState,
    rows: Any,
    microbatches: Any,
    learning_rate: jax.Array,
    stop_flags: jax.Array | None = None,
  ) -> tuple[TrainState, StepMetrics]:
    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      wrong = first_wrong_row(trainer.loss.rows(rows))
      if isinstance(rows, Rows):
        rows = rows._replace(checksums=None)
      state = moved(state, trainer.abstract, to_host=False)
      state, metrics = update(trainer, state, rows, microbatches, learning_rate)
      state = moved(state, trainer.abstract, to_host=True)
      stop = None if stop_flags is None else stop_flags.max()
      return state, metrics._replace(stop=stop, wrong_row=wrong)

  places, whole = shardings(trainer.abstract), replicated(trainer.mesh)
  inputs = places, rows_shardings(rows, trainer.mesh), whole, whole
  if has_flags(trainer.mesh):
    inputs += (stop_flags_sharding(trainer.mesh),)
  return jax.jit(step, in_shardings=inputs, out_shardings=(places, whole), donate_argnums=0)


def rows_shardings(rows: Any, mesh: Mesh) -> Any:
  """Returns the shardings of microbatches (k, B, …): divided along B, those of text (k, B, T) along both."""
  axes = (None, "batch", "length" if isinstance(rows, Rows) else None, None, None)
  return jax.tree.map(lambda x: sharding(axes[: x.ndim], x.shape, mesh), rows)
