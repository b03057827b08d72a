"""Products of tokens with the matrices of the experts that they are sent to, and of no others.

T tokens, K experts of each, E experts, N = T·K assignments of tokens to experts, S slots: the assignments
in the order of their experts, D and F width of a matrix's inputs and outputs. Of E experts a device may
hold some; assignments to others have no slot.

On TPU a kernel multiplies the slots (models/group_kernels.py). jax's `ragged_dot` expands to a product of
every token with every expert, on v6e too. Elsewhere each expert's slots are filled up to whole blocks of M,
and each block is multiplied by the matrix of its expert. Tokens are gathered in both passes: nothing is added
in an order that could change.

A GPU would copy the matrix for each block. There every expert has C slots, a little more than an even
share of the tokens, and all are multiplied in one product of batches. What is sent to an expert beyond
these has no slot: a loop goes over such tokens in blocks of M, of one expert each, and does nothing where
there are none (`beyond`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.models import group_kernels
from maxbatch.models.forms import by_blocks, is_for_gpu, is_for_tpu

_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 8
BEYOND_BLOCK = 512
"""Tokens on GPU: to read a matrix takes as long as to multiply some 400 tokens by it on an H100."""
SPARE = 8
"""On GPU slots for one in so many tokens more than an even share: each slot costs a product, and each
token without one about three."""


class Slots(NamedTuple):
  """Where the assignments lie."""

  slot_TK: jax.Array
  """int32: the slot of each assignment; S: none."""
  assignment_S: jax.Array
  """int32: the assignment t·K + k in each slot, any where the slot is empty."""
  is_used_S: jax.Array | None
  """bool: whether a slot holds an assignment; None: all do."""
  expert_of_block: jax.Array
  """int32[S/M]: the expert of each block."""
  tokens_E: jax.Array
  """int32: the assignments of each expert that is held; on TPU zeros for all others follow."""
  blocks: jax.Array | None
  """int32: blocks with assignments, which come first; None: nearly all have."""
  order_N: jax.Array | None = None
  """int32: the assignments in the order of their experts, where each expert has as many slots as every
  other, one block; None: it has as many blocks as it needs."""


def block_size(assignments: int, num_experts: int) -> int:
  """Returns M: so small that empty slots are a fifth of all at most, but for few tokens."""
  if is_for_tpu():
    return 1
  wanted = max(assignments // (4 * num_experts), _SMALLEST_BLOCK)
  return min(2 ** (wanted.bit_length() - 1), _LARGEST_BLOCK)


def even_slots(assignments: int, num_experts: int) -> int:
  """Returns C, the slots of each expert on GPU; 0: blocks, as on CPU, where there are few tokens."""
  even = -(-assignments // num_experts)
  if not is_for_gpu() or even < _SMALLEST_BLOCK:
    return 0
  return -(-(even + even // SPARE) // _SMALLEST_BLOCK) * _SMALLEST_BLOCK


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
  C = even_slots(N, num_experts)
  M = C or block_size(N, num_experts)
  expert_N = chosen_TK.reshape(-1)
  if held_E is not None and held < num_experts:
    expert_N = expert_N - held_E[0]
    expert_N = jnp.where((expert_N >= 0) & (expert_N < held), expert_N, held)
  sorted_N, order_N = lax.sort((expert_N, jnp.arange(N)), num_keys=1)
  ends_E = _number_up_to(sorted_N, jnp.arange(held))
  tokens_E = jnp.diff(ends_E, prepend=0)
  if M == 1:
    is_used_N = None if held == num_experts else sorted_N < held
    slot_N = jnp.arange(N) if is_used_N is None else jnp.where(is_used_N, jnp.arange(N), N)
    slot_TK = _by_assignment(slot_N, order_N, K)
    tokens_E = jnp.pad(tokens_E, (0, num_experts - held))
    return Slots(slot_TK, order_N, is_used_N, jnp.minimum(sorted_N, held - 1), tokens_E, None)
  starts_E = ends_E - tokens_E
  block_ends_E = jnp.arange(1, held + 1) if C else jnp.cumsum(-(-tokens_E // M))
  first_slots_E = jnp.concatenate([jnp.zeros(1, jnp.int32), M * block_ends_E[:-1]])
  within_N = jnp.arange(N) - starts_E[sorted_N]
  slot_N = first_slots_E[sorted_N] + within_N
  S = held * C or num_slots(N, held, M)
  if held < num_experts:
    slot_N = jnp.where(sorted_N < held, slot_N, S)
  if C:
    slot_N = jnp.where(within_N < C, slot_N, S)
  blocks = _number_up_to(block_ends_E, jnp.arange(S // M))
  expert_of_block = jnp.minimum(blocks, held - 1)
  within_S = jnp.arange(S) - jnp.repeat(first_slots_E[expert_of_block], M)
  expert_S = jnp.repeat(expert_of_block, M)
  sources_S = jnp.minimum(starts_E[expert_S] + within_S, N - 1)
  return Slots(
    _by_assignment(slot_N, order_N, K),
    order_N[sources_S],
    within_S < tokens_E[expert_S],
    expert_of_block,
    tokens_E,
    block_ends_E[-1] if held < num_experts and not C else None,
    order_N if C else None,
  )


def _by_assignment(x_N: jax.Array, order_N: jax.Array, K: int) -> jax.Array:
  return lax.sort((order_N, x_N), num_keys=1)[1].reshape(-1, K)


def _at_slots(x_S: jax.Array, slots: Slots) -> jax.Array:
  """Returns what assignments have in their slots (T, K, …), zeros for those without one."""
  if slots.is_used_S is None:
    return x_S.at[slots.slot_TK].get(mode="promise_in_bounds")
  return x_S.at[slots.slot_TK].get(mode="fill", fill_value=0)


def _in_slots(x_N: jax.Array, slots: Slots, per: int = 1) -> jax.Array:
  """Returns what belongs to the assignments in slots, or to each `per` of them: zeros in empty ones, but for
  TPU, whose kernels read none of these."""
  x_S = x_N.at[slots.assignment_S // per].get(mode="promise_in_bounds")
  if slots.is_used_S is None or len(slots.expert_of_block) == len(slots.assignment_S):
    return x_S
  return jnp.where(slots.is_used_S.reshape(-1, *[1] * (x_S.ndim - 1)), x_S, 0)


def _number_up_to(sorted_N: jax.Array, values: jax.Array) -> jax.Array:
  """Returns how many of the sorted numbers are at most each value."""
  return jnp.searchsorted(sorted_N, values, side="right").astype(jnp.int32)


@jax.custom_vjp
def dispatched(x_TD: jax.Array, slots: Slots) -> jax.Array:
  """Returns the tokens in their slots (S, D); empty ones as of `_in_slots`."""
  return _in_slots(x_TD, slots, slots.slot_TK.shape[1])


dispatched.defvjp(
  lambda x_TD, slots: (dispatched(x_TD, slots), slots),
  lambda slots, d_SD: (combined(d_SD, slots).astype(d_SD.dtype), None),
)


@jax.custom_vjp
def combined(y_SD: jax.Array, slots: Slots) -> jax.Array:
  """Returns each token's sum of what its experts gave: float32 (T, D)."""
  return _at_slots(y_SD, slots).astype(jnp.float32).sum(1)


combined.defvjp(
  lambda y_SD, slots: (combined(y_SD, slots), (slots, jnp.zeros((), y_SD.dtype))),
  # Rounded first: half of the bytes are gathered.
  lambda kept, d_TD: (dispatched(d_TD.astype(kept[1].dtype), kept[0]), None),
)


@jax.custom_vjp
def weights_in_slots(weight_TK: jax.Array, slots: Slots) -> jax.Array:
  """Returns the weights of the assignments in slots (S,); empty ones as of `_in_slots`."""
  return _in_slots(weight_TK.reshape(-1), slots)


weights_in_slots.defvjp(
  lambda weight_TK, slots: (weights_in_slots(weight_TK, slots), slots),
  lambda slots, d_S: (_at_slots(d_S, slots), None),
)


def grouped_product(
  x_SD: jax.Array, matrix_EDF: jax.Array, slots: Slots, *, is_last: bool = False
) -> jax.Array:
  """Returns each slot multiplied by the matrix of its expert: (S, D), (E, D, F) → (S, F).

  The matrices down, the last of a layer, are as `as_multiplied` gives them. On TPU empty slots may become
  anything.
  """
  if is_for_tpu():
    wide = (
      jnp.float32 if x_SD.dtype == jnp.float16 else x_SD.dtype
    )  # Of 16 bits kernels take bfloat16.
    held, all_experts = len(matrix_EDF), len(slots.tokens_E)
    y_SF: Any = group_kernels.grouped(
      *(x_SD.astype(wide), matrix_EDF.astype(wide), slots.tokens_E[:held]),
      is_last,
      held / all_experts,
    )
    return y_SF.astype(x_SD.dtype)
  if slots.order_N is not None:
    x_ECD = x_SD.reshape(matrix_EDF.shape[0], -1, x_SD.shape[-1])
    return jnp.matmul(x_ECD, matrix_EDF).reshape(x_SD.shape[0], -1)
  return by_blocks(x_SD, matrix_EDF, slots.expert_of_block, slots.blocks)


def grouped_bias(bias_EF: jax.Array, slots: Slots) -> jax.Array:
  """Returns the bias of each slot's expert: (E, F) → (S, F)."""
  blocks = len(slots.expert_of_block)
  if blocks == len(slots.assignment_S):
    bias_SF, is_used_S = bias_EF[slots.expert_of_block], slots.is_used_S
    return bias_SF if is_used_S is None else jnp.where(is_used_S[:, None], bias_SF, 0)
  # One row for a block, so that the gradient adds blocks and not slots.
  return jnp.repeat(bias_EF[slots.expert_of_block], len(slots.assignment_S) // blocks, axis=0)


Matrices = dict[str, jax.Array]
Dims = dict[str, int]
Fed = Callable[[Matrices, jax.Array, jax.Array, Slots], jax.Array]
"""From the matrices of experts, (E, …) each, and tokens and weights in slots to (S, D)."""
_GATHERED = {"gate": 1, "up": 1, "down": 2}
"""The dim that fsdp divides. Gathered matrices have it as their first dim in memory."""


def beyond(
  fed: Fed, matrices: Matrices, x_TD: jax.Array, weight_TK: jax.Array, slots: Slots
) -> tuple[Matrices, jax.Array]:
  """Returns the matrices, and float32 (T, D): the sums as of `combined`, of assignments without a slot.

  Whoever multiplies the slots takes the matrices from here: their gradients are then added in place to
  those of the slots, expert by expert, and where all have a slot nothing of their size is touched.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  is_gathered = any(sizes.get(axis, 1) > 1 for axis in ("fsdp", "context"))
  # A loop takes arrays in the order of their dims, into which the compiler would move them.
  dims = {name: dim for name, dim in _GATHERED.items() if is_gathered and name in matrices}
  moved = {name: jnp.moveaxis(x, dims.get(name, 0), 0) for name, x in matrices.items()}
  result: Any = _beyond(fed, tuple(dims.items()), moved, x_TD, weight_TK, slots)
  return {name: jnp.moveaxis(x, 0, dims.get(name, 0)) for name, x in result[0].items()}, result[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _beyond(
  fed: Fed,
  dims: tuple[tuple[str, int], ...],
  matrices: Matrices,
  x_TD: jax.Array,
  weight_TK: jax.Array,
  slots: Slots,
) -> tuple[Matrices, jax.Array]:
  blocks, K = _Blocks.of(slots), weight_TK.shape[1]

  def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    index, y_TD = carry
    expert = _number_up_to(blocks.ends_E, index)
    assignment_M = blocks.assignments(expert, index)
    own = _of_expert(matrices, dict(dims), expert)
    y_MD = _weighted(fed, own, *_taken(x_TD, weight_TK, assignment_M))
    return index + 1, y_TD.at[assignment_M // K].add(y_MD, mode="drop")

  nothing = jnp.int32(0), jnp.zeros(x_TD.shape, jnp.float32)
  return matrices, lax.while_loop(lambda carry: carry[0] < blocks.ends_E[-1], add, nothing)[1]


class _Blocks(NamedTuple):
  """The blocks of assignments without a slot."""

  ends_E: jax.Array
  """int32: blocks of each expert and those before it."""
  blocks_E: jax.Array
  tokens_E: jax.Array
  order_N: jax.Array
  slots_of_expert: int
  size: int

  @classmethod
  def of(cls, slots: Slots) -> "_Blocks":
    """Returns those beyond so many slots for each expert."""
    assert slots.order_N is not None
    C = len(slots.assignment_S) // len(slots.expert_of_block)
    M = min(C, BEYOND_BLOCK)
    blocks_E = -(-jnp.maximum(slots.tokens_E - C, 0) // M)
    return cls(jnp.cumsum(blocks_E), blocks_E, slots.tokens_E, slots.order_N, C, M)

  def assignments(self, expert: jax.Array, index: jax.Array) -> jax.Array:
    """Returns int32[M]: the block of that number, of all blocks, which is of this expert; N: none."""
    N, number = len(self.order_N), index - (self.ends_E - self.blocks_E)[expert]
    within_M = self.slots_of_expert + number * self.size + jnp.arange(self.size)
    start = (jnp.cumsum(self.tokens_E) - self.tokens_E)[expert]
    assignment_M = self.order_N[jnp.minimum(start + within_M, N - 1)]
    return jnp.where(within_M < self.tokens_E[expert], assignment_M, N)


def _taken(x_TD: jax.Array, weight_TK: jax.Array, at_M: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns tokens and weights of assignments, zeros for none."""
  x_MD = x_TD.at[at_M // weight_TK.shape[1]].get(mode="fill", fill_value=0)
  return x_MD, weight_TK.reshape(-1).at[at_M].get(mode="fill", fill_value=0)


def _of_expert(matrices: Matrices, dims: Dims, expert: jax.Array) -> Matrices:
  """Returns the matrices of one expert, (1, …) each."""
  own = {
    name: lax.dynamic_slice_in_dim(x, expert, 1, int(name in dims)) for name, x in matrices.items()
  }
  return {name: jnp.moveaxis(x, 0, dims.get(name, 0)) for name, x in own.items()}


def _with_expert(matrices: Matrices, dims: Dims, expert: jax.Array, own: Matrices) -> Matrices:
  """Returns the matrices with those of one expert replaced, in their format."""
  return {
    name: lax.dynamic_update_slice_in_dim(
      x, jnp.moveaxis(own[name].astype(x.dtype), dims.get(name, 0), 0), expert, int(name in dims)
    )
    for name, x in matrices.items()
  }


def _weighted(fed: Fed, own: Matrices, x_MD: jax.Array, weight_M: jax.Array) -> jax.Array:
  """Returns what one expert makes of a block, all of which is its."""
  at_M, one = jnp.arange(len(x_MD)), jnp.zeros(1, jnp.int32)
  slots = Slots(at_M[:, None], at_M, at_M >= 0, one, one + len(x_MD), None, at_M)
  return fed(own, x_MD, weight_M, slots).astype(jnp.float32)


def _beyond_backward(fed: Fed, dims: tuple[tuple[str, int], ...], kept, gradients):
  matrices, x_TD, weight_TK, slots = kept
  d_matrices, d_TD = gradients
  blocks, K = _Blocks.of(slots), weight_TK.shape[1]

  def add_block(expert: jax.Array, own: Matrices, carry: Any) -> Any:
    index, sums, d_x_TD, d_weight_N = carry
    assignment_M = blocks.assignments(expert, index)
    token_M, taken = assignment_M // K, _taken(x_TD, weight_TK, assignment_M)
    _, pullback = jax.vjp(functools.partial(_weighted, fed), own, *taken)
    d_own, d_MD, d_weight_M = pullback(d_TD.at[token_M].get(mode="fill", fill_value=0))
    sums = jax.tree.map(lambda total, added: total + added.astype(jnp.float32), sums, d_own)
    d_x_TD = d_x_TD.at[token_M].add(d_MD.astype(jnp.float32), mode="drop")
    d_weight_N = d_weight_N.at[assignment_M].set(d_weight_M, mode="drop")
    return index + 1, sums, d_x_TD, d_weight_N

  def add_expert(carry: Any) -> Any:
    index, d_matrices, d_x_TD, d_weight_N = carry
    expert = _number_up_to(blocks.ends_E, index)
    own = _of_expert(matrices, dict(dims), expert)
    # Rounded to the matrices' format once, after all of an expert's blocks.
    sums = jax.tree.map(lambda x: x.astype(jnp.float32), _of_expert(d_matrices, dict(dims), expert))
    index, sums, d_x_TD, d_weight_N = lax.while_loop(
      lambda carry: carry[0] < blocks.ends_E[expert],
      functools.partial(add_block, expert, own),
      (index, sums, d_x_TD, d_weight_N),
    )
    return index, _with_expert(d_matrices, dict(dims), expert, sums), d_x_TD, d_weight_N

  nothing = jnp.zeros(x_TD.shape, jnp.float32), jnp.zeros(weight_TK.size, weight_TK.dtype)
  _, d_matrices, d_x_TD, d_weight_N = lax.while_loop(
    lambda carry: carry[0] < blocks.ends_E[-1], add_expert, (jnp.int32(0), d_matrices, *nothing)
  )
  return d_matrices, d_x_TD.astype(x_TD.dtype), d_weight_N.reshape(weight_TK.shape), None


_beyond.defvjp(lambda *given: (_beyond(*given), given[2:]), _beyond_backward)
