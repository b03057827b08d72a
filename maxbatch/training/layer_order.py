"""Converts layers between the model's order and the stage order.

In memory the layers are in stage order: stage by stage, and within a stage repeat by repeat. With
repeats this differs from the model's order, but no step then moves parameters between stages.
Checkpoints are in the model's order, so a run can resume with another schedule or without one.
"""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from maxbatch.models.registry import Model
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.training.optimizer_sharding import parameter_of


def stage_order(pipeline: Pipeline) -> np.ndarray:
  """int[layers]: for each position in stage order, the index of the layer in the model."""
  sizes = (pipeline.repeats, pipeline.stages, pipeline.layers)
  return np.arange(np.prod(sizes)).reshape(sizes).transpose(1, 0, 2).ravel()


def to_stage_order(model: Model, pipeline: Pipeline | None, tree: Any) -> Any:
  """Parameters, or trees like them, from the model's order to the stage order."""
  return _reorder(model, pipeline, tree, inverse=False)


def to_layer_order(model: Model, pipeline: Pipeline | None, tree: Any) -> Any:
  """Parameters, or trees like them, from the stage order to the model's order."""
  return _reorder(model, pipeline, tree, inverse=True)


def _reorder(model: Model, pipeline: Pipeline | None, tree: Any, *, inverse: bool) -> Any:
  if pipeline is None or pipeline.repeats == 1:
    return tree
  order = stage_order(pipeline)
  order = np.argsort(order) if inverse else order
  axes = model.axes()

  def reorder_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    # Adafactor's row and column statistics have the layers in front too.
    owner = parameter_of(path, axes)
    layered = owner and axes[owner][:1] == ("layers",) and leaf.shape[:1] == order.shape
    return _take(leaf, order) if layered else leaf

  return jax.tree_util.tree_map_with_path(reorder_leaf, tree)


def _take(leaf: jax.Array, order: np.ndarray) -> jax.Array:
  """`leaf[order]`; outside of jit one array at a time, with its sharding kept."""
  if isinstance(leaf, Tracer):
    return leaf[order]
  return jax.jit(lambda x: x[order], out_shardings=leaf.sharding)(leaf)
