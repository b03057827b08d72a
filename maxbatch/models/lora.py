"""Which parameters train; LoRA (Hu et al. 2021): matrices of low rank beside frozen ones.

Frozen parameters have neither gradients nor optimizer state. Any Adaptable can have adapters.
"""

import dataclasses
import difflib
import fnmatch
import heapq
from collections.abc import Collection, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from maxbatch.config.find import did_you_mean
from maxbatch.config.schema import ModelConfig
from maxbatch.errors import UserError


@runtime_checkable
class Adaptable(Protocol):
  """A module with a matrix that can have an adapter: layers.Projection, the experts' matrices."""

  @property
  def largest_rank(self) -> int:
    """The rank that the matrix can have."""
    ...

  def add_adapter(self, rngs: nnx.Rngs, rank: int, scale: float) -> None:
    """Adds two parameters, ADAPTER, whose product times `scale` is added to the matrix."""
    ...


Path = tuple[str, ...]
"""A parameter's path: names of modules, then its own."""

ADAPTER = ("lora_a", "lora_b")
"""Names of LoRA's matrices in their Projection."""
_SHOWN = 4


def frozen_paths(
  paths: Collection[Path], patterns: Sequence[str], config: ModelConfig
) -> frozenset[Path]:
  """Returns the parameters that stay as they are: those that no pattern matches, but for adapters.

  Raises:
    UserError: a pattern matches nothing.
  """
  names = {"/".join(path): path for path in paths}
  if not patterns and not config.lora_rank:
    return frozenset()
  trained = {path for path in paths if path[-1] in ADAPTER}
  for pattern in patterns:
    results = [path for name, path in names.items() if fnmatch.fnmatchcase(name, pattern)]
    if not results:
      raise UserError(_no_match(pattern, names))
    trained |= set(results)
  return frozenset(paths) - trained


def _no_match(pattern: str, names: Collection[str]) -> str:
  """Returns the nearest of the parameters and of the modules that hold them."""
  depths = ((name, depth) for name in names for depth in range(1, name.count("/") + 1))
  parents = {name.rsplit("/", depth)[0] for name, depth in depths}
  known = [*sorted(names), *(f"{parent}/*" for parent in sorted(parents))]
  scored = [
    (difflib.SequenceMatcher(None, pattern.lower(), each.lower()).ratio(), each) for each in known
  ]
  near = [each for _, each in heapq.nlargest(_SHOWN, scored)]
  return (
    f"trainable: {pattern!r} matches no parameter; nearest: {', '.join(near)}. A pattern is matched "
    f"with the whole path, of which `*` is any part; for example trainable=[{near[0]!r}]"
  )


_DEFAULT_TARGETS = ("query", "value", "query_up", "key_value")
"""Those of the paper, and peft's for Llama."""


def scale(config: ModelConfig) -> float:
  """Returns the factor of the adapters' product."""
  return 1.0 if config.lora_alpha == -1 else config.lora_alpha / config.lora_rank


def without_adapters(config: ModelConfig) -> ModelConfig:
  """Returns the model that they are added to."""
  return dataclasses.replace(config, lora_rank=0, lora_alpha=-1, lora_targets=())


def add_adapters(model: nnx.Module, config: ModelConfig, rngs: nnx.Rngs) -> None:
  """Gives the modules that lora_targets names their adapters; none if lora_rank is 0.

  Raises:
    UserError: a name that none of them has, or a rank that no matrix has.
  """
  if config.lora_rank == 0:
    return
  modules = nnx.iter_modules(model)
  named = {str(path[-1]): one for path, one in modules if path and isinstance(one, Adaptable)}
  targets = config.lora_targets or [each for each in _DEFAULT_TARGETS if each in named]
  if not targets:
    raise UserError(_no_projection("query", sorted(named), config))
  for target in targets:
    if target not in named:
      raise UserError(_no_projection(target, sorted(named), config))
  chosen = [
    module
    for path, module in nnx.iter_modules(model)
    if isinstance(module, Adaptable) and path[-1] in targets
  ]
  largest = max(one.largest_rank for one in chosen)
  if config.lora_rank > largest:
    raise UserError(
      f"lora_rank={config.lora_rank} is more than any matrix has that it adapts "
      f"({', '.join(targets)}: rank {largest} at most); for example lora_rank={min(16, largest)}"
    )
  for module in chosen:
    module.add_adapter(rngs, config.lora_rank, scale(config))


def _no_projection(target: str, known: Sequence[str], config: ModelConfig) -> str:
  if not known:
    return (
      f"lora_rank={config.lora_rank}: decoder_block={config.decoder_block} has no Projection "
      "(maxbatch/models/layers.py) to add adapters to; for example lora_rank=0"
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
