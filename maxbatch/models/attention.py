"""Causal self-attention: projections, rotary positions, and the choice of kernel.

B rows, T query and S key tokens, D width, N query heads, K key/value heads, G = N/K query heads
per key/value head, H width of a head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxbatch.config.schema import (
  ModelConfig,
  context_strategy,
  is_latent,
  query_dim,
  rotated_dim,
)
from maxbatch.data.rows import Routes, Rows, whole_in_order
from maxbatch.hardware.sharding import auto_axis_sizes, constrain
from maxbatch.hugging_face.model_keys import layer_types
from maxbatch.models import flash
from maxbatch.models.cache import LayerCache
from maxbatch.models.context_attention import attention_by_products
from maxbatch.models.forms import rotated
from maxbatch.models.layers import Norm, Projection, constant, over_rows_of
from maxbatch.models.probes import Probe, probe, probe_values
from maxbatch.models.remat import named
from maxbatch.precision.policy import PLAIN, Policy


def frequency_factors(config: ModelConfig) -> np.ndarray | None:
  """Returns the factor of the frequency of each pair of a head: float32[H/2]; None: all 1."""
  factors = np.full(rotated_dim(config) // 2, 1 / config.rope_linear_scaling_factor)
  if config.rope_type == "llama3.1":
    factors *= _llama3(config)
  if config.rope_type == "yarn":
    factors *= _yarn(config)
  return factors.astype(np.float32) if (factors != 1).any() else None


def _llama3(config: ModelConfig) -> np.ndarray:
  """Leaves fast frequencies unchanged, divides slow ones, and interpolates those between (Llama
  3.1)."""
  exponents = np.arange(0, rotated_dim(config), 2) / rotated_dim(config)
  frequencies = config.rope_max_timescale**-exponents
  turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
  low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
  kept = np.clip((turns - low) / (high - low), 0, 1)
  return kept + (1 - kept) / config.rope_factor


def _yarn(config: ModelConfig) -> np.ndarray:
  """Leaves pairs with more than beta_fast turns unchanged, divides those with less than beta_slow, and
  interpolates those between by their numbers (Peng et al. 2023)."""

  def pair(turns: float) -> float:
    wavelengths = config.original_max_position_embeddings / (2 * math.pi * turns)
    return rotated_dim(config) * math.log(wavelengths) / (2 * math.log(config.rope_max_timescale))

  low, high = pair(config.beta_fast), pair(config.beta_slow)
  if config.rope_truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, rotated_dim(config) - 1)
  pairs = np.arange(rotated_dim(config) // 2)
  slow = np.clip((pairs - low) / (high - low or 1e-3), 0, 1)
  return 1 - slow + slow / config.rope_factor


def rotation_scale(config: ModelConfig) -> float:
  """Returns the factor of queries and keys, with which yarn sharpens attention over longer rows."""
  scales = config.rope_type == "yarn" and config.rope_attention_scaling
  return 1 + 0.1 * math.log(config.rope_factor) if scales else 1.0


def query_factor(config: ModelConfig) -> float:
  """Returns the factor of queries, whose products with keys are divided by the root of a query's numbers."""
  scalar, factor = config.query_pre_attn_scalar, 1.0
  if is_latent(config) and config.rope_type == "yarn":
    factor = (1 + 0.1 * config.mscale * math.log(config.rope_factor)) ** 2
  return factor * math.sqrt(query_dim(config) / scalar) if scalar else factor


def sliding_layers(config: ModelConfig) -> np.ndarray:
  """Returns the layers of sliding attention, bool[L]; none where sliding_window_size=0."""
  num_layers, has_window = config.base_num_decoder_layers, config.sliding_window_size > 0
  kinds = layer_types(config.layer_types, num_layers) or ("sliding_attention",) * num_layers
  return np.array([has_window and kind == "sliding_attention" for kind in kinds])


class AttentionContext(NamedTuple):
  """What a layer needs to know of the rows, computed once and shared by all layers of a kind."""

  first_BT: jax.Array
  """int32[B or 1, T]: the first token that each token sees; the last is itself."""
  cos_BTH: jax.Array | None
  """float32[B or 1, T, H/2]: rotation of each position; None without rope."""
  sin_BTH: jax.Array | None
  segment_ids_BT: jax.Array | None
  slides: jax.Array | bool = False
  """Whether the window is what limits the reach: data where layers differ in a scan."""
  cache: LayerCache | None = None
  """While a text is written, what a layer keeps for the tokens to come."""
  counts_BT: jax.Array | None = None
  """bool: tokens that count in what experts are sent; None: all."""
  routes: Routes | None = None
  """Of this layer."""
  places_T: np.ndarray | None = None
  """Of tokens in another order, `Rows.places`."""
  layer: jax.Array | int = 0
  """The number of the layer in the model."""


@dataclasses.dataclass(frozen=True)
class LayerContexts:
  """The contexts of layers of sliding and of full attention: only numbers tell the two apart."""

  sliding: AttentionContext
  full: AttentionContext
  """The same object where all layers are alike."""
  slides_L: np.ndarray
  """bool[L]: which layers are of sliding attention."""
  counts_BT: jax.Array | None = None
  """That of all layers."""
  routes: Routes | None = None
  """Those of all layers."""
  places_T: np.ndarray | None = None
  """Likewise."""

  def of(self, layer: jax.Array | int) -> AttentionContext:
    """Returns the context of layer `layer` of the model; its number may be data, as in a scan or a
    pipeline."""
    routes = self.routes
    if routes is not None:
      experts_BTK = jax.lax.dynamic_index_in_dim(routes.experts, layer, 2, keepdims=False)
      routes = dataclasses.replace(routes, experts=experts_BTK)
    of_all = {"counts_BT": self.counts_BT, "places_T": self.places_T}
    return self._of_kind(layer)._replace(**of_all, routes=routes, layer=layer)

  def _of_kind(self, layer: jax.Array | int) -> AttentionContext:
    if self.sliding is self.full:
      return self.full
    if isinstance(layer, int):
      return self.sliding if self.slides_L[layer] else self.full
    slides = jnp.asarray(self.slides_L)[layer]
    return jax.tree.map(lambda *either: jnp.where(slides, *either), self.sliding, self.full)


def attention_contexts(config: ModelConfig, rows: Rows) -> LayerContexts:
  """Returns the reach and rotations of the tokens of rows, for the layers of either kind."""
  length = rows.inputs.shape[1]
  places_T = jnp.asarray(np.arange(length) if rows.places is None else rows.places)
  positions_BT = places_T[None] if rows.positions is None else rows.positions
  first_seen = functools.partial(_first_seen, rows, places_T)
  contexts = _contexts(config, positions_BT, first_seen, rows.segment_ids)
  return dataclasses.replace(contexts, places_T=rows.places)


def next_token_contexts(
  config: ModelConfig, begins_B: jax.Array, place: jax.Array
) -> LayerContexts:
  """Returns the contexts for one token of each row, at `place` of a cache in which the rows begin
  at `begins_B`."""
  begins_B1 = begins_B[:, None]

  def first_seen(window: int) -> jax.Array:
    return jnp.maximum(begins_B1, place - window + 1) if window else begins_B1

  return _contexts(config, place - begins_B1, first_seen, None)


def _contexts(
  config: ModelConfig,
  positions_BT: jax.Array,
  first_seen: Callable[[int], jax.Array],
  segment_ids_BT: jax.Array | None,
) -> LayerContexts:

  def context(window: int, timescale: float, factors_H: np.ndarray | None) -> AttentionContext:
    cos = sin = None
    if config.position_embedding == "rope":
      cos, sin = _rotations(positions_BT, rotated_dim(config), timescale, factors_H)
      if scale != 1:
        cos, sin = scale * cos, scale * sin
    first_BT = first_seen(window)
    return AttentionContext(first_BT, cos, sin, segment_ids_BT, window > 0)

  slides_L = sliding_layers(config)
  timescale, local = config.rope_max_timescale, config.local_rope_max_timescale
  factors_H, scale = frequency_factors(config), rotation_scale(config)
  if not slides_L.any():
    full = context(0, timescale, factors_H)
    return LayerContexts(full, full, slides_L)
  of_sliding = (timescale, factors_H) if local == -1 else (local, None)
  sliding = context(config.sliding_window_size, *of_sliding)
  full = sliding if slides_L.all() else context(0, timescale, factors_H)
  return LayerContexts(sliding, full, slides_L)


def _first_seen(rows: Rows, places_T: jax.Array, window: int) -> jax.Array:
  """Returns where what a token sees begins: its segment, a run of equal ids, or a later window."""
  places_1T = places_T[None]
  first_BT = jnp.zeros_like(places_1T)
  ids_BT, order_T = rows.segment_ids, rows.places
  if ids_BT is not None:
    if order_T is not None:
      ids_BT = whole_in_order(ids_BT, np.argsort(order_T))
    before_BT = jnp.pad(ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins_BT = jnp.where(ids_BT != before_BT, jnp.arange(ids_BT.shape[1])[None], 0)
    first_BT = jax.lax.cummax(begins_BT, axis=1)
    if auto_axis_sizes()["context"] > 1:
      # Of whole rows on each device: a scan over divided tokens would send messages.
      first_BT = constrain(first_BT, ("batch", None))
    if order_T is not None:
      first_BT = whole_in_order(first_BT, order_T)
  if window:
    first_BT = jnp.maximum(first_BT, places_1T - window + 1)
  return first_BT


def _rotations(
  positions_BT: jax.Array, head_dim: int, timescale: float, factors_H: np.ndarray | None
) -> tuple[jax.Array, jax.Array]:
  """Returns cos and sin of each position at each of head_dim/2 frequencies (Su et al. 2021)."""
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  angles_BTH = positions_BT[..., None] * (timescale**-exponents)[None, None]
  if factors_H is not None:
    angles_BTH = angles_BTH * factors_H[None, None]
  return jnp.cos(angles_BTH), jnp.sin(angles_BTH)


class Attention(nnx.Module):
  """Multi-head or grouped-query causal self-attention."""

  policy: Policy = PLAIN

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, residual_scale: float):
    D, H = config.base_emb_dim, config.head_dim
    N, K = config.base_num_query_heads, config.base_num_kv_heads
    bias = config.attention_qkv_bias
    q_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
    self.query = Projection(rngs, (D,), (N, H), q_axes, bias=bias)
    self.key = Projection(rngs, (D,), (K, H), kv_axes, bias=bias)
    self.value = Projection(rngs, (D,), (K, H), kv_axes, bias=bias)
    self.query_norm = _norm(config, N, "heads")
    self.key_norm = _norm(config, K, "kv_heads")
    self.add_output(rngs, config, H, residual_scale)

  def add_output(
    self, rngs: nnx.Rngs, config: ModelConfig, value_dim: int, residual_scale: float
  ) -> None:
    """Adds what all forms of attention have after queries, keys and values."""
    D, N = config.base_emb_dim, config.base_num_query_heads
    axes, bias = ("heads", "head_dim", "embed"), config.attention_out_bias
    self.out = Projection(rngs, (N, value_dim), (D,), axes, bias=bias, scale=residual_scale)
    self.out.saved_as = "out_proj"
    self.sink = constant(0.0, (N,), ("heads",)) if config.attention_sink else None
    """A logit of each head that takes a part of the weights and gives nothing (gpt-oss)."""
    self.probe: Probe | None = probe("sink") if config.attention_sink else None
    self.query_factor = query_factor(config)
    self.config = config

  def projected(
    self, x_BTD: jax.Array, at: AttentionContext
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries (B, T, N, H), keys and values (B, S, K, H), with their positions."""
    q_BTNH, k_BSKH, v_BSKH = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
    if self.query_norm is not None and self.key_norm is not None:
      q_BTNH, k_BSKH = self.query_norm(q_BTNH), self.key_norm(k_BSKH)
    return self.positioned(q_BTNH, at), self.positioned(k_BSKH, at), v_BSKH

  def positioned(self, x_BTNH: jax.Array, at: AttentionContext) -> jax.Array:
    """Returns heads rotated by their positions; the pairs of neighbours become halves."""
    if at.cos_BTH is None or at.sin_BTH is None:
      return x_BTNH
    if self.config.rope_interleave:
      pairs = x_BTNH.reshape(*x_BTNH.shape[:-1], -1, 2)
      x_BTNH = pairs.swapaxes(-1, -2).reshape(x_BTNH.shape)
    return self.policy.cast(rotated(x_BTNH, at.cos_BTH, at.sin_BTH))

  @jax.named_scope("attention")
  def __call__(self, x_BTD: jax.Array, at: AttentionContext) -> jax.Array:
    """Attends: (B, T, D) → (B, T, D)."""
    q_BTNH, k_BSKH, v_BSKH = self.projected(x_BTD, at)
    if self.query_factor != 1:
      q_BTNH = self.policy.cast(q_BTNH * self.query_factor)
    q_BTNH = constrain(q_BTNH, ("batch", "length", "heads", "head_dim"))
    k_BSKH = constrain(k_BSKH, ("batch", "length", "kv_heads", "head_dim"))
    q_BTNH, k_BSKH = named(q_BTNH, "query_proj"), named(k_BSKH, "key_proj")
    v_BSKH = named(v_BSKH, "value_proj")
    cap, sink_BN = self.config.attn_logits_soft_cap, None
    if self.sink is not None:
      sink_BN = over_rows_of(self.sink, PLAIN, probe_values(self.probe, "sink"), 2)
    if at.cache is not None:
      at.cache.put(k_BSKH, v_BSKH)
    if at.cache is not None and not at.cache.is_new:
      out_BTNH = at.cache.attention(q_BTNH, at.first_BT, cap, self.policy, sink_BN)
    elif self.config.attention == "flash" and flash.has_devices():
      out_BTNH = self._flash(q_BTNH, k_BSKH, v_BSKH, at, sink_BN)
    else:
      rows = q_BTNH, k_BSKH, v_BSKH, at.first_BT, sink_BN, at.places_T
      out_BTNH = attention_by_products(self.config, self.policy, *rows)
    out_BTNH = named(self.policy.cast(out_BTNH), "attention_out")
    return self.out(constrain(out_BTNH, ("batch", "length", "heads", "head_dim")))

  def _flash(
    self,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    at: AttentionContext,
    sink_BN: jax.Array | None,
  ) -> jax.Array:
    """Attends by a kernel with a compiled window: where it is data there are two."""

    config, sizes, by_shard = self.config, auto_axis_sizes(), {}
    if context_strategy(config, sizes["tensor"], sizes["context"]) == "all_gather":
      keeps_all = config.remat_policy == "none"
      by_shard = {"order_T": at.places_T, "keeps_all": keeps_all}

    def attend(window: int) -> Callable[..., jax.Array]:
      return functools.partial(
        flash.flash_attention_to_all_keys if by_shard else flash.flash_attention,
        segment_ids_BT=at.segment_ids_BT,
        **by_shard,
        window=window,
        soft_cap=self.config.attn_logits_soft_cap,
        sink_BN=sink_BN,
      )

    window = self.config.sliding_window_size
    if isinstance(at.slides, bool):
      return attend(window if at.slides else 0)(q_BTNH, k_BSKH, v_BSKH)
    return jax.lax.cond(at.slides, attend(window), attend(0), q_BTNH, k_BSKH, v_BSKH)


class LatentAttention(Attention):
  """Keys and values of all heads from a latent vector of each token (DeepSeek-AI 2024, MLA)."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, residual_scale: float):
    D, N, R = config.base_emb_dim, config.base_num_query_heads, config.kv_lora_rank
    rank, bias = config.q_lora_rank, config.attention_qkv_bias
    by_head, down = ("embed", "heads", "head_dim"), ("embed", None)
    self.query_latent = Projection(rngs, (D,), (rank,), down, bias=bias) if rank else None
    self.query_norm = Norm(config, (rank,), ("embed",)) if rank else None
    queries = (N, query_dim(config)), by_head
    self.query = None if rank else Projection(rngs, (D,), *queries, bias=False)
    self.query_up = Projection(rngs, (rank,), *queries, bias=False) if rank else None
    self.latent = Projection(rngs, (D,), (R,), down, bias=bias)
    self.latent_norm = Norm(config, (R,), ("embed",))
    self.common_key = Projection(rngs, (D,), (config.qk_rope_head_dim,), down, bias=bias)
    made = config.qk_nope_head_dim + config.v_head_dim
    self.key_value = Projection(rngs, (R,), (N, made), by_head, bias=False)
    self.add_output(rngs, config, config.v_head_dim, residual_scale)

  def projected(
    self, x_BTD: jax.Array, at: AttentionContext
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values of N heads; the rotated part of a key is one for all."""
    plain = [self.config.qk_nope_head_dim]
    q_BTNH = self._queries(x_BTD)
    q_BTNH, q_rotated = jnp.split(q_BTNH, plain, axis=-1)
    k_BSNH, v_BSNH = jnp.split(self.key_value(self.latent_norm(self.latent(x_BTD))), plain, axis=-1)
    k_rotated = self.positioned(self.common_key(x_BTD)[:, :, None], at)
    k_rotated = jnp.broadcast_to(k_rotated, (*k_BSNH.shape[:-1], k_rotated.shape[-1]))
    q_BTNH = jnp.concatenate([q_BTNH, self.positioned(q_rotated, at)], axis=-1)
    return q_BTNH, jnp.concatenate([k_BSNH, k_rotated], axis=-1), v_BSNH

  def _queries(self, x_BTD: jax.Array) -> jax.Array:
    if self.query is not None:
      return self.query(x_BTD)
    assert self.query_latent is not None
    assert self.query_norm is not None
    assert self.query_up is not None
    return self.query_up(self.query_norm(self.query_latent(x_BTD)))


def _norm(config: ModelConfig, num_heads: int, axis: str) -> Norm | None:
  """Returns the norm of queries or keys: of each head (Qwen 3), or of all together (OLMo 2)."""
  if not config.use_qk_norm:
    return None
  if config.qk_norm_across_heads:
    return Norm(config, (num_heads, config.head_dim), (axis, "head_dim"))
  return Norm(config, (config.head_dim,), ("head_dim",))
