"""Rounding to formats that no device has, and rounding whose error is zero on average."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxbatch.precision.formats import Format


def rounded(x: jax.Array, to: Format) -> jax.Array:
  """Returns float32 numbers as the nearest of a narrower format, of two equally near the even one.

  Numbers beyond its range become infinite, as IEEE 754 does it: a run then sees that they were. Those
  below its normal numbers become its subnormal ones, which jax.lax.reduce_precision alone would set
  to zero.
  """
  normal = jax.lax.reduce_precision(x, to.exponent_bits, to.mantissa_bits)
  # Both products are exact: by powers of two, of numbers that float32 holds with bits to spare.
  subnormal = jnp.round(x * (1 / to.smallest)) * to.smallest
  return jnp.where(jnp.abs(x) < to.smallest_normal, subnormal, normal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def emulated(x: jax.Array, to: Format) -> jax.Array:
  """Rounds as `rounded` does, and the gradient likewise, as where arrays have the format's
  dtype."""
  return rounded(x, to)


emulated.defvjp(
  lambda x, to: (rounded(x, to), None),
  lambda to, _, gradient: (rounded(gradient, to),),
)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
  """Returns float32 as one of the two bfloat16 numbers around it, the nearer one more often.

  The probabilities are such that the result is x on average (Gupta et al. 2015; Zamirai et al. 2020
  for weights): small updates are not lost, but made now and then. What bfloat16 holds is unchanged.
  """
  draws = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  # Of the magnitude's bits the lower half is what is rounded; a carry is the larger neighbour.
  carried = (jax.lax.bitcast_convert_type(x, jnp.uint32) + draws) >> 16
  result = jax.lax.bitcast_convert_type(carried.astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), result, x.astype(jnp.bfloat16))


def stochastically_updated(parameters: Any, updates: Any, key: jax.Array) -> Any:
  """Returns parameters plus their float32 updates, those kept in bfloat16 stochastically rounded.

  The same key rounds the same way, however devices divide the arrays.
  """
  leaves, structure = jax.tree.flatten(parameters)
  keys = (jax.random.fold_in(key, index) for index in range(len(leaves)))

  def updated(p: jax.Array, u: jax.Array, key: jax.Array) -> jax.Array:
    total = p.astype(jnp.float32) + u
    return stochastically_rounded(total, key) if p.dtype == jnp.bfloat16 else total

  return structure.unflatten(map(updated, leaves, jax.tree.leaves(updates), keys))
