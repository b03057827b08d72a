"""Operations that TPUs, or GPUs, want written in another form than CPUs.

All forms compute the same; the devices of the mesh around, here or not, decide which one is traced.

B rows, T tokens, N heads, H width of a head, V vocabulary; of a mixture E experts, D and F widths of their
matrices, S slots, M of a block (models/grouped.py).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from maxbatch.hardware.shard_maps import by_columns, has_columns, over_rows
from maxbatch.hardware.sharding import LogicalAxes, auto_axis_sizes, is_for, is_piped, local_shape
from maxbatch.precision.policy import Policy

_GELU = math.sqrt(2 / math.pi), 0.044715
_TOKENS = ("batch", "length", "vocab")
_LEAST_COLUMNS = 512
"""Of a table, for a device to look up its own: 2 KB of a row in float32."""


def is_for_tpu() -> bool:
  """Returns whether what is traced here is for TPUs; not without a mesh."""
  return is_for("tpu")


def is_for_gpu() -> bool:
  """Returns whether what is traced here is for GPUs; not without a mesh."""
  return is_for("gpu")


def projected(x: jax.Array, kernel: jax.Array, num_inputs: int) -> jax.Array:
  """Returns the last `num_inputs` dims of x contracted with the first of a kernel.

  On CPU as one product of matrices, rows flattened: XLA then forms the weight gradient as a plain
  matrix product too, which is 1.5 times as fast as contracting (B, T). On TPU heads stay dims of
  their own: to make (N, H) one dim the compiler moves the whole array, for 8% of the time of a step.
  Where devices divide the tokens of rows, too: (B, T) as one dim could not be divided along both.
  """
  if is_for_tpu() or auto_axis_sizes()["context"] > 1:
    return jnp.tensordot(x, kernel, num_inputs)
  matrix = kernel.reshape(math.prod(kernel.shape[:num_inputs]), -1)
  batch = x.shape[: x.ndim - num_inputs]
  rows = x.reshape(*batch, matrix.shape[0])
  y = rows.reshape(-1, matrix.shape[0]) @ matrix
  return y.reshape(*batch, *kernel.shape[num_inputs:])


def is_turned(axes: LogicalAxes, shape: Sequence[int]) -> bool:
  """Returns whether devices gather a kernel of heads with its last dim first, for `turned_product`.

  On TPU where they divide it: gathered along it, heads are moved once more. Not in a pipeline's stage.
  """
  return is_for_tpu() and len(shape) > 2 and not is_piped() and has_columns(axes, shape)


def turned_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns `projected` by a kernel whose first dim is the output's."""
  first = x.ndim - kernel.ndim + 1
  return jnp.tensordot(x, kernel, (tuple(range(first, x.ndim)), tuple(range(1, kernel.ndim))))


def weight_gradient(x: jax.Array, d_y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns the weight gradient of `projected` by one row: (T, *in), (T, *out) → float32 of the
  kernel's shape."""
  if is_for_tpu():
    tokens = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(x, d_y, tokens, preferred_element_type=jnp.float32)
  T = x.shape[0]
  matrix = jnp.matmul(x.reshape(T, -1).T, d_y.reshape(T, -1), preferred_element_type=jnp.float32)
  return matrix.reshape(shape)


def transposed_product(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns aᵀ·b, float32: (…, X, S), (…, X, H) → (…, S, H), where H is much smaller than S.

  On CPU as (bᵀ·a)ᵀ, with the transposes kept out of the product: half the time, as XLA multiplies
  a batch of transposed matrices by a slower path, to which it would return this form as well.
  """
  if is_for_tpu() or is_for_gpu():
    return jnp.matmul(a.mT, b, preferred_element_type=jnp.float32)
  b_HX = jax.lax.optimization_barrier(b.mT)
  product_HS = jnp.matmul(b_HX, a, preferred_element_type=jnp.float32)
  return jax.lax.optimization_barrier(product_HS).mT


def rotated(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
  """Rotates pairs (i, i + H/2) of every head by its position's angle, as Llama's weights expect; float32.

  On TPU the halves change places in the matrix unit: to split and join them takes as long as a
  product of 4% of the step. cos and sin of the angles are float32[B or 1, T, H/2].
  """
  if is_for_tpu():
    cos, sin = (jnp.concatenate([y, y], axis=-1)[:, :, None] for y in (cos_BTH, sin_BTH))
    return _rotated_whole(x_BTNH, cos, sin, x_BTNH.dtype)
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _turned(
  x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array, dtype: DTypeLike
) -> jax.Array:
  """Computes x·cos + (−second half, first half)·sin; the gradient is rotated back in the same way.

  The product with 1 and −1 is exact: in bfloat16 as it is, in float32 by `highest`. `dtype` is that
  of x, and that to which the caller rounds the result: gradients have no more bits either.
  """
  H = x_BTNH.shape[-1]
  swap_HH = np.roll(np.eye(H), H // 2, axis=1)
  swap_HH[H // 2 :] *= -1
  swapped_BTNH = jnp.matmul(
    x_BTNH.astype(dtype),
    jnp.asarray(swap_HH, dtype),
    precision="highest" if dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )
  return x_BTNH.astype(jnp.float32) * cos_BT1H + swapped_BTNH * sin_BT1H


def _rotated_forward(x_BTNH, cos_BT1H, sin_BT1H, dtype):
  return _turned(x_BTNH, cos_BT1H, sin_BT1H, dtype), (cos_BT1H, sin_BT1H)


def _rotated_backward(dtype, angles, d_BTNH):
  cos_BT1H, sin_BT1H = angles
  return _turned(d_BTNH, cos_BT1H, -sin_BT1H, dtype).astype(dtype), None, None


_rotated_whole = jax.custom_vjp(_turned, nondiff_argnums=(3,))
_rotated_whole.defvjp(_rotated_forward, _rotated_backward)


def barrier(arrays: Any) -> Any:
  """Returns the arrays; on TPU they, and their gradients, are computed before what reads them.

  A product that is fused with a gate computes it anew for every block of its columns.
  """
  return jax.lax.optimization_barrier(arrays) if is_for_tpu() else arrays


def barrier_gradients(arrays: Any, *, on_gpu: bool = False) -> Any:
  """Returns the arrays; on TPU, and on GPU if asked, their gradients are computed before what reads them.

  Otherwise the compiler fuses the elementwise operations that give them into each of these products,
  which computes them again for every block of its columns: 7% of a microbatch of two layers of
  Llama-2-7B on one v5e.
  """
  return _with_barrier(arrays) if is_for_tpu() or (on_gpu and is_for_gpu()) else arrays


@jax.custom_vjp
def _with_barrier(arrays: Any) -> Any:
  return arrays


_with_barrier.defvjp(
  lambda arrays: (arrays, None),
  lambda _, gradients: (jax.lax.optimization_barrier(gradients),),
)


def gelu(x: jax.Array) -> jax.Array:
  """Computes GELU by tanh, as in GPT-2 and Gemma.

  On GPU by the logistic function, which is the same: (1 + tanh u) / 2 = 1 / (1 + exp(−2u)). Of tanh, which
  takes it longer than memory does, the compiler also writes the result for the backward pass: 0.60 ms in a
  layer of GPT-2 small with 16,384 tokens on an H100, instead of 0.34.
  """
  return _gelu_by_logistic(x) if is_for_gpu() else jax.nn.gelu(x, approximate=True)


@jax.custom_vjp
def _gelu_by_logistic(x: jax.Array) -> jax.Array:
  y = x.astype(jnp.float32)
  return (y * _logistic_of(y)).astype(x.dtype)


def _logistic_of(y: jax.Array) -> jax.Array:
  factor, cubic = _GELU
  return jax.nn.sigmoid(2 * factor * y * (1 + cubic * y * y))


def _gelu_backward(x: jax.Array, d: jax.Array) -> tuple[jax.Array]:
  y, (factor, cubic) = x.astype(jnp.float32), _GELU
  share = _logistic_of(y)
  slope = share * (1 + (1 - share) * 2 * factor * y * (1 + 3 * cubic * y * y))
  return ((d.astype(jnp.float32) * slope).astype(x.dtype),)


_gelu_by_logistic.defvjp(lambda x: (_gelu_by_logistic(x), x), _gelu_backward)


def embedded(
  table_VD: jax.Array, axes: LogicalAxes, ids_BT: jax.Array, policy: Policy
) -> jax.Array:
  """Returns rows of a table in the format of the computation, (V, D) and int32[B, T] → (B, T, D).

  On TPU a device looks up its columns of all tokens: the table is not gathered. Not where they are few: many
  short rows may take longer than one gather, and the compiler has no estimate of them.
  """
  is_wide = local_shape(axes, table_VD.shape)[1] >= _LEAST_COLUMNS
  if not (is_for_tpu() and is_wide and has_columns(axes, table_VD.shape)):
    return over_rows(taken, policy.cast(table_VD), axes, ids_BT)
  return by_columns(
    lambda part_VC, ids: policy.cast(_rows_of(part_VC, ids)), table_VD, axes, ids_BT
  )


@jax.custom_vjp
def _rows_of(table_VC: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns rows of a table; their gradients, of all devices' tokens, are summed in float32."""
  return table_VC[ids]


def _rows_of_backward(kept: tuple[Any, jax.Array], d: jax.Array) -> tuple[jax.Array, None]:
  table, ids = kept
  zeros = jnp.zeros(table.shape, jnp.float32)
  return zeros.at[ids].add(d.astype(jnp.float32)).astype(table.dtype), None


_rows_of.defvjp(lambda table_VC, ids: (table_VC[ids], (table_VC, ids)), _rows_of_backward)


def taken(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
  """Returns rows of a table, (V, D) and int32[B, T] → (B, T, D).

  On GPU the zeros to which the gradient is added wait for it: the compiler's scheduler would write them
  before the loss and hold them, 1 GB of Llama-3-8B's, through the whole backward pass.
  """
  return _taken(table_VD.shape[0], table_VD, ids_BT) if is_for_gpu() else table_VD[ids_BT]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(_: int, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
  return table_VD[ids_BT]


def _taken_backward(size: int, ids_BT: jax.Array, d_BTD: jax.Array) -> tuple[jax.Array, None]:
  zero, d_BTD = jax.lax.optimization_barrier((jnp.zeros((), d_BTD.dtype), d_BTD))
  return jnp.broadcast_to(zero, (size, d_BTD.shape[-1])).at[ids_BT].add(d_BTD), None


_taken.defvjp(
  lambda size, table_VD, ids_BT: (_taken(size, table_VD, ids_BT), ids_BT), _taken_backward
)


def largest_and_sum(logits_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the largest logit of each token and the sum of exp(logit − largest), (B, T, 1) each; without
  gradients.

  On GPU in one pass over the logits, rescaled where a larger one is met; where devices divide V, in two, as
  elsewhere.
  """
  if is_for_gpu() and _is_whole(logits_BTV):
    lowest = jnp.finfo(jnp.float32).min, jnp.float32(0)
    each = logits_BTV, jnp.ones_like(logits_BTV)
    largest_BT, sum_BT = jax.lax.reduce(each, lowest, _joined, (2,))
    return largest_BT[..., None], sum_BT[..., None]
  largest_BT1 = logits_BTV.max(-1, keepdims=True)
  return largest_BT1, jnp.exp(logits_BTV - largest_BT1).sum(-1, keepdims=True)


def _joined(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
  """Joins the largest logits and sums of two parts of a row."""
  (largest, total), (largest_2, total_2) = one, other
  smaller = jnp.exp(-jnp.abs(largest - largest_2))
  is_first = largest >= largest_2
  joined = jnp.where(is_first, total + total_2 * smaller, total * smaller + total_2)
  return jnp.maximum(largest, largest_2), joined


def chosen(logits_BTV: jax.Array, targets_BT: jax.Array, hit_BTV: jax.Array) -> jax.Array:
  """Returns each token's logit of its target, float32[B, T]; without gradients.

  By a comparison, `hit_BTV`: it also works where devices divide V. On GPU by its place, where they do
  not: the comparison reads all logits once more.
  """
  if is_for_gpu() and _is_whole(logits_BTV):
    return jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1, mode="clip")[..., 0]
  return jnp.where(hit_BTV, logits_BTV, 0.0).sum(-1)


def _is_whole(logits_BTV: jax.Array) -> bool:
  return local_shape(_TOKENS, logits_BTV.shape)[2] == logits_BTV.shape[2]


Stored = tuple[jax.Array, LogicalAxes]


def as_multiplied(parameters: dict[str, Stored]) -> dict[str, Stored]:
  """Returns a layer's parameters in the forms in which devices gather and multiply them.

  On TPU gate and up are one, (E, D, 2F): a token's gradient then comes out of one product, while a sum of
  two takes as long as a product. And down is turned, (E, D, F): where the last dim is divided, the
  compiler moves the whole array after it is gathered, and its gradient.
  """
  if not is_for_tpu():
    return parameters
  given = dict(parameters)
  down_EFD, (expert, width, embed) = given["down"]
  given["down"] = jnp.swapaxes(down_EFD, 1, 2), (expert, embed, width)
  # Joined along a dim that devices divide, halves would have to change places.
  if "gate" in given and auto_axis_sizes()["tensor"] == 1:
    both, axes = (given.pop("gate")[0], given["up"][0]), given.pop("up")[1]
    given["gate_up"] = jnp.concatenate(both, -1), axes
  return given


@jax.custom_vjp
def by_blocks(
  x_SD: jax.Array,
  matrix_EDF: jax.Array,
  expert_of_block: jax.Array,
  num_blocks: jax.Array | None,
) -> jax.Array:
  """Multiplies blocks (S/M, M) of x, each by the matrix of its expert, which is read where it lies.

  `num_blocks` of them have assignments, the first; None: nearly all.
  """

  def multiply(x_MD: jax.Array, expert: jax.Array) -> jax.Array:
    return x_MD @ lax.dynamic_index_in_dim(matrix_EDF, expert, keepdims=False)

  def block(index: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    zeros = jnp.zeros((given[0].shape[0], matrix_EDF.shape[-1]), x_SD.dtype)
    return index + 1, _if_used(index, num_blocks, multiply, lambda *_: zeros, *given)

  blocks = _in_blocks(x_SD, expert_of_block), expert_of_block
  return lax.scan(block, jnp.int32(0), blocks)[1].reshape(x_SD.shape[0], -1)


def _if_used(
  index: jax.Array,
  num_blocks: jax.Array | None,
  compute: Callable[..., Any],
  skip: Callable[..., Any],
  *given: Any,
) -> Any:
  """Returns `compute(*given)` for a block that has assignments, and `skip(*given)` for others."""
  return (
    compute(*given) if num_blocks is None else lax.cond(index < num_blocks, compute, skip, *given)
  )


def _by_blocks_backward(kept, d_SF):
  x_SD, matrix_EDF, expert_of_block, num_blocks = kept

  def add(
    sums_EDF: jax.Array, x_MD: jax.Array, d_MF: jax.Array, expert: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    at = functools.partial(lax.dynamic_index_in_dim, index=expert, keepdims=False)
    added = jnp.matmul(x_MD.T, d_MF, preferred_element_type=jnp.float32)
    # In place: to add to all of the sums in every block would cost E times as much.
    sums_EDF = lax.dynamic_update_index_in_dim(sums_EDF, at(sums_EDF) + added, expert, 0)
    return sums_EDF, d_MF @ at(matrix_EDF).T

  def block(
    carry: tuple[jax.Array, jax.Array], given: tuple[jax.Array, ...]
  ) -> tuple[Any, jax.Array]:
    index, sums_EDF = carry

    def skip(sums_EDF: jax.Array, x_MD: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
      return sums_EDF, jnp.zeros_like(x_MD)

    sums_EDF, d_MD = _if_used(index, num_blocks, add, skip, sums_EDF, *given)
    return (index + 1, sums_EDF), d_MD

  zeros_EDF = jnp.zeros(matrix_EDF.shape, jnp.float32)
  blocks = (_in_blocks(x_SD, expert_of_block), _in_blocks(d_SF, expert_of_block), expert_of_block)
  (_, sums_EDF), d_x = lax.scan(block, (jnp.int32(0), zeros_EDF), blocks)
  return d_x.reshape(x_SD.shape), sums_EDF.astype(matrix_EDF.dtype), None, None


def _in_blocks(x_SD: jax.Array, expert_of_block: jax.Array) -> jax.Array:
  return x_SD.reshape(len(expert_of_block), -1, x_SD.shape[-1])


by_blocks.defvjp(lambda *arguments: (by_blocks(*arguments), arguments), _by_blocks_backward)
