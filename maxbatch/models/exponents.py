"""Histograms of the exponents of activations and their gradients, out of a backward pass.

A module may carry a probe: zeros that its result does not depend on. What differentiation reports as
the probe's gradient are the histograms of the module's output and of that output's gradient. L layers,
N bins.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxbatch.models.probes import Probe
from maxbatch.precision.policy import Policy

NUM_BINS = 256
"""By a float32's exponent as it is stored: bin 127 + e counts magnitudes in [2^e, 2^(e+1)), the first
one zeros, the last one what is not finite."""
KINDS = 2
"""Of values in a module's probe: what it gives, and the gradients of that."""


class ExponentProbe(Probe):
  """Of what a module gives; a scalar, in stacked layers one per layer."""


def exponent_probe(layers: tuple[int, ...]) -> ExponentProbe:
  """The probe of a module, with a leading dim where it stands for stacked layers."""
  return ExponentProbe(jnp.zeros(layers), of=(), frozen=())


def histogram(x: jax.Array) -> jax.Array:
  """How many values have which exponent: (…) → float32[N]."""
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  exponents = ((bits >> 23) & (NUM_BINS - 1)).astype(jnp.int32)
  return jnp.zeros(NUM_BINS, jnp.float32).at[exponents.ravel()].add(1.0)


@jax.custom_vjp
def _observed(x: jax.Array, probe_KN: jax.Array) -> jax.Array:
  del probe_KN
  return x


_observed.defvjp(
  lambda x, probe_KN: (x, histogram(x)),
  lambda counts_N, d_x: (d_x, jnp.stack([counts_N, histogram(d_x)])),
)


def given_out(x: jax.Array, policy: Policy, probe: Probe | None) -> jax.Array:
  """What a module gives: `x` in the format of the computation, counted where there is a probe."""
  x = policy.cast(x)
  return x if probe is None or probe[...].ndim < KINDS else _observed(x, probe[...])


def histograms(tree: Any, layered: Any) -> Any:
  """Of every leaf of a tree: float32[N], or [L, N] of stacked layers.

  Args:
    tree: arrays.
    layered: a tree of booleans like it, of which leaves are stacked.
  """
  return jax.tree.map(
    lambda x, is_stacked: jax.vmap(histogram)(x) if is_stacked else histogram(x), tree, layered
  )
