"""States to begin steps with, without a program that makes them."""

from typing import Any

import jax
import numpy as np

from maxbatch.models.registry import Model
from maxbatch.training.model_parts import to_stage_order
from maxbatch.training.state import TrainState, shardings
from maxbatch.training.step import Trainer


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
