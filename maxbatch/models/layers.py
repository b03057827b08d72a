"""The small parts of a transformer: projections, norms, the feed-forward layer, and what they return.

A layer, or a model, returns hidden states, alone or with what it adds to the step (`Outputs`): a
balance loss is a term, a router's counts are a statistic (core/terms.py). Both are sums over the rows
that it is called with; the step adds them up and divides once.

B rows, T tokens, D width of the residual stream, F width of the feed-forward layer.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxbatch.config.schema import ModelConfig
from maxbatch.core.terms import Ratio, Stat, Stats, Terms, map_stats
from maxbatch.data.rows import in_order
from maxbatch.hardware.compiler_flags import writes_operands
from maxbatch.hardware.sharding import LogicalAxes, constrain, gathered
from maxbatch.models.float8 import float8_product
from maxbatch.models.forms import (
  barrier,
  barrier_gradients,
  gelu,
  is_turned,
  projected,
  turned_product,
)
from maxbatch.models.int8 import by_int8_weights, int8_product
from maxbatch.models.probes import Probe, for_each_row, given_out, probe, probe_values, product
from maxbatch.models.remat import named
from maxbatch.precision.policy import PLAIN, Policy

_WIDE = 3072
"""Width from which a TPU's step takes less time if what products of the MLP share is written before them: 3% of Llama-3-8B
(4096) on a v6e for the norm alone. With 2304 or less each of these products has few blocks of columns, and GPT-2 (768),
keeping all, took 7% longer."""


class Outputs(NamedTuple):
  """Hidden states with terms and statistics; where there are none, the array alone will do."""

  hidden_BTD: jax.Array
  terms: Terms | None = None
  stats: Stats | None = None


def with_sums(hidden_BTD: jax.Array, terms: Terms, stats: Stats) -> jax.Array | Outputs:
  """Returns hidden states, alone where nothing is handed out beside them."""
  return Outputs(hidden_BTD, terms, stats) if terms or stats else hidden_BTD


def outputs_of(result: jax.Array | Outputs) -> tuple[jax.Array, Terms, Stats]:
  """Returns hidden states, terms and statistics of what a model or a layer returned."""
  hidden_BTD, terms, stats = result if isinstance(result, Outputs) else Outputs(result)
  return hidden_BTD, terms or {}, stats or {}


def hidden_of(result: jax.Array | Outputs) -> jax.Array:
  """Returns the hidden states (B, T, D) alone, where nothing is minimized."""
  return outputs_of(result)[0]


def whole_sums(terms: Terms, stats: Stats) -> tuple[dict[str, Ratio], dict[str, Stat]]:
  """Returns terms as scalars, and all sums of floats in float32, by name."""

  def in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

  def of_term(term: Ratio) -> Ratio:
    numerator, denominator = (in_float32(x.sum()) for x in (term.numerator, term.denominator))
    return Ratio(numerator, denominator, term.coefficient)

  return (
    {name: of_term(term) for name, term in sorted(terms.items())},
    {name: map_stats(in_float32, lambda x: x, stat) for name, stat in sorted(stats.items())},
  )


def over_layers(stacked: tuple[Terms, Stats]) -> tuple[Terms, Stats]:
  """Returns terms and statistics of all layers, (L, …) each, joined by their own rules."""
  return map_stats(lambda x: x.sum(0), lambda x: x.max(0), stacked)


class Parameter(nnx.Param):
  """A parameter that knows the logical axes of its dimensions."""

  def ready(self, policy: Policy) -> jax.Array:
    """Returns the value in the format of the computation, gathered from where it is stored."""
    return gathered(policy.cast(self[...]), self.axes)

  def turned(self, policy: Policy) -> jax.Array:
    """Returns it likewise, with the last dim first."""
    *others, last = self.axes
    return gathered(jnp.moveaxis(policy.cast(self[...]), -1, 0), (last, *others))

  @property
  def axes(self) -> LogicalAxes:
    """The logical axes of its dimensions, without that of stacked layers."""
    return self.get_metadata()["axes"]


class Buffer(Parameter):
  """An array of a model, float32, that the step writes and no optimizer: it has no gradient."""


def buffer(value: float, shape: tuple[int, ...], axes: LogicalAxes) -> Buffer:
  """Returns a constant one."""
  return Buffer(jnp.full(shape, value, jnp.float32), axes=axes)


def parameter(rngs: nnx.Rngs, std: float, shape: tuple[int, ...], axes: LogicalAxes) -> Parameter:
  """Returns a normally distributed parameter; `build_model` gives it its stored dtype."""
  return Parameter(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def uniform(rngs: nnx.Rngs, bound: float, shape: tuple[int, ...]) -> jax.Array:
  """Returns random numbers between −bound and bound."""
  return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)


def constant(value: float, shape: tuple[int, ...], axes: LogicalAxes) -> Parameter:
  """Returns a parameter that is the same everywhere at first."""
  return Parameter(jnp.full(shape, value, jnp.float32), axes=axes)


class Projection(nnx.Module):
  """A linear map from the last `len(in_shape)` dimensions to `out_shape`."""

  lora_a: Parameter | None = None
  lora_b: Parameter | None = None
  """An adapter beside the kernel, see `add_adapter`."""
  lora_scale = 0.0
  saved_as = ""
  """The name by which a remat_policy can keep what it gives."""
  policy: Policy = PLAIN
  exponents: Probe | None = None
  amax: Buffer | None = None
  """Of products in float8 what their scales follow from."""
  int8_scale: Buffer | None = None
  """Of a kernel in int8, by which its outputs are multiplied."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    axes: LogicalAxes,
    *,
    bias: bool,
    scale: float = 1.0,
  ):
    std = scale / math.sqrt(math.prod(in_shape))
    self.kernel = parameter(rngs, std, (*in_shape, *out_shape), axes)
    out_axes = axes[len(in_shape) :]
    self.bias = constant(0.0, out_shape, out_axes) if bias else None
    self.in_shape, self.out_shape = in_shape, out_shape
    self.probe: Probe | None = probe("kernel", "bias", "lora_a", "lora_b")

  def __call__(self, x: jax.Array) -> jax.Array:
    """Projects: (B, T, *in_shape) → (B, T, *out_shape)."""
    y = self._multiplied(x, "kernel", self.kernel, len(self.in_shape))
    if self.lora_a is not None and self.lora_b is not None:
      low = self._multiplied(x, "lora_a", self.lora_a, len(self.in_shape))
      y = y + self.lora_scale * self._multiplied(low, "lora_b", self.lora_b, 1)
    if self.bias is not None:
      y = y + over_rows_of(self.bias, self.policy, probe_values(self.probe, "bias"), y.ndim)
    y = given_out(y, self.policy, self.exponents)
    return named(y, self.saved_as) if self.saved_as else y

  @property
  def largest_rank(self) -> int:
    """The rank that the matrix can have."""
    return min(math.prod(self.in_shape), math.prod(self.out_shape))

  def add_adapter(self, rngs: nnx.Rngs, rank: int, scale: float) -> None:
    """Adds LoRA's matrices beside the kernel (Hu et al. 2021): x·W + scale · x·A·B.

    B is zero, so that nothing changes at first; A is uniform as peft's is. They are float32 whatever
    the kernel is. In stacked layers, as a whole, they are stacked too.
    """
    ins, axes = len(self.in_shape), self.kernel.axes
    layers = self.kernel.shape[: self.kernel.ndim - len(axes)]
    shape_a, shape_b = (*layers, *self.in_shape, rank), (*layers, rank, *self.out_shape)
    bound = 1 / math.sqrt(math.prod(self.in_shape))
    self.lora_a = Parameter(uniform(rngs, bound, shape_a), axes=(*axes[:ins], None))
    self.lora_b = Parameter(jnp.zeros(shape_b, jnp.float32), axes=(None, *axes[ins:]))
    self.lora_scale = scale

  def quantize(self) -> None:
    """Adds the buffer that products in eight bits need by the policy; in stacked layers, as a whole, one for
    each. A kernel in int8 then waits for its values, see models/int8.py."""
    axes = self.kernel.axes
    layers = self.kernel.shape[: self.kernel.ndim - len(axes)]
    if self.policy.float8:
      self.amax = buffer(0.0, (*layers, 3), (None,))
    if self.policy.int8_weights:
      self.kernel.set_value(self.kernel[...].astype(jnp.int8))
      self.int8_scale = buffer(1.0, (*layers, *self.out_shape), axes[len(self.in_shape) :])

  def _multiplied(
    self, x: jax.Array, name: str, parameter: Parameter, num_inputs: int
  ) -> jax.Array:
    """Multiplies x by the parameter of that name, whose first dims are the last of x."""
    axes = parameter.axes
    if self.amax is not None and name == "kernel":
      return float8_product(x, parameter[...], self.amax[...], num_inputs, axes)
    if self.int8_scale is not None and name == "kernel":
      return by_int8_weights(x, parameter[...], self.int8_scale[...], num_inputs, axes)
    probe = probe_values(self.probe, name)
    if self.policy.int8 and name == "kernel":
      return int8_product(x, self.policy.cast(parameter[...]), num_inputs, probe, axes)
    if probe is not None:
      return product(x, parameter.ready(self.policy), num_inputs, probe, axes)
    if is_turned(axes, parameter.shape):
      return turned_product(x, parameter.turned(self.policy))
    return projected(x, parameter.ready(self.policy), num_inputs)


class Matrix(nnx.Module):
  """A matrix (…, inputs, outputs) for each expert, or one for all."""

  lora_a: Parameter | None = None
  lora_b: Parameter | None = None
  lora_scale = 0.0
  bias: Parameter | None = None

  def __init__(
    self,
    rngs: nnx.Rngs,
    std: float,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    *,
    bias: bool = False,
  ):
    self.kernel = parameter(rngs, std, shape, axes)
    if bias:
      self.bias = constant(0.0, (*shape[:-2], shape[-1]), (*axes[:-2], axes[-1]))

  @property
  def largest_rank(self) -> int:
    """The rank that a matrix can have."""
    return min(self.kernel.shape[-2:])

  def add_adapter(self, rngs: nnx.Rngs, rank: int, scale: float) -> None:
    """Adds LoRA's matrices beside each, as `Projection.add_adapter` does."""
    *lead, inputs, outputs = self.kernel.shape
    *names, of_inputs, of_outputs = self.kernel.axes
    drawn = uniform(rngs, 1 / math.sqrt(inputs), (*lead, inputs, rank))
    self.lora_a = Parameter(drawn, axes=(*names, of_inputs, None))
    zeros = jnp.zeros((*lead, rank, outputs), jnp.float32)
    self.lora_b = Parameter(zeros, axes=(*names, None, of_outputs))
    self.lora_scale = scale


class Norm(nnx.Module):
  """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) of the last dims, in float32."""

  policy: Policy = PLAIN
  exponents: Probe | None = None

  def __init__(self, config: ModelConfig, shape: tuple[int, ...], axes: LogicalAxes):
    """Normalizes as many of the last dims as `shape` has, together."""
    centred = config.normalization == "layernorm"
    # Gemma's scale is kept as what it adds to one: weight decay then draws it to one.
    self.offset = 1.0 if config.normalization == "zero_centered_rmsnorm" else 0.0
    self.scale = constant(1.0 - self.offset, shape, axes)
    self.bias = constant(0.0, shape, axes) if centred else None
    self.dims = tuple(range(-len(shape), 0))
    self.probe: Probe | None = probe("scale", "bias")
    self.epsilon = config.normalization_layer_epsilon

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalizes; the shape stays."""
    y = x.astype(jnp.float32)
    if self.bias is not None:
      y = y - y.mean(self.dims, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(self.dims, keepdims=True) + self.epsilon)
    scale = over_rows_of(self.scale, PLAIN, probe_values(self.probe, "scale"), y.ndim)
    y = y * (scale + self.offset if self.offset else scale)
    if self.bias is not None:
      y = y + over_rows_of(self.bias, PLAIN, probe_values(self.probe, "bias"), y.ndim)
    return given_out(y, self.policy, self.exponents)


def over_rows_of(
  parameter: Parameter, policy: Policy, probe_BS: jax.Array | None, ndim: int
) -> jax.Array:
  """Returns a parameter of the last dims of an array (B, T, …), ready to be combined with it."""
  value = parameter.ready(policy)
  if probe_BS is None:
    return value.reshape((1,) * (ndim - value.ndim) + value.shape)
  rows: jax.Array = for_each_row(value, probe_BS, parameter.axes)
  return rows.reshape(rows.shape[0], *(1,) * (ndim - rows.ndim), *value.shape)


class FeedForward(nnx.Module):
  """GELU in two matrices (GPT-2), or a gate in three."""

  policy: Policy = PLAIN

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, residual_scale: float):
    D, F, bias = config.base_emb_dim, config.base_mlp_dim, config.mlp_bias
    up = ("embed", "mlp")
    gated = config.mlp_activation != "gelu"
    self.gate = Projection(rngs, (D,), (F,), up, bias=bias) if gated else None
    self.up = Projection(rngs, (D,), (F,), up, bias=bias)
    self.down = Projection(rngs, (F,), (D,), ("mlp", "embed"), bias=bias, scale=residual_scale)
    self.config = config
    self.up.saved_as, self.down.saved_as = "mlpwi_1" if gated else "mlpwi", "mlpwo"
    if self.gate is not None:
      self.gate.saved_as = "mlpwi_0"

  @jax.named_scope("mlp")
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Applies the layer: (B, T, D) → (B, T, D)."""
    if self.policy.float8:
      return self._in_float8(x_BTD)
    is_wide = x_BTD.shape[-1] >= _WIDE
    if is_wide:
      # Else the sums of the norm's gradient are formed while the products that give it are.
      x_BTD = barrier(x_BTD) if writes_operands.value else barrier_gradients(x_BTD)
    if self.gate is None:
      # Else a GPU forms GELU's gradient a second time for the sum that is the bias's.
      h_BTF = gelu(barrier_gradients(self.up(x_BTD), on_gpu=True))
    else:
      up_BTF, gate_BTF = barrier_gradients((self.up(x_BTD), self.gate(x_BTD)))
      h_BTF = gated_product(self.config, gate_BTF, up_BTF)
    h_BTF = self.policy.cast(h_BTF)
    h_BTF = barrier(h_BTF) if is_wide else h_BTF
    return self.down(constrain(h_BTF, ("batch", "length", "mlp")))

  def _in_float8(self, x_BTD: jax.Array) -> jax.Array:
    """Applies the layer without barriers: what is written is the rounded operand of a product."""
    up_BTF = self.up(x_BTD)
    h_BTF = (
      gelu(up_BTF) if self.gate is None else gated_product(self.config, self.gate(x_BTD), up_BTF)
    )
    return self.down(constrain(self.policy.cast(h_BTF), ("batch", "length", "mlp")))


def gated_product(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns SwiGLU or GeGLU (Shazeer 2020) of two products, or gpt-oss's clamped SwiGLU."""
  if config.mlp_activation == "clamped_swiglu":
    limit = config.mlp_activations_limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(config.swiglu_alpha * gate) * (up + 1)
  return (jax.nn.silu if config.mlp_activation == "swiglu" else gelu)(gate) * up


def fold(keys_B: jax.Array | None, number: jax.Array | int) -> jax.Array | None:
  """Returns the rows' keys for one layer, or one place in a layer; None stays None (no dropout)."""
  if keys_B is None:
    return None
  return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)


def dropout(
  x_BTD: jax.Array, rate: float, keys_B: jax.Array | None, places_T: np.ndarray | None = None
) -> jax.Array:
  """Zeroes a share `rate` of the activations of each row and scales up the rest.

  Without keys (evaluation) or at rate 0 the activations pass unchanged. Masks belong to the sample,
  by keys of (seed, sample, layer, place in the layer), however the batch is split. Of tokens in another
  order, with their places in the row, they are those of the whole row, on each device that shares it.
  """
  if keys_B is None or rate == 0.0:
    return x_BTD
  keep_BTD = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x_BTD.shape[1:]))(keys_B)
  if places_T is not None:
    keep_BTD = in_order(constrain(keep_BTD, ("batch", None, "activation_embed")), places_T)
  return jnp.where(keep_BTD, x_BTD / (1.0 - rate), jnp.zeros_like(x_BTD))
