"""States to begin steps with, without a program that makes them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from support import config, in_microbatches, mesh, uneven_rows

from maxbatch.models.registry import Model, build_model
from maxbatch.precision.policy import policy_of
from maxbatch.training.model_parts import to_stage_order
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import TrainState, shardings
from maxbatch.training.step import Trainer, rows_shardings, step_function


def initial_state(trainer: Trainer, parameters: Any) -> TrainState:
  """These parameters, in their places; all the rest is zeros, as SGD and Adam begin."""
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), trainer.abstract)
  params, frozen = trainer.model.split(parameters)
  scale = trainer.loss_scaling.begin() if trainer.loss_scaling else None
  begun = zeros._replace(params=params, frozen=frozen, loss_scale=scale)
  begun = jax.device_put(begun, shardings(trainer.abstract))
  staged = to_stage_order(trainer.model, trainer.pipeline, (begun.params, begun.frozen))
  return begun._replace(params=staged[0], frozen=staged[1])


def random_parameters(model: Model, seed: int = 0) -> Any:
  """Of the size of those that a model begins with; jax's random numbers take a second to compile."""
  random = np.random.default_rng(seed)

  def of(path: Any, leaf: Any) -> np.ndarray:
    mean = 1.0 if path[-1].key == "scale" else 0.0
    return (mean + 0.1 * random.normal(size=leaf.shape)).astype(leaf.dtype)

  return jax.tree_util.tree_map_with_path(of, model.shapes())


def quantized_steps(
  quantization: str,
  seeds: Sequence[int],
  axes: tuple[int, int, int] = (1, 1, 1),
  k: int = 1,
  *,
  streamed: bool = False,
) -> Iterator[tuple[Any, Any]]:
  """Yields the parameters before all steps and after each, of 32 rows of 16 tokens drawn by its seed, in k
  microbatches on a mesh."""
  settings = config(dropout_rate=0.0, opt_type="sgd", quantization=quantization)
  model = build_model(settings.model, 16, policy=policy_of(settings.precision))
  optimizer = make_optimizer(settings.optimizer, model.axes(), k if streamed else 1)
  trainer = Trainer(model, optimizer, mesh(*axes), jax.random.key(7), streamed=streamed)
  begun = random_parameters(model)
  jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf.fill(0) if path[-1].key == "amax" else None, begun
  )
  state, function = initial_state(trainer, begun), None
  for seed in seeds:
    fed = in_microbatches(uneven_rows(32, 16, seed), k, k)
    for part in (
      [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)] if streamed else [fed]
    ):
      function = function or step_function(trainer, part)
      placed = jax.device_put(part, rows_shardings(part, trainer.mesh))
      count = None if streamed else np.int32(k)
      state, _ = function(state, placed, count, np.float32(1e-2))
    yield begun, jax.device_get(state.params)
