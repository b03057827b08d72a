"""Dropout whose masks belong to the sample: splitting the batch another way changes nothing.

The key of a mask derives from (seed, index of the sample, layer, place in the layer).
"""

import jax
import jax.numpy as jnp


def fold(keys_B: jax.Array | None, number: jax.Array | int) -> jax.Array | None:
  """Returns the rows' keys for one layer, or one place in a layer; None stays None (no dropout)."""
  if keys_B is None:
    return None
  return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)


def dropout(x_BTD: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
  """Zeroes a share `rate` of the activations of each row and scales up the rest.

  Without keys (evaluation) or at rate 0 the activations pass unchanged.
  """
  if keys_B is None or rate == 0.0:
    return x_BTD
  keep_BTD = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x_BTD.shape[1:]))(keys_B)
  return jnp.where(keep_BTD, x_BTD / (1.0 - rate), jnp.zeros_like(x_BTD))
