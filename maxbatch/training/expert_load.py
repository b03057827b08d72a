"""What a step counts of its experts, and what it writes beside what the optimizer does: biases and loads,
and the magnitudes that scales of products in float8 follow from.

L layers, E experts. All follow from integers or maxima of the whole step, int32[L, E], so no split of its
batch changes them.
"""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from maxbatch.config.schema import ModelConfig
from maxbatch.core.terms import Stats, Sum
from maxbatch.core.train_step import StepResult, StepState
from maxbatch.errors import UserError
from maxbatch.models.experts import LOAD, TOKENS, has_load
from maxbatch.models.float8 import next_amax
from maxbatch.models.lora import Path
from maxbatch.models.registry import Model, Parameters
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.training.model_parts import to_stage_order
from maxbatch.training.objective import AMAXES

_MOST_RECORDED = 512
"""Loads of single experts that a step records; of more, those of its layers alone."""


def counts_twice(config: ModelConfig) -> bool:
  """Returns whether a step counts its tokens in a forward of its own before the first backward."""
  return has_load(config) and config.load_balance_loss_type == "global"


def check_balance(model: Model, pipeline: Pipeline | None, *, streamed: bool = False) -> None:
  """Checks that a balance of whole steps can be had.

  Raises:
    UserError: naming the keys, and values that work.
  """
  config = model.config
  if counts_twice(config) and pipeline is not None:
    counted = (
      "load_balance_loss_type=global counts a step's tokens in forwards before the first backward"
    )
    others = "load_balance_loss_type=sequence, or last_step"
    if streamed:
      raise UserError(
        f"{counted}, which in a pipeline (pipeline_schedule={pipeline.schedule}) must be of the same "
        f"dispatch, and accumulation=streamed has several; for example accumulation=fused, {others}"
      )
    if pipeline.schedule == "circular" and pipeline.repeats > 1:
      raise UserError(
        f"{counted}, without buffers for the inputs that pipeline_schedule=circular keeps from one of "
        f"{pipeline.repeats} repeats to the next; for example pipeline_schedule=interleaved_1f1b, {others}"
      )
  if has_load(config) and not counts_twice(config) and LOAD in model.frozen:
    raise UserError(
      "load_balance_loss_type=last_step: with these lora_rank and trainable routers are frozen, and so is "
      "what they keep of the last step; for example load_balance_loss_type=sequence, or "
      'trainable=["layers/mlp/router/*"]'
    )


def tokens_of(stats: Stats) -> jax.Array:
  """Returns how many tokens each expert was sent: int32[L, E]."""
  counted = stats[TOKENS]
  assert isinstance(counted, Sum)
  return counted.total


def with_load(model: Model, parameters: Parameters, tokens_LE: jax.Array) -> Parameters:
  """Returns the parameters, or some of them, with the loads that these tokens are."""
  flat = cast(dict[Path, Any], flatten_dict(parameters))
  if LOAD in flat:
    flat[LOAD] = _load(model.config, tokens_LE)
  return cast(Parameters, unflatten_dict(flat))


def with_buffers(
  model: Model, pipeline: Pipeline | None, before: StepState, after: StepState, result: StepResult
) -> tuple[StepState, Parameters]:
  """Returns the state and the updates after a dispatch, with what is written without the optimizer."""
  updates, old = (
    cast(Parameters, result.updates),
    cast(dict[Path, Any], flatten_dict(before.params)),
  )
  if not model.buffers & set(old):
    return after, updates
  leaves = _written(model, pipeline, old, result.sums.stats, result.is_last)
  moved_by = {path: leaf - old[path] for path, leaf in leaves.items()}
  params = unflatten_dict(flatten_dict(after.params) | leaves)
  return after._replace(params=params), unflatten_dict(flatten_dict(updates) | moved_by)


def _written(
  model: Model,
  pipeline: Pipeline | None,
  before: Mapping[Path, Any],
  stats: Stats,
  is_last: jax.Array,
) -> dict[Path, jax.Array]:
  """Returns the buffers after a dispatch, which change if it ends the step.

  A bias moves by the sign of what its expert lacks of an even load (Wang et al. 2024), a load becomes
  that of the step. Layers of a pipeline's parameters are in its own order, tokens in the model's.
  """
  rate, results = model.config.routed_bias_update_rate, {}
  if model.amax_buffers:
    of_step = stats[AMAXES].value()
    results = {path: next_amax(before[path], of_step[path]) for path in of_step}
    results = {path: jnp.where(is_last, new, before[path]) for path, new in results.items()}
  for path in sorted((model.buffers - model.amax_buffers) & set(before)):
    ordered = to_stage_order(model, pipeline, unflatten_dict({path: tokens_of(stats)}))
    (tokens,) = jax.tree.leaves(ordered)
    new = _load(model.config, tokens) if path == LOAD else before[path] + rate * _missing(tokens)
    results[path] = jnp.where(is_last, new, before[path])
  return results


def _missing(tokens_LE: jax.Array) -> jax.Array:
  """Returns the sign of the even load minus each expert's, in integers: 1, 0 or -1."""
  E = tokens_LE.shape[-1]
  whole_L1, rest_L1 = jnp.divmod(tokens_LE.sum(-1, keepdims=True), E)
  lacks = (tokens_LE < whole_L1) | ((tokens_LE == whole_L1) & (rest_L1 > 0))
  return lacks.astype(jnp.float32) - (tokens_LE > whole_L1).astype(jnp.float32)


def _load(config: ModelConfig, tokens_LE: jax.Array) -> jax.Array:
  """Returns the part of a layer's tokens that each expert is sent; an even one where there are none."""
  total_L1 = tokens_LE.sum(-1, keepdims=True)
  each_LE = config.num_experts_per_tok * tokens_LE / jnp.maximum(total_L1, 1)
  even = config.num_experts_per_tok / config.num_experts
  return jnp.where(total_L1 > 0, each_LE, even).astype(jnp.float32)


def load_metrics(stats: Stats) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """Divides statistics into those that are recorded as they are and what is said of the experts' tokens.

  A load is an expert's tokens over the even load of its layer; dead experts had none.
  """
  not_recorded = TOKENS, AMAXES
  rest: dict[str, Any] = {name: stat for name, stat in stats.items() if name not in not_recorded}
  if TOKENS not in stats:
    return rest, {}
  tokens_LE = tokens_of(stats)
  L, E = tokens_LE.shape
  load_LE = E * tokens_LE / jnp.maximum(tokens_LE.sum(-1, keepdims=True), 1)
  by_layer = {
    "moe/max_load": load_LE.max(-1),
    "moe/load_deviation": load_LE.std(-1),
    "moe/dead_experts": (tokens_LE == 0).sum(),
  }
  if np.prod(tokens_LE.shape) <= _MOST_RECORDED:
    by_layer |= {f"moe/load/{layer}": load_LE[layer] for layer in range(L)}
  return rest, by_layer
