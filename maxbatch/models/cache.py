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
from jax.typing import DTypeLike

from maxbatch.config.schema import ModelConfig
from maxbatch.hardware.sharding import constrain
from maxbatch.models.dot_product import capped
from maxbatch.precision.policy import Policy

_AXES = ("batch", "kv_heads", "length", "head_dim")


class KeysValues(NamedTuple):
  """What tokens to come see of those before."""

  keys_BKSH: jax.Array
  values_BKSH: jax.Array


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
  shape = (rows, config.base_num_kv_heads, places, config.head_dim)

  def zeros(*lead: int) -> KeysValues:
    axes = (*(None for _ in lead), *_AXES)
    return KeysValues(*(constrain(jnp.zeros((*lead, *shape), dtype), axes) for _ in "kv"))

  return zeros(num_layers) if config.scan_layers else tuple(zeros() for _ in range(num_layers))


class LayerCache:
  """One layer's part of a cache during one pass.

  Attention `put`s the keys and values of the tokens it is given, and they are in `kept` afterwards:
  so they need not be handed through whatever else a block is made of.
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
    keys, values = self.kept
    self.kept = KeysValues(self._written(keys, k_BTKH), self._written(values, v_BTKH))

  def _written(self, kept: jax.Array, x_BTKH: jax.Array) -> jax.Array:
    x_BKTH, at = x_BTKH.swapaxes(1, 2).astype(kept.dtype), (0, 0, self.place, 0)
    if self._layer is None:
      return jax.lax.dynamic_update_slice(kept, x_BKTH, at)
    return jax.lax.dynamic_update_slice(kept, x_BKTH[None], (self._layer, *at))

  def attention(
    self, q_B1NH: jax.Array, first_B1: jax.Array, soft_cap: float, policy: Policy
  ) -> jax.Array:
    """Attends, as `dot_product_attention`, from the token that was put last to all from its first
    to itself."""
    B, _, N, H = q_B1NH.shape
    keys_BKSH, values_BKSH = self._own()
    K, S = keys_BKSH.shape[1:3]
    q_BKGH = policy.rounded(q_B1NH / math.sqrt(H)).reshape(B, K, N // K, H)
    logits_BKGS = jnp.matmul(q_BKGH, keys_BKSH.mT, preferred_element_type=jnp.float32)
    logits_BKGS = capped(logits_BKGS, soft_cap)
    places_1S = jnp.arange(S)[None]
    seen_BS = (places_1S >= first_B1) & (places_1S <= self.place)
    logits_BKGS = jnp.where(seen_BS[:, None, None], logits_BKGS, jnp.finfo(jnp.float32).min)
    exp_BKGS = jnp.exp(logits_BKGS - logits_BKGS.max(-1, keepdims=True))
    weights_BKGS = policy.rounded(exp_BKGS)
    mixed_BKGH = jnp.matmul(weights_BKGS, values_BKSH, preferred_element_type=jnp.float32)
    out_BKGH = mixed_BKGH / exp_BKGS.sum(-1, keepdims=True)
    return policy.rounded(out_BKGH).reshape(B, 1, N, H)

  def _own(self) -> KeysValues:
    if self._layer is None:
      return self.kept
    at = self._layer
    return KeysValues(*(jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in self.kept))
