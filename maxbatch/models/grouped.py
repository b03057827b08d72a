"""Products of tokens with the matrices of the experts that they are sent to, and of no others.

T tokens, K experts of each, E experts, N = T·K assignments of tokens to experts, S slots: the assignments
in the order of their experts, D and F width of a matrix's inputs and outputs. Of E experts a device may
hold some; assignments to others have no slot.

On TPU `ragged_dot` multiplies the slots. Elsewhere it expands to a product of every token with every
expert, so each expert's slots are filled up to whole blocks of M, and each block is multiplied by the
matrix of its expert. Tokens are gathered in both passes: nothing is added in an order that could change.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.models.forms import is_for_tpu

_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 8


class Slots(NamedTuple):
  """Where the assignments lie."""

  slot_TK: jax.Array
  """int32: the slot of each assignment; S: none."""
  assignment_S: jax.Array
  """int32: the assignment t·K + k in each slot, any where the slot is empty."""
  is_used_S: jax.Array
  """bool: whether a slot holds an assignment."""
  expert_of_block: jax.Array
  """int32[S/M]: the expert of each block."""
  tokens_E: jax.Array
  """int32: the assignments of each expert that is held."""
  blocks: jax.Array | None
  """int32: blocks with assignments, which come first; None: nearly all have."""


def block_size(assignments: int, num_experts: int) -> int:
  """Returns M: so small that empty slots are a fifth of all at most, but for few tokens."""
  if is_for_tpu():
    return 1
  wanted = max(assignments // (4 * num_experts), _SMALLEST_BLOCK)
  return min(2 ** (wanted.bit_length() - 1), _LARGEST_BLOCK)


def num_slots(assignments: int, num_experts: int, block: int) -> int:
  """Returns S: enough for any choice of experts."""
  return (assignments + min(num_experts, assignments) * (block - 1)) // block * block


def slots_of(chosen_TK: jax.Array, num_experts: int, held_E: jax.Array | None = None) -> Slots:
  """Returns the slots of tokens that are sent to the experts int32[T, K].

  Args:
    num_experts: all that there are.
    held_E: the numbers of those that are held, one after the other; None: all.
  """
  N, K, held = chosen_TK.size, chosen_TK.shape[1], num_experts if held_E is None else len(held_E)
  M = block_size(N, num_experts)
  expert_N = chosen_TK.reshape(-1)
  if held_E is not None and held < num_experts:
    expert_N = expert_N - held_E[0]
    expert_N = jnp.where((expert_N >= 0) & (expert_N < held), expert_N, held)
  order_N = jnp.argsort(expert_N, stable=True)
  sorted_N = expert_N[order_N]
  ends_E = _number_up_to(sorted_N, jnp.arange(held))
  tokens_E = jnp.diff(ends_E, prepend=0)
  starts_E = ends_E - tokens_E
  block_ends_E = jnp.cumsum(-(-tokens_E // M))
  first_slots_E = jnp.concatenate([jnp.zeros(1, jnp.int32), M * block_ends_E[:-1]])
  slot_N = jnp.arange(N) + (first_slots_E - starts_E)[sorted_N]
  S = num_slots(N, held, M)
  if held < num_experts:
    slot_N = jnp.where(sorted_N < held, slot_N, S)
  blocks = _number_up_to(block_ends_E, jnp.arange(S // M))
  expert_of_block = jnp.minimum(blocks, held - 1)
  within_S = jnp.arange(S) - jnp.repeat(first_slots_E[expert_of_block], M)
  expert_S = jnp.repeat(expert_of_block, M)
  sources_S = jnp.minimum(starts_E[expert_S] + within_S, N - 1)
  return Slots(
    slot_N[jnp.argsort(order_N)].reshape(-1, K),
    order_N[sources_S],
    within_S < tokens_E[expert_S],
    expert_of_block,
    tokens_E,
    block_ends_E[-1] if held < num_experts else None,
  )


def _at_slots(x_SD: jax.Array, slot_TK: jax.Array) -> jax.Array:
  """Returns what assignments have in their slots (T, K, D), zeros for those without one."""
  return x_SD.at[slot_TK].get(mode="fill", fill_value=0)


def _number_up_to(sorted_N: jax.Array, values: jax.Array) -> jax.Array:
  """Returns how many of the sorted numbers are at most each value."""
  return jnp.searchsorted(sorted_N, values, side="right").astype(jnp.int32)


@jax.custom_vjp
def dispatched(x_TD: jax.Array, slots: Slots) -> jax.Array:
  """Returns the tokens in their slots (S, D), zeros in empty ones."""
  token_S = slots.assignment_S // slots.slot_TK.shape[1]
  return jnp.where(slots.is_used_S[:, None], x_TD[token_S], 0)


def _dispatched_backward(slots: Slots, d_SD: jax.Array):
  return _at_slots(d_SD, slots.slot_TK).astype(jnp.float32).sum(1).astype(d_SD.dtype), None


dispatched.defvjp(lambda x_TD, slots: (dispatched(x_TD, slots), slots), _dispatched_backward)


@jax.custom_vjp
def combined(y_SD: jax.Array, weight_TK: jax.Array, slots: Slots) -> jax.Array:
  """Returns each token's sum of what its experts gave, weighted: float32 (T, D)."""
  return (weight_TK[..., None] * _at_slots(y_SD, slots.slot_TK)).sum(1)


def _combined_forward(y_SD, weight_TK, slots):
  return combined(y_SD, weight_TK, slots), (y_SD, weight_TK, slots)


def _combined_backward(kept, d_TD):
  y_SD, weight_TK, slots = kept
  weight_S = jnp.where(slots.is_used_S, weight_TK.reshape(-1)[slots.assignment_S], 0)
  token_S = slots.assignment_S // slots.slot_TK.shape[1]
  d_SD = (weight_S[:, None] * d_TD[token_S]).astype(y_SD.dtype)
  d_weight_TK = (d_TD[:, None] * _at_slots(y_SD, slots.slot_TK).astype(jnp.float32)).sum(-1)
  return d_SD, d_weight_TK, None


combined.defvjp(_combined_forward, _combined_backward)


def grouped_product(x_SD: jax.Array, matrix_EDF: jax.Array, slots: Slots) -> jax.Array:
  """Returns each slot multiplied by the matrix of its expert: (S, D), (E, D, F) → (S, F)."""
  if is_for_tpu():
    return lax.ragged_dot(x_SD, matrix_EDF, slots.tokens_E)
  return _by_blocks(x_SD, matrix_EDF, slots.expert_of_block, slots.blocks)


def grouped_bias(bias_EF: jax.Array, slots: Slots) -> jax.Array:
  """Returns the bias of each slot's expert: (E, F) → (S, F)."""
  blocks = len(slots.expert_of_block)
  if blocks == len(slots.assignment_S):
    return bias_EF[slots.expert_of_block]
  # One row for a block, so that the gradient adds blocks and not slots.
  return jnp.repeat(bias_EF[slots.expert_of_block], len(slots.assignment_S) // blocks, axis=0)


@jax.custom_vjp
def _by_blocks(
  x_SD: jax.Array,
  matrix_EDF: jax.Array,
  expert_of_block: jax.Array,
  num_blocks: jax.Array | None,
) -> jax.Array:
  """Multiplies block by block, each by a matrix that is read where it lies."""

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


_by_blocks.defvjp(lambda *arguments: (_by_blocks(*arguments), arguments), _by_blocks_backward)
