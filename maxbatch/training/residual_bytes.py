"""Bytes of what pipeline_stash=residuals keeps, by tracing the model for devices that need not be here.

In a module of its own because it imports jax, which the pipeline command otherwise does without.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from maxbatch.batch.plan import BatchPlan
from maxbatch.batch.topology import AXES
from maxbatch.config.schema import Config
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models.flash import resolve_attention
from maxbatch.models.registry import build_model
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.training.model_parts import in_parts
from maxbatch.training.pipelined_step import stage_residual_bytes


def residual_bytes(config: Config, plan: BatchPlan, pipeline: Pipeline) -> int:
  """Bytes of the residuals of one microbatch on one device, its input not among them.

  Raises:
    UserError: the model does not come in parts, attention=flash has no kernel there, or
      remat_policy is still to be chosen.
  """
  if config.model.remat_policy == "explore":
    raise UserError(
      "remat_policy=explore tries several policies, and pipeline_stash=residuals keeps what one of "
      "them says; for example remat_policy=none"
    )
  found = 0

  # Under one trace, since even a random key would otherwise look for a device to be made on.
  def look() -> None:
    nonlocal found
    found = _residual_bytes(config, plan, dataclasses.replace(pipeline, stash="residuals"))

  jax.eval_shape(look)
  return found


def _residual_bytes(config: Config, plan: BatchPlan, pipeline: Pipeline) -> int:
  on_tpu = config.compile.compile_topology != ""
  kind = ("tpu", config.compile.compile_topology) if on_tpu else ("cpu", "cpu")
  device = AbstractDevice(device_kind=kind[1], num_cores=1, platform=kind[0])
  mesh = AbstractMesh(
    tuple(plan.topology.shape[axis] for axis in AXES),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    abstract_device=device,
  )
  length = config.batch.max_target_length
  model = build_model(resolve_attention(config.model, length, device), length)
  in_parts(model, model.shapes())
  return stage_residual_bytes(
    model, pipeline, mesh, model.shapes(), _rows(config, plan), jax.random.key(0)
  )


def _rows(config: Config, plan: BatchPlan) -> Rows:
  """Shapes of one pass."""
  count = plan.micro_batch_to_train
  ids = jax.ShapeDtypeStruct((1, count, plan.max_target_length), np.int32)
  weights = jax.ShapeDtypeStruct(ids.shape, np.float32)
  packed = ids if config.data.packing else None
  samples = jax.ShapeDtypeStruct((1, count), np.int32)
  return Rows(ids, ids, weights, samples, packed, packed)  # pyright: ignore[reportArgumentType]
