"""The small parts of a transformer: projections, norms, the feed-forward layer.

B rows, T tokens, D width of the residual stream, F width of the feed-forward layer.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.schema import ModelConfig
from maxbatch.hardware.sharding import LogicalAxes, constrain, gathered
from maxbatch.models.probes import Probe, for_each_row, probe, probe_values, product


class Parameter(nnx.Param):
  """A parameter that knows the logical axes of its dimensions."""

  def ready(self, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The value in the precision of the computation, gathered from where it is stored."""
    return gathered(self[...].astype(dtype), self.axes)

  @property
  def axes(self) -> LogicalAxes:
    """The logical axes of its dimensions, without that of stacked layers."""
    return self.get_metadata()["axes"]


def parameter(
  rngs: nnx.Rngs, std: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: str
) -> Parameter:
  """A normally distributed parameter, kept in `dtype`."""
  return Parameter(std * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


def _constant(
  value: float, shape: tuple[int, ...], axes: LogicalAxes, config: ModelConfig
) -> Parameter:
  return Parameter(jnp.full(shape, value, config.weight_dtype), axes=axes)


class Projection(nnx.Module):
  """A linear map from the last `len(in_shape)` dimensions to `out_shape`.

  Applied as one product of matrices, rows flattened: XLA's CPU backend then forms the weight
  gradient as a plain matrix product too, which is 1.5 times as fast as contracting (B, T).
  """

  def __init__(
    self,
    rngs: nnx.Rngs,
    config: ModelConfig,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    axes: LogicalAxes,
    *,
    bias: bool,
    scale: float = 1.0,
  ):
    std = scale / math.sqrt(math.prod(in_shape))
    self.kernel = parameter(rngs, std, (*in_shape, *out_shape), axes, config.weight_dtype)
    out_axes = axes[len(in_shape) :]
    self.bias = _constant(0.0, out_shape, out_axes, config) if bias else None
    self.in_shape, self.out_shape = in_shape, out_shape
    self.probe: Probe | None = probe("kernel", "bias")

  def __call__(self, x: jax.Array) -> jax.Array:
    """(B, T, *in_shape) → (B, T, *out_shape), in x's dtype."""
    batch_dims = x.shape[: x.ndim - len(self.in_shape)]
    matrix = self.kernel.ready(x.dtype).reshape(math.prod(self.in_shape), -1)
    rows, probe = x.reshape(*batch_dims, matrix.shape[0]), probe_values(self.probe)
    if probe is None:
      y = rows.reshape(-1, matrix.shape[0]) @ matrix
    else:
      y = product(rows, matrix, probe, self.kernel.shape, self.kernel.axes)
    y = y.reshape(*batch_dims, *self.out_shape)
    return y if self.bias is None else y + _over_rows(self.bias, probe, y)


class Norm(nnx.Module):
  """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) of the last dims, in float32."""

  def __init__(self, config: ModelConfig, shape: tuple[int, ...], axes: LogicalAxes):
    """Of the last dims, as many as `shape` has, together."""
    centred = config.normalization == "layernorm"
    # Gemma's scale is kept as what it adds to one: weight decay then draws it to one.
    self.offset = 1.0 if config.normalization == "zero_centered_rmsnorm" else 0.0
    self.scale = _constant(1.0 - self.offset, shape, axes, config)
    self.bias = _constant(0.0, shape, axes, config) if centred else None
    self.dims = tuple(range(-len(shape), 0))
    self.probe: Probe | None = probe("scale", "bias")
    self.epsilon = config.normalization_layer_epsilon

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    """Same shape and dtype as x."""
    y, probe = x.astype(jnp.float32), probe_values(self.probe)
    if self.bias is not None:
      y = y - y.mean(self.dims, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(self.dims, keepdims=True) + self.epsilon)
    scale = _over_rows(self.scale, probe, y)
    y = y * (scale + self.offset if self.offset else scale)
    if self.bias is not None:
      y = y + _over_rows(self.bias, probe, y)
    return y.astype(x.dtype)


def _over_rows(parameter: Parameter, probe_BS: jax.Array | None, y: jax.Array) -> jax.Array:
  """A parameter of y's last dims, ready to be combined with y (B, T, …) in its dtype."""
  value = parameter.ready(y.dtype)
  if probe_BS is None:
    return value.reshape((1,) * (y.ndim - value.ndim) + value.shape)
  rows = for_each_row(value, probe_BS, parameter.axes)
  return rows.reshape(rows.shape[0], *(1,) * (y.ndim - rows.ndim), *value.shape)


class FeedForward(nnx.Module):
  """GELU in two matrices (GPT-2), or SwiGLU or GeGLU in three (Shazeer 2020)."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, residual_scale: float):
    D, F, bias = config.base_emb_dim, config.base_mlp_dim, config.mlp_bias
    up = ("embed", "mlp")
    gated = config.mlp_activation != "gelu"
    self.is_silu = config.mlp_activation == "swiglu"
    self.gate = Projection(rngs, config, (D,), (F,), up, bias=bias) if gated else None
    self.up = Projection(rngs, config, (D,), (F,), up, bias=bias)
    self.down = Projection(
      rngs, config, (F,), (D,), ("mlp", "embed"), bias=bias, scale=residual_scale
    )

  @jax.named_scope("mlp")
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """(B, T, D) → (B, T, D)."""
    h_BTF = self.up(x_BTD)
    if self.gate is None:
      h_BTF = _gelu(h_BTF)
    else:
      h_BTF = (jax.nn.silu if self.is_silu else _gelu)(self.gate(x_BTD)) * h_BTF
    return self.down(constrain(h_BTF, ("batch", "length", "mlp")))


def _gelu(x: jax.Array) -> jax.Array:
  """GELU by tanh, as in GPT-2 and Gemma."""
  return jax.nn.gelu(x, approximate=True)
