"""Layers whose parameters are stacked: made, applied one after the other, and with a cache.

B rows, T tokens, D width of the residual stream, L layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.schema import ModelConfig
from maxbatch.core.terms import Stats, Terms
from maxbatch.models.attention import AttentionContext, LayerContexts
from maxbatch.models.cache import Cache, KeysValues, LayerCache
from maxbatch.models.forms import is_for_gpu, is_for_tpu
from maxbatch.models.layers import Outputs, fold, hidden_of, outputs_of, over_layers, with_sums
from maxbatch.models.remat import remat_policy

Block = TypeVar("Block", bound=nnx.Module)


def stacked_blocks(
  rngs: nnx.Rngs,
  config: ModelConfig,
  block: Callable[[nnx.Rngs, ModelConfig], Block],
  num_layers: int,
) -> Block:
  """Returns layers as one block whose parameters have a leading dim L."""

  @nnx.split_rngs(splits=num_layers)
  @nnx.vmap(axis_size=num_layers)
  def create(rngs: nnx.Rngs) -> Block:
    return block(rngs, config)

  return create(rngs)


def is_scanned(config: ModelConfig) -> bool:
  """Returns whether layers are one compiled body in a scan, which scan_layers=auto leaves to the devices.

  On GPUs what a scan keeps for the backward pass is copied in and out, with a copy of its zeros first: with
  remat_policy=none 9 of 55 ms of a step on an H100, and 1.5 times the memory. Only layers' inputs cost
  nothing.
  """
  if config.scan_layers != "auto":
    return config.scan_layers
  return not is_for_gpu() or config.remat_policy == "full"


def apply_layers(
  stacked: nnx.Module,
  config: ModelConfig,
  x_BTD: jax.Array,
  at: LayerContexts,
  keys_B: jax.Array | None,
  first: jax.Array | int,
) -> jax.Array | Outputs:
  """Applies stacked layers one after the other: one compiled body in a scan, or each layer compiled
  on its own. A single layer is in no scan, which would keep a copy of its input."""
  graph, parameters = nnx.split(stacked)

  def layer(
    x_BTD: jax.Array, item: tuple[nnx.State, jax.Array | int]
  ) -> tuple[jax.Array, tuple[Terms, Stats]]:
    parameters, index = item
    block: Any = nnx.merge(graph, parameters)
    x_BTD, terms, stats = outputs_of(block(x_BTD, at.of(index), fold(keys_B, index)))
    return x_BTD, (terms, stats)

  policy = remat_policy(config)
  if policy is not None:
    checkpoint = functools.partial(jax.checkpoint, policy=policy)
    layer = checkpoint(layer, prevent_cse=not is_scanned(config))
  L = _length(parameters)
  if is_scanned(config) and L > 1:
    x_BTD, stacked_sums = jax.lax.scan(layer, x_BTD, (parameters, first + jnp.arange(L)))
    return with_sums(x_BTD, *over_layers(stacked_sums))
  sums = []
  for index, one in enumerate(_unstack(parameters, L)):
    x_BTD, of_layer = layer(x_BTD, (one, first + index))
    sums.append(of_layer)
  return with_sums(x_BTD, *over_layers(jax.tree.map(lambda *x: jnp.stack(x), *sums)))


def cached_layers(
  stacks: Sequence[nnx.Module], config: ModelConfig
) -> Callable[..., tuple[jax.Array, Cache]]:
  """Returns `apply_layers` without dropout, each layer with its part of a cache.

  Layers that are not scanned are taken apart here, once for all tokens that are then written.
  """
  each = []
  for stacked in stacks if not config.scan_layers else ():
    graph, parameters = nnx.split(stacked)
    each += [(graph, one) for one in _unstack(parameters, _length(parameters))]

  def apply(
    x_BTD: jax.Array,
    graph: nnx.GraphDef,
    parameters: nnx.State,
    at: AttentionContext,
    own: LayerCache,
  ) -> tuple[jax.Array, KeysValues]:
    block: Any = nnx.merge(graph, parameters)
    return hidden_of(block(x_BTD, at._replace(cache=own), None)), own.kept

  def apply_all(
    x_BTD: jax.Array, at: LayerContexts, cache: Cache, place: jax.Array | int, *, is_new: bool
  ) -> tuple[jax.Array, Cache]:
    if isinstance(cache, KeysValues):
      first = 0
      for stacked in stacks:
        graph, parameters = nnx.split(stacked)

        # Carried along as a whole, of which each layer writes only what is new.
        def layer(
          carried: tuple[jax.Array, KeysValues],
          item: tuple[nnx.State, jax.Array],
          graph: nnx.GraphDef = graph,
        ) -> tuple[tuple[jax.Array, KeysValues], None]:
          (x_BTD, kept), (parameters, index) = carried, item
          own = LayerCache(kept, place, is_new=is_new, layer=index)
          return apply(x_BTD, graph, parameters, at.of(index), own), None

        L = _length(parameters)
        layers = parameters, first + jnp.arange(L)
        (x_BTD, cache), _ = jax.lax.scan(layer, (x_BTD, cache), layers)
        first += L
      return x_BTD, cache
    kept = []
    for index, (one, own) in enumerate(zip(each, cache, strict=True)):
      own = LayerCache(own, place, is_new=is_new)
      x_BTD, now = apply(x_BTD, one[0], one[1], at.of(index), own)
      kept.append(now)
    return x_BTD, tuple(kept)

  return apply_all


def _length(parameters: nnx.State) -> int:
  return jax.tree.leaves(parameters)[0].shape[0]


def _unstack(parameters: nnx.State, length: int) -> list[nnx.State]:
  """Splits stacked parameters by layer; unlike indexing, with one concatenation as its gradient.

  On CPU vectors are taken apart before what reads them: fused with it, the place of each layer's would
  make a kernel of its own to compile.
  """
  leaves, structure = jax.tree.flatten(parameters)
  pieces = [jax.lax.split(leaf, (1,) * length, axis=0) for leaf in leaves]
  is_on_cpu = not (is_for_tpu() or is_for_gpu())

  def of_layer(piece: jax.Array) -> jax.Array:
    one = piece.squeeze(0)
    return jax.lax.optimization_barrier(one) if is_on_cpu and one.ndim == 1 else one

  return [
    jax.tree.unflatten(structure, [of_layer(piece[index]) for piece in pieces])
    for index in range(length)
  ]
