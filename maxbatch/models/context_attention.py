"""Attention of rows whose tokens several devices share, exact by any of MaxText's strategies.

all_gather: each device has keys and values of the whole row, for a layer at a time. ring: they travel from
device to device, which attend to those they have meanwhile (Liu et al. 2023). ulysses: an all-to-all
gives each device whole rows of some heads (Jacobs et al. 2023).

Matrix products are of blocks of queries and keys, with the largest logit and the sum of the softmax so far,
float32 (Dao et al. 2022); blocks of which no query sees a key are left out. Nothing of other devices is kept
for the backward pass, which gathers, or sends around, keys and values again.

B rows, T tokens of a device, S of the row, N query heads, K key/value heads, G = N/K, H width of a head, D
devices that share a row, X tokens of a block, n blocks of queries, m of keys, Y = G·X.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxbatch.config.schema import ContextStrategy, ModelConfig, context_strategy
from maxbatch.hardware.shard_maps import divisible_heads, to_own_tokens
from maxbatch.hardware.sharding import auto_axes_spec, auto_axis_sizes
from maxbatch.models.dot_product import (
  by_query,
  capped,
  dot_product_attention,
  logit_gradients,
  logits,
  masked,
  product_sum,
  sink_gradient,
)
from maxbatch.models.forms import transposed_product
from maxbatch.models.remat import named
from maxbatch.precision.policy import Policy

BLOCK, SMALLEST = 1024, 128
"""Tokens of a block at most, and at least if there are divisors between."""


def token_order(config: ModelConfig, length: int) -> np.ndarray | None:
  """Returns the order in which the tokens of rows stand while a step computes; None: as they are read.

  Of 2·D chunks device i has i and 2·D − 1 − i: so all have the same products to compute (zigzag).
  """
  sizes = auto_axis_sizes()
  D = sizes["context"]
  if D == 1 or length % (2 * D) or not config.context_parallel_load_balance:
    return None
  if context_strategy(config, sizes["tensor"], D) == "ulysses":
    return None  # Devices have whole rows.
  chunks = np.arange(length, dtype=np.int32).reshape(2 * D, -1)
  return np.stack([chunks[:D], chunks[: D - 1 : -1]], axis=1).reshape(-1)


def attention_by_products(
  config: ModelConfig,
  policy: Policy,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  first_BT: jax.Array,
  sink_BN: jax.Array | None,
  places_S: np.ndarray | None,
) -> jax.Array:
  """Returns `dot_product_attention` of rows whose tokens context may divide: (B, S, N, H).

  Args:
    first_BT: int32[B or 1, S]: the place of the first key that each query sees.
    places_S: the place of each token in the row; None: they stand in order.
  """
  sizes, soft_cap = auto_axis_sizes(), config.attn_logits_soft_cap
  rows = q_BTNH, k_BSKH, v_BSKH
  if sizes["context"] == 1 or q_BTNH.shape[1] % sizes["context"]:
    return named(dot_product_attention(*rows, first_BT, soft_cap, policy, sink_BN), "context")
  strategy = context_strategy(config, sizes["tensor"], sizes["context"])
  by_heads = strategy == "ulysses"
  D = 1 if by_heads else sizes["context"]
  how = _How(None if by_heads else strategy, D, soft_cap, policy)
  places_S = np.arange(q_BTNH.shape[1]) if places_S is None else places_S

  def attend(q, k, v, first_BT, sink_BN, places_S):
    return _by_blocks(q, k, v, first_BT, sink_BN, places_S.reshape(D, -1), how)

  whole = [(jnp.asarray(places_S), PartitionSpec())]
  return over_own_heads(attend, *rows, [first_BT], sink_BN, whole, by_heads=by_heads)


def over_own_heads(
  attend: Callable[..., jax.Array],
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  of_tokens: Sequence[jax.Array | None],
  sink_BN: jax.Array | None,
  others: Sequence[tuple[Any, Any]] = (),
  *,
  by_heads: bool,
) -> jax.Array:
  """Runs attention on each device for its own rows and heads: (B, T, N, H) → (B, T, N, H).

  Where context divides the tokens of rows, each device attends for its own, and `attend` gets the
  keys of the others itself; or, `by_heads`, an all-to-all gives each device whole rows of some of its
  heads, and another one returns them (Jacobs et al. 2023). All mesh axes are taken that are left: the
  compiler would gather rows along them.

  Args:
    attend: of queries, keys, values, `of_tokens`, sinks, and `others`.
    of_tokens: arrays (B or 1, T), whole if by_heads.
    sink_BN: float32[B or 1, N]; None: there is none.
    others: what else it needs, with the specs by which this is divided.
  """
  mesh, sizes = jax.sharding.get_abstract_mesh(), auto_axis_sizes()
  context = sizes["context"] if q_BTNH.shape[1] % sizes["context"] == 0 else 1
  moves_heads = by_heads and context > 1

  def local(q, k, v, of_tokens, sink_BN, *others):
    if moves_heads:
      q, k, v = (_all_to_all(x, split=2, joined=1) for x in (q, k, v))
    out = attend(q, k, v, *of_tokens, sink_BN, *others)
    return _all_to_all(out, split=1, joined=2) if moves_heads else out

  N, ways = q_BTNH.shape[2], sizes["tensor"] * (context if moves_heads else 1)
  k_BSKH, v_BSKH = (divisible_heads(x, N, ways) for x in (k_BSKH, v_BSKH))
  by_token = ("batch", "length", "heads", "head_dim")
  heads = tuple(auto_axes_spec(by_token, x.shape) for x in (q_BTNH, k_BSKH, v_BSKH))
  length, of_heads = (None, "heads_of_rows") if moves_heads else ("length", "heads")

  def place(x: jax.Array | None, axis: str | None) -> PartitionSpec | None:
    return None if x is None else auto_axes_spec(("batch", axis), x.shape)

  # Without check_vma, which splash attention does not know, an axis that divides nothing costs an
  # all-reduce of equal gradients: correct, but only `stage` can be such an axis and be large.
  return jax.shard_map(
    local,
    in_specs=(
      *heads,
      [place(x, length) for x in of_tokens],
      place(sink_BN, of_heads),
      *(spec for _, spec in others),
    ),
    out_specs=heads[0],
    axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    check_vma=False,
  )(q_BTNH, k_BSKH, v_BSKH, list(of_tokens), sink_BN, *(x for x, _ in others))


def _all_to_all(x: jax.Array, *, split: int, joined: int) -> jax.Array:
  """Gives each device that shares rows a part of one dim, and the whole of another."""
  return jax.lax.all_to_all(x, "context", split, joined, tiled=True)


class _How(NamedTuple):
  """What is known when attention is compiled."""

  strategy: ContextStrategy | None
  """None: the device has all keys."""
  ways: int
  soft_cap: float
  policy: Policy


class _Seen(NamedTuple):
  """What queries see."""

  first_nBY: jax.Array
  """The place of the first key."""
  places_DnX: jax.Array
  """Of all tokens, by device."""


class _Keys(NamedTuple):
  k_mBKXH: jax.Array
  v_mBKXH: jax.Array
  places_mX: jax.Array


def _by_blocks(q_BTNH, k_BTKH, v_BTKH, first_BT, sink_BN, places_DT, how: _How) -> jax.Array:
  """Returns the attention (B, T, N, H) of a device's queries, cut into blocks."""
  B, T, N, H = q_BTNH.shape
  K, X = k_BTKH.shape[2], _block(T)
  n, G = T // X, N // K
  q_BTNH = how.policy.cast(q_BTNH / math.sqrt(H))
  q_nBKYH = q_BTNH.reshape(B, n, X, K, G, H).transpose(1, 0, 3, 4, 2, 5).reshape(n, B, K, G * X, H)
  k_nBKXH, v_nBKXH = (x.reshape(B, n, X, K, -1).transpose(1, 0, 3, 2, 4) for x in (k_BTKH, v_BTKH))
  first_nBX = first_BT.reshape(-1, n, X).swapaxes(0, 1)
  seen = _Seen(jnp.tile(first_nBX, (1, 1, G)), places_DT.reshape(-1, n, X))
  sink_BKY = None if sink_BN is None else by_query(sink_BN, K, X)
  out_nBKYH = _attend(q_nBKYH, k_nBKXH, v_nBKXH, seen, sink_BKY, how)
  out_BnXKGH = out_nBKYH.reshape(n, B, K, G, X, -1).transpose(1, 0, 4, 2, 3, 5)
  return out_BnXKGH.reshape(B, T, N, -1)


def _block(length: int) -> int:
  """Returns the tokens of a block, which divide either half of a device's tokens: in a row these may
  stand far apart."""
  half = length // 2 if length % 2 == 0 else length
  fitting = (size for size in range(min(half, BLOCK), SMALLEST - 1, -1) if half % size == 0)
  return next(fitting, half)


def _forward(q_nBKYH, k_nBKXH, v_nBKXH, seen, sink_BKY, how):
  # As what depends on the layer: or jax computes the masks of all blocks before the scan over layers.
  q_nBKYH, seen = jax.lax.optimization_barrier((q_nBKYH, seen))
  n, B, K, Y, _ = q_nBKYH.shape
  queries = q_nBKYH, seen.first_nBY, _last(seen, q_nBKYH, how)
  least = jnp.full((n, B, K, Y, 1), jnp.finfo(jnp.float32).min)
  state = jnp.zeros((n, B, K, Y, v_nBKXH.shape[-1])), least, jnp.zeros(least.shape)

  def attend(state, keys):
    block = functools.partial(_attend_block, how=how)
    return jax.lax.scan(lambda _, each: (None, block(*each, keys)), None, (queries, state))[1]

  keys = _Keys(k_nBKXH, v_nBKXH, seen.places_DnX[0])
  if how.strategy == "ring":
    sent = k_nBKXH, v_nBKXH

    def step(carry, number):
      sent, state = carry
      return (_to_next(sent, how), attend(state, _of_ring(sent, seen, number, how))), None

    last = how.ways - 1
    (sent, state), _ = jax.lax.scan(step, (sent, state), jnp.arange(last))
    state = attend(state, _of_ring(sent, seen, last, how))
  else:
    state = attend(state, keys if how.strategy is None else _gathered(keys, seen))
  mixed, max_nBKY1, sum_nBKY1 = state
  if sink_BKY is not None:
    sum_nBKY1 = sum_nBKY1 + jnp.exp(sink_BKY[None, ..., None] - max_nBKY1)
  out_nBKYH = how.policy.rounded(mixed / sum_nBKY1)
  log_sum_nBKY1 = max_nBKY1 + jnp.log(sum_nBKY1)
  out_nBKYH, log_sum_nBKY1 = (named(x, "context") for x in (out_nBKYH, log_sum_nBKY1))
  return out_nBKYH, (q_nBKYH, k_nBKXH, v_nBKXH, seen, sink_BKY, out_nBKYH, log_sum_nBKY1)


def _attend_block(queries, state, keys, *, how):
  """Adds blocks of keys to what a block of queries has seen: numerators, largest logit, sum."""
  q_BKYH, first_BY, last_Y = queries

  def add(state, keys):
    mixed, max_BKY1, sum_BKY1 = state
    logits_BKYX = masked(
      capped(logits(q_BKYH, keys.k_mBKXH), how.soft_cap), first_BY, last_Y, keys.places_mX
    )
    new_max_BKY1 = jnp.maximum(max_BKY1, logits_BKYX.max(-1, keepdims=True))
    exp_BKYX, before = jnp.exp(logits_BKYX - new_max_BKY1), jnp.exp(max_BKY1 - new_max_BKY1)
    sum_BKY1 = sum_BKY1 * before + exp_BKYX.sum(-1, keepdims=True)
    exp_BKYX = how.policy.rounded(exp_BKYX)
    new = jnp.matmul(exp_BKYX, keys.v_mBKXH, preferred_element_type=jnp.float32)
    return mixed * before + new, new_max_BKY1, sum_BKY1

  def step(state, keys):
    any_seen = is_seen(first_BY, last_Y, keys.places_mX)
    return jax.lax.cond(any_seen, add, lambda state, keys: state, state, keys), None

  return jax.lax.scan(step, state, keys)[0]


def is_seen(first_BY: jax.Array, last_Y: jax.Array, places_X: jax.Array) -> jax.Array:
  """Returns whether any of some queries may see any of some keys."""
  return (places_X.min() <= last_Y.max()) & (places_X.max() >= first_BY.min())


def _backward(how, kept, d_out_nBKYH):
  q_nBKYH, k_nBKXH, v_nBKXH, seen, sink_BKY, out_nBKYH, log_sum_nBKY1 = kept
  q_nBKYH, seen = jax.lax.optimization_barrier((q_nBKYH, seen))
  all_BKYH = (x.reshape(-1, *x.shape[2:]) for x in (d_out_nBKYH, out_nBKYH))
  shift_nBKY1 = product_sum(*all_BKYH).reshape(log_sum_nBKY1.shape)
  queries = q_nBKYH, seen.first_nBY, _last(seen, q_nBKYH, how), log_sum_nBKY1, shift_nBKY1
  d_q = jnp.zeros(q_nBKYH.shape)

  def gradients(d_q, keys):
    """Returns the gradient of the queries so far, and those of keys and values, float32."""
    zeros = jnp.zeros(keys.k_mBKXH.shape), jnp.zeros(keys.v_mBKXH.shape)
    block = functools.partial(_block_gradients, how=how)
    each = (*queries, d_out_nBKYH), d_q
    return jax.lax.scan(lambda d_keys, each: block(*each, keys, d_keys), zeros, each)

  keys = _Keys(k_nBKXH, v_nBKXH, seen.places_DnX[0])
  if how.strategy is None:
    d_keys, d_q = gradients(d_q, keys)
  elif how.strategy == "all_gather":
    d_keys, d_q = gradients(d_q, _gathered(keys, seen))
    kept = k_nBKXH, v_nBKXH
    d_keys = [to_own_tokens(d.astype(x.dtype)) for d, x in zip(d_keys, kept, strict=True)]
  else:
    d_keys, d_q = _ring_gradients(gradients, d_q, keys, seen, how)
  d_k_nBKXH, d_v_nBKXH = d_keys
  d_sink = None
  if sink_BKY is not None:
    d_nBKY = jax.vmap(sink_gradient, (None, 0, 0))(sink_BKY, log_sum_nBKY1, shift_nBKY1)
    d_sink = d_nBKY.sum(0)
  d_k_nBKXH, d_v_nBKXH = d_k_nBKXH.astype(k_nBKXH.dtype), d_v_nBKXH.astype(v_nBKXH.dtype)
  return d_q.astype(q_nBKYH.dtype), d_k_nBKXH, d_v_nBKXH, None, d_sink


def _ring_gradients(gradients, d_q, keys, seen, how):
  """Sends the sums of gradients after keys and values, one step later, so that a device computes what
  it adds to them while they are under way."""
  sent = keys.k_mBKXH, keys.v_mBKXH
  d_keys, d_q = gradients(d_q, _of_ring(sent, seen, 0, how))

  def step(carry, number):
    sent, d_keys, d_q = carry
    arrived = _to_next(d_keys, how)
    new, d_q = gradients(d_q, _of_ring(sent, seen, number, how))
    return (_to_next(sent, how), jax.tree.map(jnp.add, arrived, new), d_q), None

  carry = _to_next(sent, how), d_keys, d_q
  (_, d_keys, d_q), _ = jax.lax.scan(step, carry, jnp.arange(1, how.ways))
  return _to_next(d_keys, how), d_q


def _block_gradients(queries, d_q_BKYH, keys, d_keys, *, how):
  """Returns the gradients of blocks of keys and values, added up, and that of a block of queries."""
  q_BKYH, first_BY, last_Y, log_sum_BKY1, shift_BKY1, d_out_BKYH = queries

  def add(d_q_BKYH, keys, d_keys):
    d_k_BKXH, d_v_BKXH = d_keys
    capped_BKYX = capped(logits(q_BKYH, keys.k_mBKXH), how.soft_cap)
    weights_BKYX = jnp.exp(masked(capped_BKYX, first_BY, last_Y, keys.places_mX) - log_sum_BKY1)
    d_v_BKXH = d_v_BKXH + transposed_product(how.policy.rounded(weights_BKYX), d_out_BKYH)
    d_logits_BKYX = how.policy.rounded(
      logit_gradients(weights_BKYX, capped_BKYX, keys.v_mBKXH, d_out_BKYH, shift_BKY1, how.soft_cap)
    )
    d_k_BKXH = d_k_BKXH + transposed_product(d_logits_BKYX, q_BKYH)
    d_q = jnp.matmul(d_logits_BKYX, keys.k_mBKXH, preferred_element_type=jnp.float32)
    return d_q_BKYH + d_q, (d_k_BKXH, d_v_BKXH)

  def step(d_q_BKYH, each):
    keys, d_keys = each
    any_seen = is_seen(first_BY, last_Y, keys.places_mX)
    return jax.lax.cond(any_seen, add, lambda d_q, _, d: (d_q, d), d_q_BKYH, keys, d_keys)

  d_q_BKYH, d_keys = jax.lax.scan(step, d_q_BKYH, (keys, d_keys))
  return d_keys, d_q_BKYH


def _last(seen: _Seen, q_nBKYH: jax.Array, how: _How) -> jax.Array:
  """Returns the place of each query, int32[n, Y]: the last key that it sees."""
  own = 0 if how.strategy is None else jax.lax.axis_index("context")
  G = q_nBKYH.shape[3] // seen.places_DnX.shape[2]
  return jnp.tile(seen.places_DnX[own], (1, G))


def _gathered(keys: _Keys, seen: _Seen) -> _Keys:
  """Returns the keys of all devices."""
  k, v = (jax.lax.all_gather(x, "context", tiled=True) for x in keys[:2])
  return _Keys(k, v, seen.places_DnX.reshape(-1, seen.places_DnX.shape[2]))


def _of_ring(sent: Any, seen: _Seen, number: jax.Array | int, how: _How) -> _Keys:
  """Returns the keys that have come after so many steps: those of the device so many places before."""
  k_nBKXH, v_nBKXH = sent
  owner = (jax.lax.axis_index("context") - number) % how.ways
  return _Keys(k_nBKXH, v_nBKXH, seen.places_DnX[owner])


def _to_next(arrays: Any, how: _How) -> Any:
  """Sends arrays to the next device of the ring, and returns those of the one before."""
  ring = [(place, (place + 1) % how.ways) for place in range(how.ways)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, "context", ring), arrays)


_attend = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(5,))
_attend.defvjp(_forward, _backward)
