"""Softmax attention by plain matrix products, for devices without a kernel of their own.

B rows, T query and S key tokens, N query heads, K key/value heads, G = N/K query heads per
key/value head, H width of a head.

The backward pass forms the probabilities again from the kept logarithm of their sum, as flash
attention does (Dao et al. 2022): nothing of size T·S is kept between the passes. Batch and heads
lead in every product, the layout that XLA's CPU backend multiplies fastest.
"""

import math

import jax
import jax.numpy as jnp


def dot_product_attention(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
  """Attention of each query to the keys its mask allows; logits and softmax in float32.

  Args:
    q_BTNH: queries.
    k_BSKH: keys; K divides N.
    v_BSKH: values.
    mask_BTS: bool[B or 1, T, S]: what each query sees.

  Returns:
    (B, T, N, H), in the values' dtype.
  """
  B, T, N, H = q_BTNH.shape
  K, G = k_BSKH.shape[2], N // k_BSKH.shape[2]
  # The G heads that share keys become rows of one product: X = G·T.
  q_BKXH = (q_BTNH / math.sqrt(H)).transpose(0, 2, 1, 3).reshape(B, K, G * T, H)
  k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
  out_BKXH = _attend(q_BKXH, k_BKSH, v_BKSH, jnp.tile(mask_BTS, (1, G, 1)))
  return out_BKXH.reshape(B, N, T, H).transpose(0, 2, 1, 3)


def _logits(q_BKXH: jax.Array, k_BKSH: jax.Array, mask_BXS: jax.Array) -> jax.Array:
  logits_BKXS = jnp.matmul(q_BKXH, k_BKSH.mT, preferred_element_type=jnp.float32)
  return jnp.where(mask_BXS[:, None], logits_BKXS, jnp.finfo(jnp.float32).min)


@jax.custom_vjp
def _attend(
  q_BKXH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask_BXS: jax.Array
) -> jax.Array:
  return _forward(q_BKXH, k_BKSH, v_BKSH, mask_BXS)[0]


def _forward(q_BKXH, k_BKSH, v_BKSH, mask_BXS):
  logits_BKXS = _logits(q_BKXH, k_BKSH, mask_BXS)
  max_BKX1 = logits_BKXS.max(-1, keepdims=True)
  exp_BKXS = jnp.exp(logits_BKXS - max_BKX1)
  sum_BKX1 = exp_BKXS.sum(-1, keepdims=True)
  # Divided after the product: fewer divisions, and the largest weight is exactly 1 in bfloat16.
  mixed_BKXH = jnp.matmul(exp_BKXS.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32)
  out_BKXH = (mixed_BKXH / sum_BKX1).astype(v_BKSH.dtype)
  return out_BKXH, (q_BKXH, k_BKSH, v_BKSH, mask_BXS, out_BKXH, max_BKX1 + jnp.log(sum_BKX1))


def _backward(kept, d_out_BKXH):
  q_BKXH, k_BKSH, v_BKSH, mask_BXS, out_BKXH, log_sum_BKX1 = kept
  f32, dtype = jnp.float32, q_BKXH.dtype
  weights_BKXS = jnp.exp(_logits(q_BKXH, k_BKSH, mask_BXS) - log_sum_BKX1)
  d_v_BKSH = jnp.matmul(weights_BKXS.astype(dtype).mT, d_out_BKXH)
  d_weights_BKXS = jnp.matmul(d_out_BKXH, v_BKSH.mT, preferred_element_type=f32)
  # Σ_s weight · d_weight, without another pass over (X, S).
  shift_BKX1 = (d_out_BKXH.astype(f32) * out_BKXH.astype(f32)).sum(-1, keepdims=True)
  d_logits_BKXS = (weights_BKXS * (d_weights_BKXS - shift_BKX1)).astype(dtype)
  d_q_BKXH = jnp.matmul(d_logits_BKXS, k_BKSH)
  d_k_BKSH = jnp.matmul(d_logits_BKXS.mT, q_BKXH)
  return d_q_BKXH, d_k_BKSH, d_v_BKSH, None


_attend.defvjp(_forward, _backward)
