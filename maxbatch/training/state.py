"""What a run trains: parameters, optimizer state, and the sums of the step under way."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from maxbatch.hardware.sharding import replicated, sharding
from maxbatch.models.registry import Model, Parameters, joined
from maxbatch.precision.loss_scale import LossScale, LossScaling
from maxbatch.training.loss import LossSums
from maxbatch.training.metrics import NO_METRICS, Metrics, TokenSums, zero_token_sums
from maxbatch.training.optimizer import init_in_float32
from maxbatch.training.optimizer_sharding import place_optimizer_state

_HOST = "pinned_host"
"""jax's name for the memory of a device's host that the device can read."""


class NoiseSums(NamedTuple):
  """What the noise scale is estimated from, summed over a step's microbatches so far."""

  rows: jax.Array
  """float32: rows with at least one token that counts."""
  row_tokens_squared: jax.Array
  """float32: Σ (tokens of a row that count)² over the rows."""
  of_rows: Parameters
  """float32[L or none]: for each probe, Σ ‖gradient of a row's summed loss‖² over the rows."""
  microbatch_tokens_squared: jax.Array
  """float32: Σ (what of the loss's divisor is one microbatch's on one data replica: its tokens)²; 0 if
  that is not measured."""
  of_microbatches: jax.Array
  """float32: Σ ‖gradient of one microbatch on one data replica‖²; 0 if that is not measured."""
  of_halves: jax.Array | None = None
  """float32: the same of the two halves of such a microbatch; None where they are not fed apart."""


class Sums(NamedTuple):
  """Sums over the tokens seen so far in a step, as float32 scalars."""

  loss: jax.Array
  weight: jax.Array
  metrics: TokenSums
  noise: NoiseSums | None = None
  """None where nothing is measured."""
  largest: dict[str, jax.Array] | None = None
  """Of what is not added up (Metrics.largest), never in parts; None where there is nothing."""

  def add(self, found: LossSums, weight: jax.Array) -> "Sums":
    """With the sums of more tokens, whose weight is `weight`."""
    metrics = jax.tree.map(jnp.add, self.metrics, found.metrics)
    return self._replace(loss=self.loss + found.loss, weight=self.weight + weight, metrics=metrics)


def joined_sums(total: Sums, new: Sums) -> Sums:
  """The sums over what both are over."""
  added = jax.tree.map(jnp.add, total._replace(largest=None), new._replace(largest=None))
  return added._replace(largest=jax.tree.map(jnp.maximum, total.largest, new.largest))


class TrainState(NamedTuple):
  """Everything a step reads and writes."""

  params: Parameters
  """Those that train."""
  opt_state: optax.MultiStepsState
  sums: Sums
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
  halves: bool = False
  """Whether a microbatch is fed as two halves, of which the gradients are squared too."""

  def noise(self, model: Model) -> bool:
    """Whether a step sums up what the noise scale is estimated from."""
    return model.has_probes or self.microbatch_squares


NOTHING = Measures()


def zero_sums(model: Model, measures: Measures, parts: tuple[int, ...] = ()) -> Sums:
  """The sums before the first microbatch; `parts` are trailing dims of every leaf."""
  zero = jnp.zeros(parts, jnp.float32)
  noise = zero_noise(model, parts) if measures.noise(model) else None
  if noise and measures.halves:
    noise = noise._replace(of_halves=zero)
  largest = {name: jnp.zeros((), jnp.float32) for name in measures.metrics.largest}
  return Sums(zero, zero, zero_token_sums(measures.metrics, parts), noise, largest or None)


def zero_noise(model: Model, parts: tuple[int, ...] = ()) -> NoiseSums:
  """As `zero_sums`, of what the noise scale is estimated from."""
  zero = jnp.zeros(parts, jnp.float32)
  of_rows = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-2], *parts)), model.probes(1, 1))
  return NoiseSums(zero, zero, of_rows, zero, zero)


def _begun(
  model: Model,
  optimizer: optax.MultiSteps,
  measures: Measures,
  scaling: LossScaling | None,
  parameters: Parameters,
) -> TrainState:
  """The state before the first step with these parameters."""
  params, frozen = model.split(parameters)
  sums = zero_sums(model, measures)
  scale = scaling.begin() if scaling else None
  return TrainState(params, init_in_float32(optimizer, params), sums, frozen, scale)


def abstract_state(
  model: Model,
  optimizer: optax.MultiSteps,
  mesh: Mesh,
  measures: Measures = NOTHING,
  scaling: LossScaling | None = None,
  *,
  optimizer_on_host: bool = False,
) -> TrainState:
  """Shape, dtype and sharding of every leaf: what a compiler or a restore needs to know.

  Optimizer state is divided as its parameters are (training/optimizer_sharding.py); counters and
  sums are on every device. With `optimizer_on_host` the optimizer's arrays are in the memory of the
  devices' hosts.

  Raises:
    UserError: optimizer state that is large and cannot be divided.
  """
  begun = functools.partial(_begun, model, optimizer, measures, scaling)
  shapes = jax.eval_shape(lambda key: begun(model.init(key)), jax.random.key(0))
  axes = model.axes()

  def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    mirrors = names in axes and len(axes[names]) == leaf.ndim
    where = sharding(axes[names], leaf.shape, mesh) if mirrors else replicated(mesh)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  state = jax.tree_util.tree_map_with_path(place, shapes)
  inner = place_optimizer_state(shapes.opt_state.inner_opt_state, shapes.params, axes, mesh)
  if optimizer_on_host:
    inner = jax.tree.map(lambda leaf: _on_host(leaf) if leaf.ndim else leaf, inner)
  return state._replace(opt_state=state.opt_state._replace(inner_opt_state=inner))


def _on_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  where = leaf.sharding.with_memory_kind(_HOST)  # pyright: ignore[reportOptionalMemberAccess]
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def is_on_host(leaf: Any) -> bool:
  """Whether an abstract array is in the memory of the devices' hosts."""
  return leaf.sharding.memory_kind == _HOST


def moved(state: TrainState, abstract: TrainState, *, to_host: bool) -> TrainState:
  """What is kept on the hosts, moved to the devices or back; the rest as it is."""
  space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
  return jax.tree.map(
    lambda x, leaf: jax.device_put(x, space) if is_on_host(leaf) else x, state, abstract
  )


def shardings(abstract: Any) -> Any:
  """The sharding of every leaf of an abstract state, or of a part of one."""
  return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def state_initializer(
  model: Model,
  optimizer: optax.MultiSteps,
  abstract: TrainState,
  measures: Measures = NOTHING,
  scaling: LossScaling | None = None,
) -> Callable[[jax.Array], TrainState]:
  """From a random key to a fresh state, created in its place: no device ever holds more than its
  share."""
  begun = functools.partial(_begun, model, optimizer, measures, scaling)
  return jax.jit(lambda key: begun(model.init(key)), out_shardings=shardings(abstract))


def state_beginner(
  model: Model,
  optimizer: optax.MultiSteps,
  abstract: TrainState,
  measures: Measures = NOTHING,
  scaling: LossScaling | None = None,
) -> Callable[[jax.Array, Parameters], TrainState]:
  """From a random key and loaded parameters, which are used up, to a state that begins with them.

  Parameters that were not loaded, such as new adapters, are fresh.
  """

  def begin(key: jax.Array, loaded: Parameters) -> TrainState:
    whole = joined(model.init(key), loaded)
    return _begun(model, optimizer, measures, scaling, whole)

  return jax.jit(begin, out_shardings=shardings(abstract), donate_argnums=1)


def to_save(state: TrainState, *, keeps_frozen: bool = True) -> dict[str, Any]:
  """The part of the state that outlives a step: sums and accumulators are zero between steps.

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
  """The state that `to_save` came from, with fresh zeros for what was not saved.

  Args:
    model: its model.
    saved: as `to_save` gave it, with all parameters.
    abstract: shapes, dtypes and shardings of the state.
    scaling: of the loss, if it is scaled.
    noted: the loss scale that `LossScaling.note` gave; None: as at the beginning of a run.
  """
  empty = abstract._replace(
    params={},
    opt_state=abstract.opt_state._replace(inner_opt_state=(), gradient_step=()),
    frozen={},
  )

  def zeros() -> TrainState:
    made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)
    return made._replace(loss_scale=scaling.begin(noted) if scaling else None)

  made = jax.jit(zeros, out_shardings=shardings(empty))()
  opt_state = made.opt_state._replace(
    inner_opt_state=saved["opt_state"], gradient_step=saved["gradient_step"]
  )
  params, frozen = model.split(saved["params"])
  return TrainState(params, opt_state, made.sums, frozen, made.loss_scale)
