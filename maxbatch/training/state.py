"""What a run trains: parameters, optimizer state, and the sums of the step under way.

And a stop signal that one of several processes has heard, as an input of its step. Schedulers send
SIGTERM to all processes or to one, and never at the same step. Each process hands its flag to every
step, and the step returns the largest: all learn of it with the same step's metrics, without a message
of its own. A single process has no flags, and its program no input for them.
"""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.core.accumulate import Squares
from maxbatch.core.terms import Ratio, Sum, zeros_of
from maxbatch.core.train_step import StepOptimizer
from maxbatch.core.train_step import Sums as StepSums
from maxbatch.hardware.compiler_flags import CompilerFlags, quick_flags
from maxbatch.hardware.sharding import replicated, sharding, with_data
from maxbatch.models.registry import Model, Parameters, joined
from maxbatch.precision.loss_scale import LossScale, LossScaling
from maxbatch.training.metrics import NO_METRICS, Metrics, TokenSums
from maxbatch.training.objective import (
  AMAXES,
  LOSS,
  PROBES,
  ROW_TOKENS_SQUARED,
  ROWS,
  zero_amax,
  zero_model_sums,
  zero_stats,
)
from maxbatch.training.optimizer import is_matrix, place_optimizer_state

_HOST = "pinned_host"
"""jax's name for the memory of a device's host that the device can read."""


class Sums(NamedTuple):
  """Sums over the tokens of a batch of text, as float32 scalars."""

  loss: jax.Array
  weight: jax.Array
  metrics: TokenSums


class TrainState(NamedTuple):
  """Everything a step reads and writes."""

  params: Parameters
  """Those that train."""
  opt_state: optax.MultiStepsState
  sums: StepSums | None
  """Sums over the dispatches of a streamed step so far; None where steps are fused."""
  frozen: Parameters
  """Those that stay as they are (Model.frozen), of which there is nothing else."""
  loss_scale: LossScale | None = None
  """None where the loss is not scaled."""

  @property
  def parameters(self) -> Parameters:
    """All parameters, as the model is bound to them."""
    return joined(self.params, self.frozen)


@dataclasses.dataclass(frozen=True)
class Measures:
  """What a step measures beside loss and weight, and beside the probes of its model."""

  metrics: Metrics = NO_METRICS
  microbatch_squares: bool = False
  """Whether the gradient of each microbatch is squared, for the noise scale."""

  def noise(self, model: Model) -> bool:
    """Returns whether a step sums up what the noise scale is estimated from."""
    return model.has_probes or self.microbatch_squares


NOTHING = Measures()


def zero_step_sums(model: Model, measures: Measures) -> StepSums:
  """Returns the sums of a streamed step before its first dispatch."""
  zero = jnp.zeros((), jnp.float32)
  own_terms, own_stats = zero_model_sums(model)
  stats = zero_stats(measures.metrics) | own_stats
  if measures.noise(model):
    stats |= dict.fromkeys((ROWS, ROW_TOKENS_SQUARED), Sum(zero))
    stats[PROBES] = Sum(zero_probe_squares(model))
  if model.amax_buffers:
    stats[AMAXES] = zero_amax(model)
  groups = jnp.zeros(num_groups(model) or ())
  squares = Squares(groups, zero, groups, zero) if measures.microbatch_squares else None
  return StepSums(OrderedDict({LOSS: Ratio(zero, zero)} | own_terms), stats, squares)


def num_groups(model: Model) -> int:
  """Returns the number of groups of parameters whose gradients are squared apart; 0: there are none."""
  config = model.config
  layers = config.base_num_decoder_layers - config.first_num_dense_layers
  return 2 + layers * config.num_experts if config.num_experts > 1 else 0


def zero_probe_squares(model: Model, parts: tuple[int, ...] = ()) -> Parameters:
  """Returns zeros, float32[L or none, *parts], for every probe of a model."""
  return jax.tree.map(lambda x: jnp.zeros((*x.shape[:-2], *parts)), model.probes(1, 1))


def measured_by(state: TrainState, model: Model) -> TrainState:
  """Returns the state between steps as the steps of a model with other probes take it."""
  if state.sums is None or PROBES not in state.sums.stats:
    return state
  # A copy: a step overwrites its state, and some of these zeros are one array.
  zeros = Sum(jax.tree.map(jnp.array, zero_probe_squares(model)))
  return state._replace(sums=state.sums._replace(stats={**state.sums.stats, PROBES: zeros}))


@dataclasses.dataclass(frozen=True)
class StateParts:
  """What a state is made of."""

  model: Model
  optimizer: StepOptimizer
  measures: Measures = NOTHING
  scaling: LossScaling | None = None
  streamed: bool = False

  def begin(self, parameters: Parameters) -> TrainState:
    """Returns the state before the first step with these parameters."""
    params, frozen = self.model.split(parameters)
    sums = zero_step_sums(self.model, self.measures) if self.streamed else None
    scale = self.scaling.begin() if self.scaling else None
    return TrainState(params, self.optimizer.init(params), sums, frozen, scale)


def abstract_state(
  parts: StateParts, mesh: Mesh, *, optimizer_on_host: bool = False, over_data: bool = False
) -> TrainState:
  """Returns shape, dtype and sharding of every leaf: what a compiler or a restore needs to know.

  Optimizer state is divided as its parameters are (training/optimizer.py); counters and sums are on
  every device. With `optimizer_on_host` its arrays are in the hosts' memory. With `over_data` replicas divide
  it among themselves, with the accumulators and the parameters that train.

  Raises:
    UserError: optimizer state that is large and cannot be divided.
  """
  shapes = jax.eval_shape(lambda key: parts.begin(parts.model.init(key)), jax.random.key(0))
  axes, frozen = parts.model.axes(), parts.model.frozen

  def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    mirrors = names in axes and len(axes[names]) == leaf.ndim
    where = sharding(axes[names], leaf.shape, mesh) if mirrors else replicated(mesh)
    # The sums and parameters that train.
    if over_data and mirrors and names not in frozen and is_matrix(axes[names]):
      where = with_data(where, leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  state = jax.tree_util.tree_map_with_path(place, shapes)
  of_optimizer = shapes.opt_state.inner_opt_state, shapes.params, axes, mesh
  inner = place_optimizer_state(*of_optimizer, over_data=over_data)
  if optimizer_on_host:
    inner = jax.tree.map(
      lambda leaf: (
        leaf.update(sharding=leaf.sharding.with_memory_kind(_HOST)) if leaf.ndim else leaf
      ),
      inner,
    )
  return state._replace(opt_state=state.opt_state._replace(inner_opt_state=inner))


def is_on_host(leaf: Any) -> bool:
  """Returns whether an abstract array is in the memory of the devices' hosts."""
  return leaf.sharding.memory_kind == _HOST


def moved(state: TrainState, abstract: TrainState, *, to_host: bool) -> TrainState:
  """Moves what is kept on the hosts to the devices or back; the rest stays as it is."""
  space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
  return jax.tree.map(
    lambda x, leaf: jax.device_put(x, space) if is_on_host(leaf) else x, state, abstract
  )


def shardings(abstract: Any) -> Any:
  """Returns the sharding of every leaf of an abstract state, or of a part of one."""
  return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def state_initializer(parts: StateParts, abstract: TrainState) -> Callable[[jax.Array], TrainState]:
  """Returns a function from a random key to a fresh state, created in its place: no device ever holds
  more than its share."""
  divided = _divided(abstract.parameters)

  def begin(key: jax.Array) -> TrainState:
    return parts.begin(jax.lax.with_sharding_constraint(parts.model.init(key), divided))

  return jax.jit(begin, out_shardings=shardings(abstract), compiler_options=_run_once(abstract))


def _divided(parameters: Parameters) -> Any:
  """Returns the shardings in which random parameters are formed before they come to their places.

  Simulated devices share the processor, where each would form what all of them hold: so each forms a part.
  """
  mesh = jax.tree.leaves(parameters)[0].sharding.mesh
  shares = mesh.devices.flat[0].platform == "cpu" and jax.process_count() == 1

  def divide(leaf: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    dim = next((i for i, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
    if dim is None or not shares or not leaf.sharding.is_fully_replicated:
      return leaf.sharding
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, mesh.axis_names))

  return jax.tree.map(divide, parameters)


def _run_once(abstract: TrainState) -> dict[str, Any] | None:
  """Returns options for programs that run once: random numbers of each parameter make long code.

  The bits are the same (tests/test_initialization.py).
  """
  device = next(iter(jax.tree.leaves(abstract)[0].sharding.device_set))
  return CompilerFlags(of_platform=quick_flags(device.platform)).options


def state_beginner(
  parts: StateParts, abstract: TrainState
) -> Callable[[jax.Array, Parameters], TrainState]:
  """Returns a function from a random key and loaded parameters, which are used up, to their state.

  Parameters that were not loaded, such as new adapters, are fresh.
  """

  def begin(key: jax.Array, loaded: Parameters) -> TrainState:
    return parts.begin(joined(parts.model.init(key), loaded))

  return jax.jit(
    begin,
    out_shardings=shardings(abstract),
    donate_argnums=1,
    compiler_options=_run_once(abstract),
  )


def to_save(state: TrainState, *, keeps_frozen: bool = True) -> dict[str, Any]:
  """Returns the part of the state that outlives a step: between steps sums are zero.

  `keeps_frozen`: whether the frozen parameters are among them.
  """
  opt = state.opt_state
  return {
    "params": state.parameters if keeps_frozen else state.params,
    "opt_state": opt.inner_opt_state,
    "gradient_step": opt.gradient_step,
  }


def from_saved(
  model: Model,
  saved: dict[str, Any],
  abstract: TrainState,
  scaling: LossScaling | None = None,
  noted: Mapping[str, float] | None = None,
) -> TrainState:
  """Returns the state that `to_save` came from, with fresh zeros for what was not saved.

  Args:
    saved: as `to_save` gave it, with all parameters.
    abstract: shapes, dtypes and shardings of the state.
    noted: the loss scale that `LossScaling.note` gave; None: as at the beginning of a run.
  """
  empty = abstract._replace(
    params={},
    opt_state=abstract.opt_state._replace(inner_opt_state=(), gradient_step=()),
    frozen={},
  )

  def zeros() -> TrainState:
    made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)
    scale = scaling.begin(noted) if scaling else None
    return made._replace(sums=zeros_of(empty.sums), loss_scale=scale)

  made = jax.jit(zeros, out_shardings=shardings(empty))()
  inner, step = saved["opt_state"], saved["gradient_step"]
  opt_state = made.opt_state._replace(inner_opt_state=inner, gradient_step=step)
  params, frozen = model.split(saved["params"])
  return TrainState(params, opt_state, made.sums, frozen, made.loss_scale)


def has_flags(mesh: Mesh) -> bool:
  """Returns whether the devices belong to several processes."""
  return len({device.process_index for device in mesh.devices.flat}) > 1


def stop_flags(mesh: Mesh, heard: bool = False) -> jax.Array | None:
  """Returns this process's flag as an input of its step, up if it has heard a signal; None for one process.

  A step returns the largest flag: 0, or 1 + the number of a process that has heard a signal.
  """
  return _flags(mesh, heard) if has_flags(mesh) else None


def abstract_stop_flags(mesh: Mesh) -> jax.ShapeDtypeStruct | None:
  """Returns the shape of `stop_flags`, for devices that may not be here."""
  if not has_flags(mesh):
    return None
  return jax.ShapeDtypeStruct((mesh.size,), jnp.int32)


def stop_flags_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of `stop_flags`."""
  return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


@functools.cache
def _flags(mesh: Mesh, heard: bool) -> jax.Array:
  """Returns int32[devices of all processes]: this process's flag on each of its own."""
  mine = np.int32(1 + jax.process_index() if heard else 0)
  return jax.make_array_from_callback(
    (mesh.size,), stop_flags_sharding(mesh), lambda index: np.full(1, mine, np.int32)
  )
