"""Tiles of tokens, one after the other: how many of them, how rows are cut into them, the loop over them.

B rows, T tokens, D width, V vocabulary, C tokens of a tile.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxbatch.config.schema import ModelConfig
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import local_shape
from maxbatch.models.forms import is_for_gpu, is_for_tpu

_SMALLEST_TILE = 64 * 2**20
"""Bytes of logits."""
_LARGEST_KEPT = 512
"""Tokens: products with as many take about as long as a v6e reads the matrix, on other TPUs longer."""
SMALLEST_ON_GPU = 4096
"""Tokens, of all rows that a device has: with 512 a product with GPT-2's output matrix takes 1.3 times as
long on an H100, which then waits for memory, and each tile starts a dozen kernels."""
LARGEST_ON_GPU = 2**30
"""Bytes of logits, whatever the tokens: that of Llama-3-8B in tiles of 4,096 tokens instead of 2,048 saves 1 ms
in two seconds, and takes 1.2 GB."""


def keeps_gradients(config: ModelConfig, rows: int, length: int, dtype: DTypeLike) -> bool:
  """Returns whether the gradient of all logits, in the format of the products, takes at most as many
  bytes a device as the matrix's in float32. It is then kept and multiplied once, after the last tile:
  the sum over tiles need not be held, nor read and written for each."""
  tokens = math.prod(local_shape(("batch", "length"), (rows, length)))
  return tokens * jnp.dtype(dtype).itemsize <= config.base_emb_dim * 4


def num_tiles(config: ModelConfig, rows: int, length: int, *, is_kept: bool = False) -> int:
  """Returns the tiles that `length` tokens are cut into: num_vocab_tiling, or so many that the logits
  of each have at most about the bytes of the output matrix's gradient a device, or 64 MiB.

  Each tile reads the whole matrix and adds to the whole gradient, which takes longer than its products
  if it has few tokens: with tiles of 64 MiB half of the step of Qwen3-0.6B on a v5e-16 was this. The
  gradient has to be held anyway; logits of its size have as many tokens as the model is wide.

  Where the logits' gradient is kept (`is_kept`), tiles add to nothing, are a quarter as large, and have at
  most _LARGEST_KEPT tokens. On GPUs no tile has fewer than SMALLEST_ON_GPU tokens, where there are so many,
  unless their logits have more than LARGEST_ON_GPU bytes.

  Raises:
    UserError: more tiles are asked for than there are tokens.
  """
  if config.num_vocab_tiling > length:
    raise UserError(
      f"num_vocab_tiling={config.num_vocab_tiling} must be at most max_target_length={length}: a "
      f"tile has at least one token of each row; for example num_vocab_tiling={length}"
    )
  if config.num_vocab_tiling:
    return config.num_vocab_tiling
  V, D = config.vocab_size, config.base_emb_dim
  logits = math.prod(local_shape(("batch", "length", "vocab"), (rows, length, V))) * 4
  gradient = math.prod(local_shape((None, "vocab"), (D, V))) * 4
  rows, length = local_shape(("batch", "length"), (rows, length))
  of_token = logits // (rows * length)
  largest = min(gradient // 4, of_token * _LARGEST_KEPT) if is_kept else gradient
  largest = max(largest, _SMALLEST_TILE)
  if is_for_gpu():
    largest = max(largest, of_token * SMALLEST_ON_GPU)
    largest = min(largest, LARGEST_ON_GPU)
  wanted = min(length, -(-logits // largest))
  # Tiles that divide the row need no copy; but a prime length has only those of one token.
  equal = next(tiles for tiles in range(wanted, length + 1) if length % tiles == 0)
  return equal if equal <= 2 * wanted else wanted


def cut_tokens(tiles: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Cuts (B, T, …) → (tiles, B, C, …) along T, the tokens that a device has.

  Where tiles do not divide T, the last ones are filled up with zeros: tokens without weight.
  """
  B, T = arrays[0].shape[:2]
  C = -(-T // tiles)

  def cut(x: jax.Array) -> jax.Array:
    whole = jnp.pad(x, [(0, 0), (0, tiles * C - T)] + [(0, 0)] * (x.ndim - 2)) if T % tiles else x
    return jnp.moveaxis(whole.reshape(B, tiles, C, *x.shape[2:]), 1, 0)

  return tuple(map(cut, arrays))


def scan_tiles(body: Callable[..., Any], carry: Any, cut: tuple[jax.Array, ...], tiles: int) -> Any:
  """Scans as lax.scan does; a single tile needs no loop."""
  if tiles > 1:
    return jax.lax.scan(body, carry, cut)
  carry, out = body(carry, tuple(x[0] for x in cut))
  return carry, jax.tree.map(lambda x: x[None], out)


def unwritten(x: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Returns an array of x's dtype to be written from end to end, which on TPU has no memory before x has.

  Flags for collectives beside products move what a scan stacks ahead of the layers' forward pass. An array
  out of a conditional stays behind its condition, and takes no time: whatever x is, nothing is written.
  """
  if not is_for_tpu():
    return jax.lax.empty(tuple(shape), x.dtype)
  # Two that differ: the compiler would take equal ones out of their conditional.
  return jax.lax.cond(
    x[(0,) * x.ndim] > 0,
    lambda: jax.lax.empty(tuple(shape), x.dtype),
    lambda: jax.lax.empty(tuple(shape)[::-1], x.dtype).reshape(shape),
  )
