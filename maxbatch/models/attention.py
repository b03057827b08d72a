"""Causal self-attention: projections, rotary positions, and the choice of kernel.

B rows, T query and S key tokens, D width, N query heads, K key/value heads, G = N/K query heads
per key/value head, H width of a head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.schema import ModelConfig
from maxbatch.hardware.sharding import constrain
from maxbatch.models import flash
from maxbatch.models.cache import LayerCache
from maxbatch.models.dot_product import dot_product_attention
from maxbatch.models.layers import Norm, Projection


class AttentionContext(NamedTuple):
  """What attention needs to know of the rows, computed once and shared by all layers."""

  first_BT: jax.Array
  """int32[B or 1, T]: the first token that each token sees; the last is itself."""
  cos_BTH: jax.Array | None
  """float32[B or 1, T, H/2]: rotation of each position; None without rope."""
  sin_BTH: jax.Array | None
  segment_ids_BT: jax.Array | None
  cache: LayerCache | None = None
  """While a text is written, what a layer keeps for the tokens to come."""


def attention_context(
  config: ModelConfig,
  length: int,
  segment_ids_BT: jax.Array | None,
  positions_BT: jax.Array | None,
) -> AttentionContext:
  """The reach and rotations of rows of `length` tokens."""
  positions = jnp.arange(length)[None] if positions_BT is None else positions_BT
  first = _first_seen(length, config.sliding_window_size, segment_ids_BT)
  return AttentionContext(first, *_rotations(config, positions), segment_ids_BT)


def next_token_context(
  config: ModelConfig, begins_B: jax.Array, place: jax.Array
) -> AttentionContext:
  """The same for one token of each row, at `place` of a cache in which the rows begin at `begins_B`."""
  window, first_B1 = config.sliding_window_size, begins_B[:, None]
  if window:
    first_B1 = jnp.maximum(first_B1, place - window + 1)
  return AttentionContext(first_B1, *_rotations(config, place - begins_B[:, None]), None)


def _first_seen(length: int, window: int, segment_ids_BT: jax.Array | None) -> jax.Array:
  """Where what a token sees begins: its segment, a run of equal ids, or the window, if later."""
  places_1T = jnp.arange(length)[None]
  first_BT = jnp.zeros_like(places_1T)
  if segment_ids_BT is not None:
    before_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins_BT = jnp.where(segment_ids_BT != before_BT, places_1T, 0)
    first_BT = jax.lax.cummax(begins_BT, axis=1)
  if window:
    first_BT = jnp.maximum(first_BT, places_1T - window + 1)
  return first_BT


def _rotations(
  config: ModelConfig, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
  """cos and sin of each position at each of head_dim/2 frequencies (Su et al. 2021), with rope."""
  if config.position_embedding != "rope":
    return None, None
  exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
  angles_BTH = positions_BT[..., None] * (config.rope_max_timescale**-exponents)[None, None]
  return jnp.cos(angles_BTH), jnp.sin(angles_BTH)


def rotate(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
  """Rotates pairs (i, i + H/2) of every head by its position's angle, as Llama's weights expect."""
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)


class Attention(nnx.Module):
  """Multi-head or grouped-query causal self-attention."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, residual_scale: float):
    D, H = config.base_emb_dim, config.head_dim
    N, K = config.base_num_query_heads, config.base_num_kv_heads
    bias = config.attention_qkv_bias
    q_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
    self.query = Projection(rngs, config, (D,), (N, H), q_axes, bias=bias)
    self.key = Projection(rngs, config, (D,), (K, H), kv_axes, bias=bias)
    self.value = Projection(rngs, config, (D,), (K, H), kv_axes, bias=bias)
    out_axes, out_bias = ("heads", "head_dim", "embed"), config.attention_out_bias
    self.out = Projection(rngs, config, (N, H), (D,), out_axes, bias=out_bias, scale=residual_scale)
    self.query_norm = Norm(config, H, "head_dim") if config.use_qk_norm else None
    self.key_norm = Norm(config, H, "head_dim") if config.use_qk_norm else None
    self.config = config

  @jax.named_scope("attention")
  def __call__(self, x_BTD: jax.Array, at: AttentionContext) -> jax.Array:
    """(B, T, D) → (B, T, D)."""
    q_BTNH, k_BSKH, v_BSKH = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
    if self.query_norm is not None and self.key_norm is not None:
      q_BTNH, k_BSKH = self.query_norm(q_BTNH), self.key_norm(k_BSKH)
    if at.cos_BTH is not None and at.sin_BTH is not None:
      q_BTNH = rotate(q_BTNH, at.cos_BTH, at.sin_BTH)
      k_BSKH = rotate(k_BSKH, at.cos_BTH, at.sin_BTH)
    q_BTNH = constrain(q_BTNH, ("batch", "length", "heads", "head_dim"))
    k_BSKH = constrain(k_BSKH, ("batch", "length", "kv_heads", "head_dim"))
    if at.cache is not None:
      at.cache.put(k_BSKH, v_BSKH)
    if at.cache is not None and not at.cache.is_new:
      out_BTNH = at.cache.attention(q_BTNH, at.first_BT)
    elif self.config.attention == "flash" and flash.has_devices():
      window = self.config.sliding_window_size
      out_BTNH = flash.flash_attention(q_BTNH, k_BSKH, v_BSKH, at.segment_ids_BT, window)
    else:
      out_BTNH = dot_product_attention(q_BTNH, k_BSKH, v_BSKH, at.first_BT)
    return self.out(constrain(out_BTNH, ("batch", "length", "heads", "head_dim")))
