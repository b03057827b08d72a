"""Products in int8: of activations and weights in training, by weights alone in sampling.

In training a projection multiplies x·W forward and dy·Wᵀ backward in int8, as MaxText's does (AQT). Each
token's x, or dy, and each output's weights are divided by a scale, its largest magnitude / 127, rounded to whole
numbers, and multiplied with sums in int32: x·W ≈ (x₈·W₈)·sx·sw, and dy·Wᵀ ≈ ((dy·sw)₈·W₈ᵀ)·sy. No scale depends
on another token, so training is the same however a batch is split. The weight gradient is a sum over tokens,
which could only have scales of several: it stays in the format of the computation.

In sampling weights alone are whole numbers, as in LLM.int8() (Dettmers et al. 2022,
arxiv.org/abs/2208.07339): x·W = (x·W₈)·sw. They take half of bfloat16's bytes, which each new token reads
once.

B rows, T tokens, N heads, H width of a head, or of all of a token; M tokens of a block.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.hardware.shard_maps import of_own_tokens
from maxbatch.hardware.sharding import LogicalAxes, auto_axis_sizes, constrain, gathered
from maxbatch.models.forms import barrier, is_for_gpu, is_for_tpu, is_turned, projected
from maxbatch.models.probes import measured_gradient

KERNEL, SCALE = "kernel", "int8_scale"
"""In parameters: a projection's weights, and what those in int8 are multiplied by."""
_LARGEST = 127
_TOKENS, _BLOCK = (256, 128, 64, 32), 2**20
"""Of a kernel's block, and how many numbers it may have."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 4))
def int8_product(
  x: jax.Array, kernel: jax.Array, num_inputs: int, probe_BS: jax.Array | None, axes: LogicalAxes
) -> jax.Array:
  """Multiplies as `projected`: (B, T, *in) → (B, T, *out), by a kernel of logical `axes`, not gathered yet.

  A probe measures it as it does `probes.product`.
  """
  return _forward(x, kernel, num_inputs, probe_BS, axes)[0]


def _forward(x, kernel, num_inputs, probe_BS, axes):
  inputs = range(x.ndim - num_inputs, x.ndim)
  x8, scale_x = _by_token(x, inputs)
  w8, scale_w, is_first = _weights(kernel, num_inputs, axes)
  y = _whole_product(x8, w8, inputs, range(1, w8.ndim) if is_first else range(num_inputs))
  y = y * _of_tokens(scale_x, y.ndim) * _of_outputs(scale_w, y.ndim)
  return y.astype(x.dtype), (x, kernel, probe_BS)


def _backward(num_inputs, axes, kept, d_y):
  x, kernel, probe_BS = kept
  outputs = range(x.ndim - num_inputs, d_y.ndim)
  w8, scale_w, is_first = _weights(kernel, num_inputs, axes)
  d_y8, scale_y = _by_token(d_y, outputs, scale_w)
  of_kernel = range(1) if is_first else range(num_inputs, kernel.ndim)
  d_x = _whole_product(d_y8, w8, outputs, of_kernel) * _of_tokens(scale_y, x.ndim)
  if probe_BS is not None:
    d_kernel, squares_BS = measured_gradient(x, d_y, kernel, num_inputs, probe_BS, axes)
    return d_x.astype(x.dtype), d_kernel, squares_BS
  (d_kernel,) = jax.linear_transpose(lambda w: projected(x, w, num_inputs), kernel)(d_y)
  # Divided as the kernel is stored.
  return d_x.astype(x.dtype), constrain(d_kernel, axes), None


int8_product.defvjp(_forward, _backward)


def _of_tokens(scale_BT: jax.Array, ndim: int) -> jax.Array:
  """Returns scales of tokens for an array (B, T, …) with that many dims."""
  return scale_BT.reshape(scale_BT.shape + (1,) * (ndim - scale_BT.ndim))


def _of_outputs(scale: jax.Array, ndim: int) -> jax.Array:
  """Returns scales (*out) for an array (…, *out) with that many dims."""
  return jnp.expand_dims(scale, range(ndim - scale.ndim))


def _scale(x: jax.Array, dims: Sequence[int]) -> jax.Array:
  """Returns the scales that numbers along `dims` share, with 1 for these."""
  largest = jnp.abs(x).max(dims, keepdims=True).astype(jnp.float32)
  # Zeros stay zeros, whatever their scale; what is not finite makes a scale that is not, and so a product.
  return jnp.where(largest == 0, 1.0, largest / _LARGEST)


def _whole(x: jax.Array, scale: jax.Array) -> jax.Array:
  return jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8)


def _rounded(x: jax.Array, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
  """Returns whole numbers and scales, which those along `dims` share: x ≈ numbers · scales."""
  scale = _scale(x, dims)
  return _whole(x, scale), scale.squeeze(dims)


def _by_token(
  x: jax.Array, dims: Sequence[int], factor: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns x, times a factor for each number along `dims` if there is one, as whole numbers and the scales
  of tokens (B, T)."""
  factors = [] if factor is None else [factor]
  # A kernel cannot have the maximum of what devices divide, nor more of a token than a block holds.
  fits = _TOKENS[-1] * math.prod(x.shape[dim] for dim in dims) <= _BLOCK
  if fits and is_for_tpu() and auto_axis_sizes()["tensor"] == 1:
    numbers, scale = of_own_tokens(rounded_tokens, x, *factors)
    return numbers, scale
  for each in factors:
    x = x.astype(jnp.float32) * _of_outputs(each, x.ndim)
  return barrier(_rounded(x, dims))


@functools.partial(jax.jit, static_argnames="interpret")
def rounded_tokens(
  x: jax.Array, factor: jax.Array | None = None, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Computes `_rounded` of (B, T, H) or (B, T, N, H), times a factor for each of a token's numbers, in a kernel.

  It reads x once; the compiler reads it for the maximum, and again to round it. Under jit, queries, keys and
  values share a kernel of the same x.
  """
  # Imported where a kernel is traced: no start without one waits for it.
  from jax.experimental import pallas as pl

  # Heads before tokens, as attention's kernels have them.
  has_heads = x.ndim > 3
  x_BNTH = jnp.swapaxes(x, 1, 2) if has_heads else x[:, None]
  B, N, T, H = x_BNTH.shape
  M = min(T, next((tokens for tokens in _TOKENS if tokens * N * H <= _BLOCK), _TOKENS[-1]))
  factors = [] if factor is None else [factor.reshape(N, 1, H)]

  def kernel(x_NMH: Any, *others: Any) -> None:
    *given, numbers_NMH, scale_M1 = others
    values = x_NMH[...].astype(jnp.float32)
    for factor_N1H in given:
      values = values * factor_N1H[...]
    numbers, scale = _rounded(values, (0, 2))
    numbers_NMH[...] = numbers
    scale_M1[...] = scale[:, None]

  block = pl.BlockSpec((None, N, M, H), lambda b, i: (b, 0, i, 0))
  numbers, scale = pl.pallas_call(
    kernel,
    name="rounded_tokens",
    grid=(B, pl.cdiv(T, M)),
    in_specs=[block, *(pl.BlockSpec((N, 1, H), lambda b, i: (0, 0, 0)) for _ in factors)],
    out_specs=[block, pl.BlockSpec((None, M, 1), lambda b, i: (b, i, 0))],
    out_shape=[
      jax.ShapeDtypeStruct(x_BNTH.shape, jnp.int8),
      jax.ShapeDtypeStruct((B, T, 1), jnp.float32),
    ],
    # What it reads, and writes: a whole number for each of x, and a scale for each token.
    cost_estimate=pl.CostEstimate(
      flops=0, transcendentals=0, bytes_accessed=x.size * (x.dtype.itemsize + 1) + 4 * B * T
    ),
    interpret=interpret,
  )(x_BNTH, *factors)
  return jnp.swapaxes(numbers, 1, 2) if has_heads else numbers[:, 0], scale[..., 0]


def _weights(
  kernel: jax.Array, num_inputs: int, axes: LogicalAxes
) -> tuple[jax.Array, jax.Array, bool]:
  """Returns weights as whole numbers, gathered, scales (*out), and whether the output's dim is the first of
  the numbers'.

  Gathered as whole numbers, but for those of heads, which the TPU's compiler would gather by an all-reduce.
  """
  if kernel.ndim == 2:
    # Else the compiler gathers them in the format they come from.
    w8, scale = barrier(_rounded(kernel, (0,)))
    return gathered(w8, axes), scale, False
  inputs = tuple(range(num_inputs))
  scale = _scale(kernel, inputs)
  if not is_turned(axes, kernel.shape):
    return barrier(_whole(gathered(kernel, axes), scale)), scale.squeeze(inputs), False
  *others, last = axes
  turned = gathered(jnp.moveaxis(kernel, -1, 0), (last, *others))
  return barrier(_whole(turned, jnp.moveaxis(scale, -1, 0))), scale.squeeze(inputs), True


def _whole_product(
  a: jax.Array, b: jax.Array, of_a: Sequence[int], of_b: Sequence[int]
) -> jax.Array:
  """Contracts dims of arrays of int8; float32."""
  dims = (tuple(of_a), tuple(of_b)), ((), ())
  if is_for_tpu() or is_for_gpu():
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.int32).astype(jnp.float32)
  # A CPU multiplies float32 faster.
  return lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), dims)


def in_int8(kernel: jax.Array, num_outputs: int, num_layers: int) -> dict[str, jax.Array]:
  """Returns a kernel (*layers, *in, *out) as whole numbers, and scales (*layers, *out) in float32.

  Args:
    kernel: as it is trained.
    num_outputs: dims of the outputs.
    num_layers: dims of stacked layers.
  """
  numbers, scale = _rounded(kernel, tuple(range(num_layers, kernel.ndim - num_outputs)))
  return {KERNEL: numbers, SCALE: scale}


def by_int8_weights(
  x: jax.Array, kernel: jax.Array, scale: jax.Array, num_inputs: int, axes: LogicalAxes
) -> jax.Array:
  """Multiplies as `projected`: (B, T, *in) → (B, T, *out), by whole numbers (*in, *out) of logical `axes`
  and scales (*out)."""
  y = projected(x, gathered(kernel, axes).astype(x.dtype), num_inputs)
  return y * _of_outputs(scale.astype(x.dtype), y.ndim)
