"""Squared norms of every row's own gradient, out of the backward pass that runs anyway.

B rows, T tokens, K inputs and L outputs of a projection, D width, S devices along tensor.

A layer may carry a probe: zeros (B, S) that its result does not depend on. What differentiation
reports as the probe's gradient is, for each row b, ‖∂loss/∂parameters through row b alone‖², the
quantity from which the gradient noise scale is estimated. The gradient of the sum of all rows is
formed from the same pieces: nothing is computed twice, and no gradient of a row is kept.

The gradient of a vector by row is what autodiff sums anyway. That of a matrix is xᵀ·dy, formed row
by row as the weight gradient is summed up ("simultaneous", Gray et al. 2024), or, for rows so short
that it is cheaper, its norm by ⟨x·xᵀ, dy·dyᵀ⟩ ("ghost", Li et al. 2022).

Another kind of probe, [2, N], gets as its gradient the histograms of the exponents of what a module
gives, and of the gradient of that, in N bins.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.errors import UserError
from maxbatch.hardware.shard_maps import (
  all_tokens,
  sum_over_rows,
  summed_part,
  sums_of_rows,
  tokens_by_width,
)
from maxbatch.hardware.sharding import (
  LOGICAL_AXIS_RULES,
  LogicalAxes,
  constrain,
)
from maxbatch.models.forms import projected, weight_gradient
from maxbatch.precision.policy import Policy

NUM_BINS = 256
"""By a float32's exponent as it is stored: bin 127 + e counts magnitudes in [2^e, 2^(e+1)), the first
one zeros, the last one what is not finite."""
EXPONENT_KINDS = 2
"""Kinds of values in a module's probe: its output, and the gradients of that."""


class Probe(nnx.Variable):
  """A probe; a scalar, in stacked layers one per layer, while nothing is measured.

  Its metadata `of` names the parameters beside it that it measures, `frozen` those that it would
  measure if they trained.
  """


def probe(*names: str) -> Probe:
  """Returns a probe of the module's parameters `names`, nothing measured yet."""
  return Probe(jnp.zeros(()), of=names, frozen=())


def probe_of(probe: Probe, trained: Sequence[str], frozen: Sequence[str]) -> Probe:
  """Returns the probe, of those of its parameters that train."""
  return Probe(probe[...], of=tuple(trained), frozen=tuple(frozen))


def probe_values(probe: Probe | None, name: str = "") -> jax.Array | None:
  """Returns the zeros (B, S) by which the loss is differentiated; None where nothing is measured.

  `name` is that of the parameter that is measured; empty where the probe has one alone, or a module
  measures all of its parameters at once.

  Raises:
    UserError: some of a module's parameters are frozen, and it measures all of them at once.
  """
  if probe is None or probe[...].ndim < 2:
    return None
  known = probe.get_metadata()
  if not name and known["frozen"]:
    raise UserError(
      f"trainable: of a module that measures all of its parameters with one probe, "
      f"{', '.join(known['frozen'])} are frozen and {', '.join(known['of'])} are not; let all of "
      "them train or none, or set gns=off"
    )
  return probe[...] if not name or name in known["of"] else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def for_each_row(parameter: jax.Array, probe_BS: jax.Array, axes: LogicalAxes) -> jax.Array:
  """Returns a copy of a small parameter for every row: (…) → (B, …)."""
  copies = jnp.broadcast_to(parameter, (probe_BS.shape[0], *parameter.shape))
  used = tuple(None if axis == "embed" else axis for axis in axes)
  return constrain(copies, ("batch", *used))


for_each_row.defvjp(
  lambda parameter, probe_BS, axes: (for_each_row(parameter, probe_BS, axes), probe_BS),
  lambda axes, probe_BS, d: (d.sum(0), row_squares(d, axes, probe_BS.shape[1])),
)


@jax.custom_vjp
def looked_up(x_BTD: jax.Array, ids_BT: jax.Array, probe_BS: jax.Array) -> jax.Array:
  """Returns `x_BTD` unchanged, of which x[b, t] was taken from row ids[b, t] of a table."""
  del ids_BT, probe_BS
  return x_BTD


def _looked_up_backward(kept, d_BTD):
  ids_BT, probe_BS = kept

  def of_rows(ids_BT, d_BTD):
    return jax.vmap(_table_square)(all_tokens(ids_BT), tokens_by_width(d_BTD))

  squares_B = sums_of_rows(of_rows, ids_BT, d_BTD)
  return d_BTD, None, _first_shard(squares_B, probe_BS.shape[1])


looked_up.defvjp(lambda x_BTD, ids_BT, probe_BS: (x_BTD, (ids_BT, probe_BS)), _looked_up_backward)


class TiedProbe(NamedTuple):
  """The probe of an output matrix that is the embedding's table too.

  Its gradient by row b is E + H, of the lookup and of the head; ‖E + H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩. The head
  squares H and gives `cross_BTD` as gradient what H has at the row's tokens; the lookup's backward pass,
  which comes after it, has the rest (`looked_up_tied`).
  """

  probe_BS: jax.Array
  ids_BT: jax.Array | None
  """Tokens that the row looked up; integers have no gradient."""
  cross_BTD: jax.Array
  """float32 zeros."""


@jax.custom_vjp
def looked_up_tied(
  x_BTD: jax.Array, ids_BT: jax.Array, probe_BS: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns `x_BTD` as `looked_up` does, and the zeros of a `TiedProbe`."""
  del ids_BT, probe_BS
  return x_BTD, jnp.zeros(x_BTD.shape, jnp.float32)


def _looked_up_tied_backward(kept, gradients):
  d_BTD, of_head_BTD = gradients
  *_, squares_BS = _looked_up_backward(kept, d_BTD)
  cross_B = (d_BTD.astype(jnp.float32) * of_head_BTD).sum((1, 2))
  return d_BTD, None, squares_BS + _first_shard(2 * cross_B, squares_BS.shape[1])


looked_up_tied.defvjp(
  lambda x_BTD, ids_BT, probe_BS: (looked_up_tied(x_BTD, ids_BT, probe_BS), (ids_BT, probe_BS)),
  _looked_up_tied_backward,
)


def _table_square(ids_T: jax.Array, d_TD: jax.Array) -> jax.Array:
  """Returns ‖gradient of the table by a row‖²: cotangents of equal ids are summed first."""
  order_T = jnp.argsort(ids_T)
  ids_T, d_TD = ids_T[order_T], d_TD[order_T].astype(jnp.float32)
  segments_T = jnp.cumsum(jnp.diff(ids_T, prepend=ids_T[:1]) != 0)
  summed_TD = jax.ops.segment_sum(d_TD, segments_T, ids_T.size, indices_are_sorted=True)
  return jnp.square(summed_TD).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 4))
def product(
  x: jax.Array, kernel: jax.Array, num_inputs: int, probe_BS: jax.Array, axes: LogicalAxes
) -> jax.Array:
  """Multiplies as `projected`: (B, T, *in) → (B, T, *out), a measured kernel of logical `axes`."""
  del probe_BS, axes
  return projected(x, kernel, num_inputs)


def _product_backward(num_inputs, axes, kept, d_y):
  x, kernel, probe_BS = kept
  # Not by vjp: it would form the product itself once more, for nobody.
  (d_x,) = jax.linear_transpose(lambda x: projected(x, kernel, num_inputs), x)(d_y)
  return d_x, *measured_gradient(x, d_y, kernel, num_inputs, probe_BS, axes)


def measured_gradient(
  x: jax.Array,
  d_y: jax.Array,
  kernel: jax.Array,
  num_inputs: int,
  probe_BS: jax.Array,
  axes: LogicalAxes,
) -> tuple[jax.Array, jax.Array]:
  """Returns the gradient of a kernel of logical `axes`, and that of its probe (B, S)."""
  K, L = (math.prod(part) for part in (kernel.shape[:num_inputs], kernel.shape[num_inputs:]))
  gradient = _ghost if is_ghost(x.shape[1], K, L) else _simultaneous

  def of_rows(x: jax.Array, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    total, squares_BS = gradient(kernel.shape, axes, probe_BS.shape[1], x, d_y)
    return total.astype(kernel.dtype), squares_BS

  return sum_over_rows(of_rows, axes, kernel.shape, x, d_y)


product.defvjp(
  lambda x, kernel, num_inputs, probe_BS, axes: (
    projected(x, kernel, num_inputs),
    (x, kernel, probe_BS),
  ),
  _product_backward,
)


def is_ghost(length: int, inputs: int, outputs: int) -> bool:
  """Returns whether T·T·(K + L) operations for the norm are fewer than the K·L that squaring takes.

  Then T² is far below K·L too. By memory alone, 2·T² < K·L, the ghost norm would be taken for
  layers of large models at a third more time for the whole backward pass.
  """
  return length**2 * (inputs + outputs) < inputs * outputs


def _simultaneous(shape, axes, shards, x, d_y):
  """Computes the weight gradient and squares, holding one row's gradient at a time."""

  def add_row(total, row):
    x_T, d_y_T = row
    of_row = weight_gradient(x_T, d_y_T, shape)
    squares_S = row_squares(summed_part(of_row, axes)[None], axes, shards)[0]
    return total + of_row, squares_S

  return jax.lax.scan(add_row, jnp.zeros(shape, jnp.float32), (x, d_y))


def _ghost(shape, axes, shards, x, d_y):
  """Computes the weight gradient, and squares without any row's gradient."""
  del axes
  x_BTK, d_BTL = (y.reshape(*y.shape[:2], -1) for y in (x, d_y))
  x_XK, d_XL = (y.reshape(-1, y.shape[-1]) for y in (x_BTK, d_BTL))
  d_matrix_KL = jnp.matmul(x_XK.T, d_XL, preferred_element_type=jnp.float32)
  gram = functools.partial(jnp.einsum, "btk,bsk->bts", preferred_element_type=jnp.float32)
  # Where devices share a row, each has its own tokens' products with all tokens.
  gram_x_BTT, gram_d_BTT = gram(x_BTK, all_tokens(x_BTK)), gram(d_BTL, all_tokens(d_BTL))
  squares_B = (gram_x_BTT * gram_d_BTT).sum((1, 2))
  return d_matrix_KL.reshape(shape), _first_shard(squares_B, shards)


def row_squares(gradients: jax.Array, axes: LogicalAxes, shards: int) -> jax.Array:
  """Sums the squares of each row's gradient (B, …), kept apart where tensor divides it: (B, S)."""
  squared, rows = jnp.square(gradients.astype(jnp.float32)), gradients.shape[0]
  at = next(
    (
      at
      for at, axis in enumerate(axes, 1)
      if shards > 1 and "tensor" in LOGICAL_AXIS_RULES[axis] and squared.shape[at] % shards == 0
    ),
    0,
  )
  if at == 0:
    return _first_shard(squared.reshape(rows, -1).sum(1), shards)
  before, after = math.prod(squared.shape[1:at]), math.prod(squared.shape[at + 1 :])
  return squared.reshape(rows, before, shards, -1, after).sum((1, 3, 4))


def _first_shard(squares_B: jax.Array, shards: int) -> jax.Array:
  """Spreads (B,) → (B, S): what all devices along tensor hold counts once."""
  return jnp.pad(squares_B[:, None], ((0, 0), (0, shards - 1)))


class ExponentProbe(Probe):
  """Of what a module gives; a scalar, in stacked layers one per layer."""


def exponent_probe(layers: tuple[int, ...]) -> ExponentProbe:
  """Returns the probe of a module, with a leading dim where it stands for stacked layers."""
  return ExponentProbe(jnp.zeros(layers), of=(), frozen=())


def histogram(x: jax.Array) -> jax.Array:
  """Returns how many values have which exponent: (…) → float32[N]."""
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
  """Returns a module's output: `x` in the computation's format, counted where there is a probe."""
  x = policy.cast(x)
  return x if probe is None or probe[...].ndim < EXPONENT_KINDS else _observed(x, probe[...])


def histograms(tree: Any, layered: Any) -> Any:
  """Returns that of every leaf of a tree: float32[N], or [L, N] of those stacked by `layered`."""
  return jax.tree.map(
    lambda x, is_stacked: jax.vmap(histogram)(x) if is_stacked else histogram(x), tree, layered
  )
