"""LoRA (Hu et al. 2021): matrices of low rank beside frozen ones, added to any model's Projections."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from maxbatch.config.find import did_you_mean
from maxbatch.config.schema import ModelConfig
from maxbatch.errors import UserError
from maxbatch.models.layers import Projection
from maxbatch.models.trainable import ADAPTER, Path

_DEFAULT_TARGETS = ("query", "value")
"""Those of the paper, and peft's for Llama."""


def scale(config: ModelConfig) -> float:
  """Returns the factor of the adapters' product."""
  return 1.0 if config.lora_alpha == -1 else config.lora_alpha / config.lora_rank


def without_adapters(config: ModelConfig) -> ModelConfig:
  """Returns the model that they are added to."""
  return dataclasses.replace(config, lora_rank=0, lora_alpha=-1, lora_targets=())


def add_adapters(model: nnx.Module, config: ModelConfig, rngs: nnx.Rngs) -> None:
  """Gives the Projections that lora_targets names their adapters; none if lora_rank is 0.

  Raises:
    UserError: keys of adapters without a rank, or a name that no Projection has.
  """
  if config.lora_rank == 0:
    _check_unused(config)
    return
  named = {
    str(path[-1]): module
    for path, module in nnx.iter_modules(model)
    if isinstance(module, Projection)
  }
  targets = config.lora_targets or _DEFAULT_TARGETS
  for target in targets:
    if target not in named:
      raise UserError(_no_projection(target, sorted(named), config))
  for path, module in nnx.iter_modules(model):
    if isinstance(module, Projection) and path[-1] in targets:
      module.add_adapter(rngs, config.lora_rank, scale(config))


def _check_unused(config: ModelConfig) -> None:
  for key, value, off in (
    ("lora_alpha", config.lora_alpha, -1),
    ("lora_targets", list(config.lora_targets), []),
  ):
    if value != off:
      raise UserError(
        f"{key}={value} has no effect with lora_rank=0; for example lora_rank=16, or {key}={off}"
      )


def _no_projection(target: str, known: Sequence[str], config: ModelConfig) -> str:
  if not known:
    return (
      f"lora_rank={config.lora_rank}: decoder_block={config.decoder_block} has no Projection "
      "(maxbatch/models/layers.py) to put adapters beside; for example lora_rank=0"
    )
  return (
    f"lora_targets: the model has no projection {target!r}.{did_you_mean(target, known)} "
    f"It has {', '.join(known)}"
  )


def merged(parameters: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
  """Returns the parameters of the same model without adapters: W + scale · A·B in W's dtype."""
  flat = cast(dict[Path, Any], flatten_dict(parameters))
  results = {path: leaf for path, leaf in flat.items() if path[-1] not in ADAPTER}
  for path in [path for path in flat if path[-1] == ADAPTER[0]]:
    module = path[:-1]
    kernel, a, b = (flat[(*module, name)] for name in ("kernel", *ADAPTER))
    results[(*module, "kernel")] = _added(kernel, a, b, scale(config))
  return unflatten_dict(results)


def _added(kernel: jax.Array, a: jax.Array, b: jax.Array, factor: float) -> jax.Array:
  """Adds an adapter in float32, rounded once: kernel (*in, *out), a (*in, R), b (R, *out), or
  stacked in front."""
  rank, lead = a.shape[-1], kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
  factors = a.reshape(*lead, -1, rank), b.reshape(*lead, rank, -1)
  product = jnp.matmul(*factors, precision="highest")
  return (kernel.astype(jnp.float32) + factor * product.reshape(kernel.shape)).astype(kernel.dtype)
