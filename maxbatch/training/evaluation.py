"""The loss of a batch and its metrics, without an update, as a compiled function.

B rows, T tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxbatch.data.rows import Rows, first_wrong_row
from maxbatch.hardware.sharding import replicated, sharding
from maxbatch.models.registry import Model, Parameters, build_model
from maxbatch.training.loss import loss_parts
from maxbatch.training.metrics import TokenSums
from maxbatch.training.pipelined_step import pipelined_sums
from maxbatch.training.state import shardings
from maxbatch.training.step import Trainer


class EvalMetrics(NamedTuple):
  """What an evaluation of a batch reports: float32 sums over its tokens, on the devices."""

  loss: jax.Array
  weight: jax.Array
  metrics: TokenSums
  wrong_row: jax.Array | None
  """int32: `first_wrong_row`."""


EvalStep = Callable[[Parameters, Rows], EvalMetrics]


def eval_function(trainer: Trainer, rows: Rows) -> jax.stages.Wrapped:
  """Returns a jitted EvalStep: loss, weight and metrics of a batch (B, T), without dropout."""

  metrics, model = trainer.measures.metrics, _evaluated(trainer)

  def summed(params: Parameters, rows: Rows) -> EvalMetrics:
    if trainer.pipeline is not None:
      parts = trainer.model, trainer.pipeline, trainer.mesh
      return EvalMetrics(*pipelined_sums(*parts, params, rows, metrics), None)
    sums = loss_parts(model, params, rows, None, metrics=metrics)
    of_metrics = jax.tree.map(jnp.sum, sums.metrics)
    return EvalMetrics(sums.loss.sum(), rows.weights.sum(), of_metrics, None)

  def evaluate(params: Parameters, rows: Rows) -> EvalMetrics:
    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      wrong = first_wrong_row(rows)
      return summed(params, rows._replace(checksums=None))._replace(wrong_row=wrong)

  places = shardings(trainer.abstract.parameters)
  return jax.jit(
    evaluate,
    in_shardings=(places, eval_shardings(rows, trainer.mesh)),
    out_shardings=replicated(trainer.mesh),
  )


def _evaluated(trainer: Trainer) -> Model:
  """Returns the model with one body for all of its layers, but on TPUs, whatever scan_layers says of the step:
  it is compiled in a third of the time and evaluates as fast, as nothing is kept for a backward pass."""
  model = trainer.model
  unrolled = {"cpu": (False,), "gpu": (False, "auto")}
  if model.config.scan_layers not in unrolled.get(trainer.mesh.devices.flat[0].platform, ()):
    return model
  config = dataclasses.replace(model.config, scan_layers=True)
  scanned = build_model(config, model.max_target_length, "off", model.trainable, model.policy)
  # A model of the user's may keep its layers apart.
  return scanned if scanned.axes() == model.axes() else model


def traced_eval(trainer: Trainer, rows: Rows) -> jax.stages.Traced:
  """Traces the evaluation of a batch of these shapes, with every sharding fixed."""
  return eval_function(trainer, rows).trace(trainer.abstract.parameters, rows)


def eval_shardings(rows: Rows, mesh: Mesh) -> Rows:
  """Returns the shardings of rows (B) and (B, T): divided along both."""
  return jax.tree.map(lambda x: sharding(("batch", "length")[: x.ndim], x.shape, mesh), rows)
