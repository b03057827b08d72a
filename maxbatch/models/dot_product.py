"""Softmax attention by plain matrix products, for devices without a kernel of their own.

B rows, T query and S key tokens, N query heads, K key/value heads, G = N/K query heads per
key/value head, H width of a head.

The backward pass forms the probabilities again from the kept logarithm of their sum, as flash
attention does (Dao et al. 2022): nothing of size T·S is kept between the passes. Batch and heads
lead in every product, the layout that XLA's CPU backend multiplies fastest.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.models.forms import is_for_gpu, is_for_tpu, transposed_product
from maxbatch.precision.policy import PLAIN, Policy


def dot_product_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  first_BT: jax.Array,
  soft_cap: float = 0.0,
  policy: Policy = PLAIN,
  sink_BN: jax.Array | None = None,
) -> jax.Array:
  """Returns attention (B, T, N, H) of each query to the keys from its first to itself; softmax in float32.

  Args:
    k_BSKH: keys; K divides N.
    first_BT: int32[B or 1, T]: the first key that each query sees. Two comparisons with a number per
      row cost next to nothing; a mask of (B, T, S) made the whole step half as slow again.
    soft_cap: logits become cap·tanh(logit/cap) (Gemma 2); 0: they stay as they are.
    policy: in which format the operands of matrix products are, these and those made here.
    sink_BN: float32[B or 1, N]: a logit of each head beside those of the keys, without a value (gpt-oss).
  """
  B, T, N, H = q_BTNH.shape
  K, G = k_BSKH.shape[2], N // k_BSKH.shape[2]
  q_BKGTH = policy.cast(q_BTNH / math.sqrt(H)).transpose(0, 2, 1, 3).reshape(B, K, G, T, H)
  k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
  sink_BKG1 = None if sink_BN is None else sink_BN.reshape(len(sink_BN), K, G, 1)
  out_BKGTH = _attend(q_BKGTH, k_BKSH, v_BKSH, first_BT, sink_BKG1, soft_cap, policy)
  return out_BKGTH.reshape(B, N, T, -1).transpose(0, 2, 1, 3)


def by_query(sink_BN: jax.Array, num_kv_heads: int, queries: int) -> jax.Array:
  """Returns the sink of each of X = G·T queries: (B, K, X)."""
  return jnp.repeat(sink_BN.reshape(len(sink_BN), num_kv_heads, -1), queries, axis=-1)


def logits(q_BKXH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
  return jnp.matmul(q_BKXH, k_BKSH.mT, preferred_element_type=jnp.float32)


def capped(logits: jax.Array, soft_cap: float) -> jax.Array:
  """Returns cap·tanh(logit/cap), which stays below the cap; 0: the logits as they are."""
  return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def masked(
  logits_BKXS: jax.Array, first_BX: jax.Array, last_X: jax.Array, places_S: jax.Array
) -> jax.Array:
  """Masks keys whose places are outside of what each query sees, from the first to the last."""
  causal_XS = places_S[None, :] <= last_X[:, None]
  seen_BXS = causal_XS[None] & (places_S[None, None, :] >= first_BX[:, :, None])
  return jnp.where(seen_BXS[:, None], logits_BKXS, jnp.finfo(jnp.float32).min)


_SMALLEST_BLOCK = 128


def _query_blocks(length: int) -> list[slice]:
  """Returns the queries of a row in blocks, which see no key behind them; one where it would not pay.

  On CPU four save 37% of all products. GPUs and TPUs have kernels for it; theirs is one block.
  """
  whole = is_for_tpu() or is_for_gpu()
  fitting = (n for n in (4, 3, 2) if length % n == 0 and length // n >= _SMALLEST_BLOCK)
  size = length // (1 if whole else next(fitting, 1))
  return [slice(begin, begin + size) for begin in range(0, length, size)]


class _Block(NamedTuple):
  """A block of queries, those of the G heads that share keys as rows of one product: X = G·T of the block;
  and the S keys up to its last query."""

  q_BKXH: jax.Array
  k_BKSH: jax.Array
  v_BKSH: jax.Array
  first_BX: jax.Array
  last_X: jax.Array

  @classmethod
  def of(cls, queries: slice, q_BKGTH, k_BKSH, v_BKSH, first_BT) -> "_Block":
    """Returns the block of such queries of a row."""
    G, end = q_BKGTH.shape[2], queries.stop
    last_X = jnp.tile(jnp.arange(queries.start, end), G)
    first_BX = jnp.tile(first_BT[:, queries], (1, G))
    keys = k_BKSH[:, :, :end], v_BKSH[:, :, :end]
    return cls(_as_rows(q_BKGTH[:, :, :, queries]), *keys, first_BX, last_X)

  def capped(self, soft_cap: float) -> jax.Array:
    """Returns the logits before the mask."""
    return capped(logits(self.q_BKXH, self.k_BKSH), soft_cap)

  def masked(self, logits_BKXS: jax.Array) -> jax.Array:
    """Masks keys before the first of each query, and after itself."""
    return masked(logits_BKXS, self.first_BX, self.last_X, jnp.arange(logits_BKXS.shape[-1]))


def _as_rows(x_BKGTH: jax.Array) -> jax.Array:
  B, K, G, T, H = x_BKGTH.shape
  return x_BKGTH.reshape(B, K, G * T, H)


def _joined(blocks_BKXH: list[jax.Array], num_groups: int) -> jax.Array:
  """Returns the queries of all blocks: (B, K, G, T, H)."""
  B, K, _, H = blocks_BKXH[0].shape
  return jnp.concatenate([x.reshape(B, K, num_groups, -1, H) for x in blocks_BKXH], axis=3)


def _forward(q_BKGTH, k_BKSH, v_BKSH, first_BT, sink_BKG1, soft_cap, policy):
  outs, log_sums = [], []
  for queries in _query_blocks(first_BT.shape[1]):
    block = _Block.of(queries, q_BKGTH, k_BKSH, v_BKSH, first_BT)
    logits_BKXS = block.masked(block.capped(soft_cap))
    max_BKX1 = logits_BKXS.max(-1, keepdims=True)
    exp_BKXS = jnp.exp(logits_BKXS - max_BKX1)
    sum_BKX1 = exp_BKXS.sum(-1, keepdims=True)
    if sink_BKG1 is not None:
      sink_BKGT = jnp.repeat(sink_BKG1, queries.stop - queries.start, axis=3)
      sum_BKX1 = sum_BKX1 + jnp.exp(_as_rows(sink_BKGT[..., None]) - max_BKX1)
    # Divided after the product: fewer divisions, and the largest weight is exactly 1 in bfloat16.
    exp_BKXS = policy.rounded(exp_BKXS)
    mixed_BKXH = jnp.matmul(exp_BKXS, block.v_BKSH, preferred_element_type=jnp.float32)
    outs.append(policy.rounded(mixed_BKXH / sum_BKX1))
    log_sums.append(max_BKX1 + jnp.log(sum_BKX1))
  out_BKGTH, log_sum_BKGT1 = (_joined(each, q_BKGTH.shape[2]) for each in (outs, log_sums))
  return out_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, first_BT, sink_BKG1, out_BKGTH, log_sum_BKGT1)


def _backward(soft_cap, policy, kept, d_out_BKGTH):
  q_BKGTH, k_BKSH, v_BKSH, first_BT, sink_BKG1, out_BKGTH, log_sum_BKGT1 = kept
  # Σ_s weight · d_weight, without another pass over (X, S).
  shift_BKX1 = product_sum(_as_rows(d_out_BKGTH), _as_rows(out_BKGTH))
  shift_BKGT1 = shift_BKX1.reshape(log_sum_BKGT1.shape)
  d_q, d_keys, d_values = [], [], []
  for queries in _query_blocks(first_BT.shape[1]):
    block = _Block.of(queries, q_BKGTH, k_BKSH, v_BKSH, first_BT)
    log_sum_BKX1, shift_BKX1, d_out_BKXH = (
      _as_rows(x[:, :, :, queries]) for x in (log_sum_BKGT1, shift_BKGT1, d_out_BKGTH)
    )
    capped_BKXS = block.capped(soft_cap)
    weights_BKXS = jnp.exp(block.masked(capped_BKXS) - log_sum_BKX1)
    d_values.append(transposed_product(policy.rounded(weights_BKXS), d_out_BKXH))
    d_logits_BKXS = policy.rounded(
      logit_gradients(weights_BKXS, capped_BKXS, block.v_BKSH, d_out_BKXH, shift_BKX1, soft_cap)
    )
    d_q.append(jnp.matmul(d_logits_BKXS, block.k_BKSH))
    d_keys.append(transposed_product(d_logits_BKXS, block.q_BKXH))
  d_sink = None
  if sink_BKG1 is not None:
    d_sink_BKGT = sink_gradient(sink_BKG1, log_sum_BKGT1, shift_BKGT1)
    d_sink = d_sink_BKGT.sum(3, keepdims=True)
  d_k_BKSH, d_v_BKSH = _sum_over_blocks(d_keys), _sum_over_blocks(d_values)
  d_k_BKSH, d_v_BKSH = d_k_BKSH.astype(k_BKSH.dtype), d_v_BKSH.astype(v_BKSH.dtype)
  return _joined(d_q, q_BKGTH.shape[2]), d_k_BKSH, d_v_BKSH, None, d_sink


def _sum_over_blocks(d_BKSH: list[jax.Array]) -> jax.Array:
  """Returns the sum of gradients of keys, of which each block has seen more than the one before."""
  total_BKSH = d_BKSH[0]
  for more_BKSH in d_BKSH[1:]:
    behind = more_BKSH.shape[2] - total_BKSH.shape[2]
    total_BKSH = jnp.pad(total_BKSH, ((0, 0), (0, 0), (0, behind), (0, 0))) + more_BKSH
  return total_BKSH


def product_sum(d_out_BKXH: jax.Array, out_BKXH: jax.Array) -> jax.Array:
  """Returns Σ_h d_out · out, float32[B, K, X, 1]: of four dims, as XLA takes six times as long for five on CPU."""
  f32 = jnp.float32
  return (d_out_BKXH.astype(f32) * out_BKXH.astype(f32)).sum(-1, keepdims=True)


def logit_gradients(weights_BKXS, capped_BKXS, v_BKSH, d_out_BKXH, shift_BKX1, soft_cap):
  """Returns the gradients of logits before the cap and the mask, float32."""
  d_weights_BKXS = jnp.matmul(d_out_BKXH, v_BKSH.mT, preferred_element_type=jnp.float32)
  d_logits_BKXS = weights_BKXS * (d_weights_BKXS - shift_BKX1)
  if soft_cap:
    # The slope of the tanh; of logits before the mask, whose least number has no square.
    d_logits_BKXS = d_logits_BKXS * (1 - (capped_BKXS / soft_cap) ** 2)
  return d_logits_BKXS


def sink_gradient(sink_BKX, log_sum_BKX1, shift_BKX1) -> Any:
  """Returns the gradient of a logit whose value is zero."""
  if sink_BKX is None:
    return None
  d_BKX = -jnp.exp(sink_BKX - log_sum_BKX1[..., 0]) * shift_BKX1[..., 0]
  return d_BKX if len(sink_BKX) > 1 else d_BKX.sum(0, keepdims=True)


_attend = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(5, 6))
_attend.defvjp(_forward, _backward)
