"""A model's parameters and computation in the parts that a pipeline runs at different times.

R rows of a microbatch, T tokens, D width of the residual stream.
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models.dropout import sample_keys
from maxbatch.models.registry import LayeredModel, Model, Parameters, build_model
from maxbatch.training.loss import LossSums, cross_entropy_parts, num_tiles
from maxbatch.training.metrics import NO_METRICS, Metrics

Leaves = dict[tuple[str, ...], jax.Array]
"""Parameters, or something of each, by path."""


def is_layered(model: Model, path: tuple[str, ...]) -> bool:
  """Whether a parameter has a part for each layer, along its first dim."""
  return model.axes()[path][:1] == ("layers",)


def divided(model: Model, tree: Parameters) -> tuple[Leaves, Leaves]:
  """What belongs to the layers, and the rest."""
  flat = cast(Leaves, flatten_dict(tree))
  layers = {path: leaf for path, leaf in flat.items() if is_layered(model, path)}
  return layers, {path: leaf for path, leaf in flat.items() if path not in layers}


def joined(layers: Leaves, rest: Leaves) -> Parameters:
  """The tree that `divided` took apart."""
  return unflatten_dict(layers | rest)


@dataclasses.dataclass(frozen=True)
class ModelParts:
  """A model's call in parts, each a function of the parameters it needs."""

  model: Model
  dropout_key: jax.Array | None
  """None evaluates without dropout and without z-loss."""
  metrics: Metrics = NO_METRICS

  def embed(self, layers: Leaves, rest: Leaves, rows: Rows) -> jax.Array:
    """What the first layer is given: (R, T, D)."""
    return self._bound(layers, rest).embed(rows, self._keys(rows))

  def apply_layers(
    self, layers: Leaves, rest: Leaves, x_RTD: jax.Array, rows: Rows, first: jax.Array
  ) -> jax.Array:
    """These layers, the first of which is layer `first` of the model."""
    return self._bound(layers, rest).apply_layers(x_RTD, rows, self._keys(rows), first)

  def loss(
    self,
    layers: Leaves,
    rest: Leaves,
    y_RTD: jax.Array,
    targets_RT: jax.Array,
    weights_RT: jax.Array,
  ) -> LossSums:
    """Sums over tokens of the loss, as `loss_sum` forms it, and of the metrics."""
    bound, config = self._bound(layers, rest), self.model.config
    hidden_RTD = bound.normalize(y_RTD)
    tiles = num_tiles(config, *hidden_RTD.shape[:2])
    matrix_DV = bound.output_matrix()
    z_weight = 0.0 if self.dropout_key is None else config.z_loss_multiplier
    rows = hidden_RTD, matrix_DV, targets_RT, weights_RT
    return jax.tree.map(jnp.sum, cross_entropy_parts(*rows, tiles, z_weight, self.metrics))

  def with_more_heads(self, length: int) -> "ModelParts":
    """The same kind of model with twice of what tensor divides in a layer, for rows of `length`."""
    config = self.model.config
    wider = dataclasses.replace(
      config,
      base_num_query_heads=2 * config.base_num_query_heads,
      base_num_kv_heads=2 * config.base_num_kv_heads,
      base_mlp_dim=2 * config.base_mlp_dim,
    )
    return dataclasses.replace(self, model=build_model(wider, length))

  def _bound(self, layers: Leaves, rest: Leaves) -> LayeredModel:
    return in_parts(self.model, joined(layers, rest))

  def _keys(self, rows: Rows) -> jax.Array | None:
    if self.dropout_key is None or self.model.config.dropout_rate == 0:
      return None
    return sample_keys(self.dropout_key, rows.sample_ids)


def in_parts(model: Model, parameters: Parameters) -> LayeredModel:
  """The model with these parameters, to be called part by part.

  Raises:
    UserError: it has no such parts.
  """
  bound = model.bind(parameters)
  if not isinstance(bound, LayeredModel):
    raise UserError(
      f"decoder_block={model.config.decoder_block} cannot be divided over a pipeline's stages: it "
      "has no embed, apply_layers and normalize; for example pipeline_schedule=none"
    )
  return bound
