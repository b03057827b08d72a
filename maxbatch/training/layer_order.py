"""The order in which the layers of a run lie in memory, and in its checkpoints.

Each stage holds its layers side by side, those of its first repeat first. With repeats that is
another order than the model's, in which the stages take turns; laid out by it, no step has to move
parameters between stages. Checkpoints are in the model's order, so that a run can go on with
another schedule or without any.
"""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from maxbatch.models.registry import Model
from maxbatch.pipeline_parallel.sizes import Pipeline


def layers_by_stage(pipeline: Pipeline) -> np.ndarray:
  """int[layers]: which of the model's layers lies at each place in memory."""
  sizes = (pipeline.repeats, pipeline.stages, pipeline.layers)
  return np.arange(np.prod(sizes)).reshape(sizes).transpose(1, 0, 2).ravel()


def by_stage(model: Model, pipeline: Pipeline | None, tree: Any) -> Any:
  """Parameters, or what mirrors them, from the model's order to that of the stages."""
  return _taken(model, pipeline, tree, back=False)


def by_layer(model: Model, pipeline: Pipeline | None, tree: Any) -> Any:
  """The way back."""
  return _taken(model, pipeline, tree, back=True)


def _taken(model: Model, pipeline: Pipeline | None, tree: Any, *, back: bool) -> Any:
  if pipeline is None or pipeline.repeats == 1:
    return tree
  order = layers_by_stage(pipeline)
  order = np.argsort(order) if back else order
  axes = model.axes()

  def taken(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    # Adafactor's rows and columns have the layers in front too.
    layered = axes.get(names, ())[:1] == ("layers",) and leaf.shape[:1] == order.shape
    return _take(leaf, order) if layered else leaf

  return jax.tree_util.tree_map_with_path(taken, tree)


def _take(leaf: jax.Array, order: np.ndarray) -> jax.Array:
  """`leaf[order]`; outside of a program array by array, each laid out as before."""
  if isinstance(leaf, Tracer):
    return leaf[order]
  return jax.jit(lambda x: x[order], out_shardings=leaf.sharding)(leaf)
