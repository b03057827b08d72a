"""Bytes that pipeline_saved_activations=residuals keeps, found by tracing the model without its devices."""

import dataclasses

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import mesh_axes
from maxbatch.hardware.topologies import slice_named
from maxbatch.models.flash import resolve_attention
from maxbatch.models.registry import build_model
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.precision.policy import policy_of
from maxbatch.training.model_parts import bind_layered
from maxbatch.training.pipelined_step import stage_residual_bytes


def residual_bytes(config: Config, plan: BatchPlan, pipeline: Pipeline) -> int:
  """Returns bytes of the residuals of one microbatch on one device, without its input.

  Raises:
    UserError: the model cannot be divided over stages, attention=flash has no kernel for the
      devices, or remat_policy is auto or explore, which leave the policy open.
  """
  if (policy := config.model.remat_policy) in ("auto", "explore"):
    raise UserError(
      f"remat_policy={policy} tries several policies, but the size of pipeline_saved_activations=residuals "
      "needs one of them; for example remat_policy=none"
    )
  result = 0

  # Inside eval_shape, since outside even a random key is created on a device.
  def trace() -> None:
    nonlocal result
    result = _residual_bytes(config, plan, dataclasses.replace(pipeline, stash="residuals"))

  jax.eval_shape(trace)
  return result


def _residual_bytes(config: Config, plan: BatchPlan, pipeline: Pipeline) -> int:
  name = config.compile.compile_topology
  there = slice_named(name) if name else None
  kind, platform = (there.device_kind, there.platform) if there else ("cpu", "cpu")
  device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
  names = mesh_axes(plan.topology)
  mesh = AbstractMesh(
    tuple(plan.topology.shape[axis] for axis in names),
    names,
    axis_types=(AxisType.Auto,) * len(names),
    abstract_device=device,
  )
  length = config.batch.max_target_length
  policy, trainable = policy_of(config.precision), config.optimizer.trainable
  model_config = resolve_attention(config.model, length, there or device, policy.compute)
  model = build_model(model_config, length, trainable=trainable, policy=policy)
  bind_layered(model, model.shapes())
  inputs = model.shapes(), _rows(config, plan), jax.random.key(0)
  return stage_residual_bytes(model, pipeline, mesh, *inputs)


def _rows(config: Config, plan: BatchPlan) -> Rows:
  """Returns shapes of the rows of one accumulation step."""
  count = plan.micro_batch_to_train
  ids = jax.ShapeDtypeStruct((1, count, plan.max_target_length), np.int32)
  weights = jax.ShapeDtypeStruct(ids.shape, np.float32)
  packed = ids if config.data.segmented else None
  samples = jax.ShapeDtypeStruct((1, count), np.int32)
  return Rows(ids, ids, weights, samples, packed, packed)  # pyright: ignore[reportArgumentType]
