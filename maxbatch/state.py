"""What a run trains: parameters, optimizer state, and the sums of the step under way."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from maxbatch.models.registry import Model, Parameters
from maxbatch.optim import init_in_float32
from maxbatch.sharding import replicated, sharding


class Sums(NamedTuple):
  """Sums over the tokens seen so far in a step, as float32 scalars."""

  loss: jax.Array
  weight: jax.Array


class TrainState(NamedTuple):
  """Everything a step reads and writes."""

  params: Parameters
  opt_state: optax.MultiStepsState
  sums: Sums


def zero_sums() -> Sums:
  """Nothing seen yet."""
  return Sums(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def _init(model: Model, optimizer: optax.MultiSteps, key: jax.Array) -> TrainState:
  params = model.init(key)
  return TrainState(params, init_in_float32(optimizer, params), zero_sums())


def state_shardings(model: Model, optimizer: optax.MultiSteps, mesh: Mesh) -> TrainState:
  """The sharding of every leaf of the state.

  Optimizer state that mirrors a parameter (same path, same shape) lies where the parameter lies;
  the rest (counters, Adafactor's rows and columns) is small and on every device.
  """
  shapes = jax.eval_shape(lambda key: _init(model, optimizer, key), jax.random.key(0))
  axes = model.axes()

  def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    if names in axes and len(axes[names]) == leaf.ndim and leaf.ndim > 0:
      return sharding(axes[names], leaf.shape, mesh)
    return replicated(mesh)

  return jax.tree_util.tree_map_with_path(place, shapes)


def abstract_state(model: Model, optimizer: optax.MultiSteps, mesh: Mesh) -> TrainState:
  """Shape, dtype and sharding of every leaf: what a compiler or a restore needs to know."""
  shapes = jax.eval_shape(lambda key: _init(model, optimizer, key), jax.random.key(0))
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    shapes,
    state_shardings(model, optimizer, mesh),
  )


def init_state(model: Model, optimizer: optax.MultiSteps, mesh: Mesh, seed: int) -> TrainState:
  """A fresh state, created in its place: no device ever holds more than its share."""
  create = jax.jit(
    lambda key: _init(model, optimizer, key),
    out_shardings=state_shardings(model, optimizer, mesh),
  )
  return create(jax.random.key(seed))


def to_save(state: TrainState) -> dict[str, Any]:
  """The part of the state that outlives a step: sums and accumulators are zero between steps."""
  opt = state.opt_state
  return {
    "params": state.params,
    "opt_state": opt.inner_opt_state,
    "gradient_step": opt.gradient_step,
  }


def from_saved(saved: dict[str, Any], empty: TrainState) -> TrainState:
  """The state that `to_save` came from; `empty` supplies what was zero."""
  opt_state = empty.opt_state._replace(
    inner_opt_state=saved["opt_state"], gradient_step=saved["gradient_step"]
  )
  return TrainState(saved["params"], opt_state, empty.sums)
