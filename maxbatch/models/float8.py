"""Products of activations and weights in float8.

In float8 a projection multiplies x·W forward, and dy·Wᵀ and xᵀ·dy backward. Each operand is multiplied by a scale of
its tensor, a power of two, rounded to a float8 format, multiplied with sums in float32, and divided by the
scales. Activations and weights are e4m3, gradients e5m2, which has their range (Micikevicius et al. 2022,
arxiv.org/abs/2209.05433).

Scales of x and dy are "delayed": they follow from the largest magnitudes (amax) of the steps before, as in
Transformer Engine, of which each projection keeps a buffer. Here these are maxima over the whole of a step:
the gradient that differentiation reports for the buffer is what a microbatch's rows have at most, and the
step takes the largest instead of the sum. So microbatches, devices and dispatches all multiply by the same
scales, which no split of a batch changes. That of W follows from W as it is.

B rows, T tokens.
"""

import functools
from collections.abc import Collection
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.typing import DTypeLike

from maxbatch.hardware.sharding import LogicalAxes, constrain, gathered
from maxbatch.models.forms import barrier, is_for_gpu, is_for_tpu, is_turned

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
AMAX = "amax"
"""In parameters: a projection's buffer of the largest magnitudes of x, dy and W."""
_KEPT = 0.5
"""Of what was the largest before, the part that counts after a step without it."""


def scale_of(amax: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns the power of two by which a tensor is multiplied whose largest magnitude this was.

  It then has room for the next to be twice as large. 1 where the magnitude is 0, that is, not yet known, or
  not finite.
  """
  is_known = (amax > 0) & jnp.isfinite(amax)
  room = float(jnp.finfo(dtype).max) / jnp.where(is_known, amax, 1.0)
  exponent = jnp.frexp(room)[1] - 2
  return jnp.where(is_known, jnp.ldexp(jnp.float32(1), exponent), 1.0)


def rounded_to(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns scale · x in a float8 format; what exceeds its range becomes its largest number."""
  limit = float(jnp.finfo(dtype).max)
  return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)


def with_weights(parameters: dict[str, Any], paths: Collection[tuple[str, ...]]) -> dict[str, Any]:
  """Returns a model's parameters with the largest magnitude of every kernel's weights in the buffer beside
  it, (…, 3) of stacked layers; `paths` are those of the buffers."""
  if not paths or isinstance(jax.tree.leaves(parameters)[0], jax.ShapeDtypeStruct):
    return parameters
  flat = cast(dict[tuple[str, ...], jax.Array], flatten_dict(parameters))
  for path in sorted(paths):  # In the same order in all processes, and in the next one.
    lead, kernel = flat[path].ndim - 1, lax.stop_gradient(flat[*path[:-1], "kernel"])
    of_weights = jnp.abs(kernel).max(range(lead, kernel.ndim))
    flat[path] = flat[path].at[..., 2].set(of_weights.astype(jnp.float32))
  return unflatten_dict(flat)


def next_amax(before: jax.Array, of_step: jax.Array) -> jax.Array:
  """Returns a buffer after a step: what the step had, or a part of what was before, if that is larger."""
  return jnp.maximum(of_step, _KEPT * before)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def float8_product(
  x: jax.Array, kernel: jax.Array, amax_3: jax.Array, num_inputs: int, axes: LogicalAxes
) -> jax.Array:
  """Multiplies as `projected`: (B, T, *in) → (B, T, *out), by a kernel as it is stored, of logical `axes`.

  The gradient of `amax_3` is (largest |x|, largest |dy|, 0) of these rows.
  """
  return _forward(x, kernel, amax_3, num_inputs, axes)[0]


def _forward(x, kernel, amax_3, num_inputs, axes):
  scale_x, scale_w = scale_of(amax_3[0], FORWARD), scale_of(amax_3[2], FORWARD)
  x8, amax_x = _rounded(x, scale_x, FORWARD)
  w8, is_first = _weights(kernel, scale_w, axes, x.dtype)
  inputs = range(x.ndim - num_inputs, x.ndim)
  of_kernel = range(1, kernel.ndim) if is_first else range(num_inputs)
  y = _product(x8, w8, inputs, of_kernel, scale_x * scale_w, x.dtype)
  return y, (x8, kernel, amax_3, amax_x)


def _backward(num_inputs, axes, kept, d_y):
  x8, kernel, amax_3, amax_x = kept
  scale_x, scale_w = scale_of(amax_3[0], FORWARD), scale_of(amax_3[2], FORWARD)
  scale_y = scale_of(amax_3[1], BACKWARD)
  d_y8, amax_y = _rounded(d_y, scale_y, BACKWARD)
  w8, is_first = _weights(kernel, scale_w, axes, d_y.dtype)
  lead = x8.ndim - num_inputs
  outputs, tokens = range(lead, d_y.ndim), range(lead)
  of_kernel = range(1) if is_first else range(num_inputs, kernel.ndim)
  d_x = _product(d_y8, w8, outputs, of_kernel, scale_y * scale_w, d_y.dtype)
  d_kernel = _product(x8, d_y8, tokens, tokens, scale_x * scale_y, d_y.dtype)
  # Divided as the kernel is stored.
  d_kernel = constrain(d_kernel, axes).astype(kernel.dtype)
  return d_x, d_kernel, jnp.stack([amax_x, amax_y, jnp.float32(0)])


float8_product.defvjp(_forward, _backward)


def _rounded(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Returns `rounded_to` and the largest magnitude.

  First by column, over tokens, which the TPU's compiler fuses with the rounding: a maximum over all at once
  reads the array a second time.
  """
  columns = jnp.abs(x).max(range(min(2, x.ndim - 1)))
  x8, columns = barrier((rounded_to(x, scale, dtype), columns))
  return x8, columns.max().astype(jnp.float32)


def _weights(
  kernel: jax.Array, scale: jax.Array, axes: LogicalAxes, dtype: DTypeLike
) -> tuple[jax.Array, bool]:
  """Returns the weights in float8, gathered, and whether the output's dim is the first of them.

  Gathered in the format of the computation: the TPU's compiler gathers float8 by an all-reduce.
  """
  if is_turned(axes, kernel.shape):
    *others, last = axes
    moved = jnp.moveaxis(kernel.astype(dtype), -1, 0)
    return rounded_to(gathered(moved, (last, *others)), scale, FORWARD), True
  return rounded_to(gathered(kernel.astype(dtype), axes), scale, FORWARD), False


def _product(
  a: jax.Array, b: jax.Array, of_a: range, of_b: range, scale: jax.Array, dtype: DTypeLike
) -> jax.Array:
  """Contracts dims of float8 arrays, with sums in float32, divided by the scale of both.

  Rounded to the computation's format first, in which devices exchange partial sums: a power of two changes
  no digit.
  """
  if not (is_for_tpu() or is_for_gpu()):
    # A CPU has no such products: those of float32 are the same.
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  dims = (tuple(of_a), tuple(of_b)), ((), ())
  return lax.dot_general(a, b, dims, preferred_element_type=dtype) * (1 / scale).astype(dtype)
