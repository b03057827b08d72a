"""Keys and values of a text's tokens, kept while it is written: each token is computed once.

B rows, T tokens of a pass, S places for the keys of a row, N query heads, K key/value heads, G = N/K
query heads per key/value head, H width of a head; with scan_layers the arrays of all layers are
stacked, with a leading L.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from maxbatch.config.schema import ModelConfig, query_dim, value_dim
from maxbatch.data.rows import in_order
from maxbatch.hardware.sharding import constrain
from maxbatch.models.dot_product import capped
from maxbatch.precision.policy import Policy

_AXES = ("batch", "kv_heads", "length", "head_dim")


class KeysValues(NamedTuple):
  """What tokens to come see of those before; of a mixture of experts also where these were sent."""

  keys_BKSH: jax.Array
  values_BKSH: jax.Array
  experts_BSK: jax.Array | None = None
  """int16, K experts of a token; −1 where none is kept yet, or a layer has none."""


Cache = KeysValues | tuple[KeysValues, ...]
"""Caches of all layers: stacked, or one by one."""

Decode = Callable[[jax.Array, Cache, jax.Array, jax.Array], tuple[jax.Array, Cache]]
"""(tokens_B, cache, place, begins_B) → (hidden_BD, cache): a pass over one more token of each row.

The tokens see what is in the cache from int32 `begins_B` on, which is position 0 of each row, and are
put in it at int32 `place`, the same for all.
"""


def empty_cache(
  config: ModelConfig, dtype: DTypeLike, num_layers: int, rows: int, places: int
) -> Cache:
  """Allocates `places` tokens of each row: divided as attention is, rows over data and fsdp, heads
  over tensor."""
  dims = query_dim(config), value_dim(config)
  shape = (rows, config.base_num_kv_heads, places)

  def zeros(*lead: int) -> KeysValues:
    none = (None,) * len(lead)
    keys, values = (
      constrain(jnp.zeros((*lead, *shape, dim), dtype), (*none, *_AXES)) for dim in dims
    )
    if config.num_experts == 1:
      return KeysValues(keys, values)
    experts = jnp.full((*lead, rows, places, config.num_experts_per_tok), -1, jnp.int16)
    return KeysValues(keys, values, constrain(experts, (*none, "batch", None, None)))

  return zeros(num_layers) if config.scan_layers else tuple(zeros() for _ in range(num_layers))


class LayerCache:
  """One layer's part of a cache during one pass.

  Attention `put`s the keys and values of the tokens it is given, and they are in `kept` afterwards:
  so they need not be handed through whatever else a block is made of. So does a mixture its choices.
  """

  def __init__(
    self, kept: KeysValues, place: jax.Array | int, *, is_new: bool, layer: jax.Array | None = None
  ):
    """Takes the place of the first of the pass's tokens; of stacked layers this is the one at
    `layer`. A cache that `is_new` holds nothing yet."""
    self.kept, self.place, self.is_new = kept, place, is_new
    self._layer = layer

  def put(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> None:
    """Keeps the keys and values of the pass's tokens."""
    keys, values, at = self.kept.keys_BKSH, self.kept.values_BKSH, (0, 0, self.place, 0)
    self.kept = self.kept._replace(
      keys_BKSH=self._written(keys, k_BTKH.swapaxes(1, 2), at),
      values_BKSH=self._written(values, v_BTKH.swapaxes(1, 2), at),
    )

  def put_experts(self, chosen_BTK: jax.Array) -> None:
    """Keeps the experts of the pass's tokens."""
    assert self.kept.experts_BSK is not None
    experts_BSK = self._written(self.kept.experts_BSK, chosen_BTK, (0, self.place, 0))
    self.kept = self.kept._replace(experts_BSK=experts_BSK)

  def _written(self, kept: jax.Array, new: jax.Array, at: tuple[jax.Array | int, ...]) -> jax.Array:
    new = new.astype(kept.dtype)
    if self._layer is None:
      return jax.lax.dynamic_update_slice(kept, new, at)
    return jax.lax.dynamic_update_slice(kept, new[None], (self._layer, *at))

  def attention(
    self,
    q_B1NH: jax.Array,
    first_B1: jax.Array,
    soft_cap: float,
    policy: Policy,
    sink_BN: jax.Array | None = None,
  ) -> jax.Array:
    """Attends, as `dot_product_attention`, from the token that was put last to all from its first
    to itself."""
    B, _, N, H = q_B1NH.shape
    keys_BKSH, values_BKSH = self._own(self.kept.keys_BKSH), self._own(self.kept.values_BKSH)
    K, S = keys_BKSH.shape[1:3]
    q_BKGH = policy.rounded(q_B1NH / math.sqrt(H)).reshape(B, K, N // K, H)
    logits_BKGS = jnp.matmul(q_BKGH, keys_BKSH.mT, preferred_element_type=jnp.float32)
    logits_BKGS = capped(logits_BKGS, soft_cap)
    places_1S = jnp.arange(S)[None]
    seen_BS = (places_1S >= first_B1) & (places_1S <= self.place)
    logits_BKGS = jnp.where(seen_BS[:, None, None], logits_BKGS, jnp.finfo(jnp.float32).min)
    max_BKG1 = logits_BKGS.max(-1, keepdims=True)
    exp_BKGS = jnp.exp(logits_BKGS - max_BKG1)
    sum_BKG1 = exp_BKGS.sum(-1, keepdims=True)
    if sink_BN is not None:
      sum_BKG1 = sum_BKG1 + jnp.exp(sink_BN.reshape(-1, K, N // K, 1) - max_BKG1)
    weights_BKGS = policy.rounded(exp_BKGS)
    mixed_BKGH = jnp.matmul(weights_BKGS, values_BKSH, preferred_element_type=jnp.float32)
    out_BKGH = mixed_BKGH / sum_BKG1
    return policy.rounded(out_BKGH).reshape(B, 1, N, -1)

  def _own(self, kept: jax.Array) -> jax.Array:
    if self._layer is None:
      return kept
    return jax.lax.dynamic_index_in_dim(kept, self._layer, keepdims=False)


def in_row_order(cache: Cache, order_T: np.ndarray) -> Cache:
  """Returns a cache with its first tokens, which stand in another order (`Rows.places`), as they were read."""
  back_T = np.argsort(order_T)

  def moved(x: jax.Array) -> jax.Array:
    dim = x.ndim - 2
    first = jax.lax.slice_in_dim(x, 0, len(back_T), axis=dim)
    return jax.lax.dynamic_update_slice_in_dim(x, in_order(first, back_T, dim), 0, dim)

  return jax.tree.map(moved, cache)


def experts_of(cache: Cache) -> jax.Array:
  """Returns the experts that tokens in a mixture's cache were sent to: int16[B, S, L, K]."""
  layers = [cache] if isinstance(cache, KeysValues) else cache
  kept = [layer.experts_BSK for layer in layers if layer.experts_BSK is not None]
  return jnp.moveaxis(kept[0], 0, 2) if isinstance(cache, KeysValues) else jnp.stack(kept, 2)
