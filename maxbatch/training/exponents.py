"""The exponents of a model's weights, activations and gradients, of one microbatch.

B rows, T tokens, L layers, N bins.
"""

from collections.abc import Iterator
from typing import cast

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import replicated
from maxbatch.models.probes import EXPONENT_KINDS, NUM_BINS, histograms
from maxbatch.models.registry import Model, Parameters, build_model, by_path
from maxbatch.precision.report import (
  ACTIVATIONS,
  ACTIVATIONS_GRADIENTS,
  GRADIENTS,
  WEIGHTS,
  Exponents,
)
from maxbatch.training.evaluation import eval_shardings
from maxbatch.training.loss import loss_parts
from maxbatch.training.model_parts import is_layered
from maxbatch.training.step import Trainer


def exponents(trainer: Trainer, parameters: Parameters, rows: Rows) -> list[Exponents]:
  """Returns what a backward pass in float32 through a microbatch (B, T) meets, by tensor and layer.

  All processes must call it, with layers in the model's order. What the trainer's model computes in does
  not matter.
  """
  config, length = trainer.model.config, rows.inputs.shape[1]
  model = build_model(config, length, "exponents", trainer.model.trainable)

  def counted(parameters: Parameters, rows: Rows) -> tuple[Parameters, Parameters, Parameters]:
    def loss(parameters: Parameters, probes: Parameters) -> jax.Array:
      return loss_parts(model, parameters, rows, trainer.dropout_key, probes).loss.sum()

    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      probes = model.probes(EXPONENT_KINDS, NUM_BINS)
      gradients, counts = jax.grad(loss, (0, 1))(parameters, probes)
      layered = by_path(lambda path, _: is_layered(model, path), parameters)
      return counts, histograms(parameters, layered), histograms(gradients, layered)

  rows = rows._replace(checksums=None)
  function = jax.jit(
    counted,
    in_shardings=(None, eval_shardings(rows, trainer.mesh)),
    out_shardings=replicated(trainer.mesh),
  )
  return list(_listed(model, *jax.device_get(function(parameters, rows))))


def _listed(
  model: Model, counts: Parameters, weights: Parameters, gradients: Parameters
) -> Iterator[Exponents]:
  for path, both in _flat(counts).items():
    for kind, index in ((ACTIVATIONS, 0), (ACTIVATIONS_GRADIENTS, 1)):
      yield from _by_layer(kind, path[:-1], np.moveaxis(both, -2, 0)[index])
  for kind, tree in ((WEIGHTS, weights), (GRADIENTS, gradients)):
    for path, result in _flat(tree).items():
      yield from _by_layer(kind, path, result)


def _flat(tree: Parameters) -> dict[tuple[str, ...], np.ndarray]:
  return cast(dict[tuple[str, ...], np.ndarray], flatten_dict(tree))


def _by_layer(kind: str, path: tuple[str, ...], counts: np.ndarray) -> Iterator[Exponents]:
  name = "/".join(path) or "embedding"
  if counts.ndim == 1:
    yield Exponents(kind, name, None, counts)
  else:
    yield from (Exponents(kind, name, layer, each) for layer, each in enumerate(counts))
