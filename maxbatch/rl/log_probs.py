"""Log-probabilities of given tokens, holding the logits of one tile of tokens at a time.

B rows, T tokens, D width, V vocabulary, C tokens of a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.data.rows import Rows, in_order
from maxbatch.hardware.shard_maps import over_rows
from maxbatch.hardware.sharding import constrain
from maxbatch.models.registry import Model, Parameters
from maxbatch.sampling.choice import unpacked
from maxbatch.training.loss import TokenShare, row_order, token_share
from maxbatch.training.tiles import cut_tokens, num_tiles, scan_tiles

_NEVER = -1e30
"""In place of −∞, of which a product with probability 0 is not 0."""


class LogProbs(NamedTuple):
  """Of every target, float32; 0 where it does not count."""

  targets_BT: jax.Array
  """Its log-probability."""
  entropy_BT: jax.Array
  """Entropy of the distribution, in nats; without a gradient."""


def token_log_probs(
  model: Model,
  parameters: Parameters,
  rows: Rows,
  allowed_V: np.ndarray,
  temperature: float = 1.0,
  kept_BTW: jax.Array | None = None,
) -> LogProbs:
  """Returns log-probabilities by the distribution that the sampler draws from, of whole rows, as
  `share_log_probs`.

  There is no dropout: what is sampled has none.
  """
  order_T = row_order(model, rows)
  if order_T is not None:
    rows = rows.in_order(order_T)
    kept_BTW = None if kept_BTW is None else in_order(kept_BTW, order_T)
  share, *_ = token_share(model, model.bind(parameters), rows, None, is_training=False)
  options = allowed_V, temperature, kept_BTW
  log_probs = share_log_probs(share, rows.targets, rows.weights, *options)
  if order_T is None:
    return log_probs
  back_T = np.argsort(order_T)
  return jax.tree.map(lambda x_BT: in_order(x_BT, back_T), log_probs)


def share_log_probs(
  share: TokenShare,
  targets_BC: jax.Array,
  weights_BC: jax.Array,
  allowed_V: np.ndarray,
  temperature: float = 1.0,
  kept_BCW: jax.Array | None = None,
) -> LogProbs:
  """Returns log-probabilities of some tokens by the distribution that the sampler draws from.

  Args:
    share: the tokens, after the model's layers.
    targets_BC: int32.
    weights_BC: only targets with a weight count.
    allowed_V: bool: tokens that may be sampled; the others have no probability here either.
    temperature: divides the logits, more than 0.
    kept_BCW: uint32: bits of the tokens from which each target was chosen: of the others none has a
      probability; None: all that are allowed.
  """
  config, hidden_BCD = share.model.config, share.hidden_BCD
  tiles = num_tiles(config, *hidden_BCD.shape[:2])
  options = functools.partial(
    _of_tile, allowed_V=allowed_V, cap=config.final_logits_soft_cap, temperature=temperature
  )
  of_tile = jax.checkpoint(options)  # The backward pass makes the logits again.

  def of_rows(matrix_DV: jax.Array, *rows: jax.Array) -> LogProbs:
    # In float32 here, so that the gradients of the tiles are summed in it.
    wide_DV = matrix_DV.astype(jnp.float32)

    def add_tile(carry: None, tile: tuple[jax.Array, ...]) -> tuple[None, LogProbs]:
      return carry, of_tile(wide_DV.astype(matrix_DV.dtype), *tile)

    _, result = scan_tiles(add_tile, None, cut_tokens(tiles, *rows), tiles)
    B, T = rows[0].shape[:2]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T], result)

  with jax.named_scope("head"):
    given = hidden_BCD, targets_BC, weights_BC, *(() if kept_BCW is None else (kept_BCW,))
    return over_rows(of_rows, share.matrix_DV, ("embed", "vocab"), *given)


def _of_tile(
  matrix_DV: jax.Array,
  hidden_BCD: jax.Array,
  targets_BC: jax.Array,
  weights_BC: jax.Array,
  kept_BCW: jax.Array | None = None,
  *,
  allowed_V: np.ndarray,
  cap: float,
  temperature: float,
) -> LogProbs:
  B, C, D = hidden_BCD.shape
  logits_XV = jnp.matmul(hidden_BCD.reshape(-1, D), matrix_DV, preferred_element_type=jnp.float32)
  logits_BCV = constrain(logits_XV.reshape(B, C, -1), ("batch", "length", "vocab"))
  if cap:
    logits_BCV = cap * jnp.tanh(logits_BCV / cap)
  allowed_BCV = jnp.asarray(allowed_V)[None, None]
  if kept_BCW is not None:
    allowed_BCV &= unpacked(kept_BCW, logits_BCV.shape[-1])
  logits_BCV = jnp.where(allowed_BCV, logits_BCV / temperature, _NEVER)
  log_z_BC = jax.nn.logsumexp(logits_BCV, -1)
  # A comparison instead of a gather: it also works where the vocabulary is divided over devices.
  hit_BCV = targets_BC[..., None] == jnp.arange(logits_BCV.shape[-1])[None, None]
  target_BC = jnp.where(hit_BCV, logits_BCV, 0.0).sum(-1)
  counts_BC = weights_BC > 0
  fixed_BCV = jax.lax.stop_gradient(logits_BCV - log_z_BC[..., None])
  entropy_BC = -(jnp.exp(fixed_BCV) * fixed_BCV).sum(-1)
  return LogProbs(
    jnp.where(counts_BC, target_BC - log_z_BC, 0.0), jnp.where(counts_BC, entropy_BC, 0.0)
  )
