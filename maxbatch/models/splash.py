"""The attention kernel of TPUs: splash attention with masks that skip blocks, and the cores it occupies.

B rows, T query, S key tokens, N query, K key/value heads, H width of a head, X tokens of a block.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.estimate.attention_blocks import USUAL, attention_block, joint_block

LANES = 128
"""Tokens in the smallest block the kernel works on."""
_TWO_CORES = ("TPU v4", "TPU v5")
"""Chips that jax counts as one device of two cores, by what it calls them: a kernel divides samples over these."""


def heads_as_samples(num_samples: int, num_heads: int, num_kv_heads: int) -> int:
  """Returns in how many parts the heads of a sample go through the kernel as if each were a sample.

  The backward kernels occupy both cores of a chip only with two samples or more.

  Args:
    num_samples: of a device.
    num_heads: its heads of queries; those of keys and values each serve as many.
  """
  has_two = num_samples == 1 and num_heads % 2 == num_kv_heads % 2 == 0
  return 2 if has_two and device_kind() in _TWO_CORES else 1


def attend(
  kernel: Any,
  parts: int,
  q_BNTH: jax.Array,
  k_BKSH: jax.Array,
  v_BKSH: jax.Array,
  segments: Any,
  sink_BN: jax.Array | None,
) -> jax.Array:
  """Returns the kernel's out_BNTH of a device's samples.

  Args:
    kernel: of as many heads of queries as a part has.
    parts: of the heads of a single sample, see `heads_as_samples`.
    segments: ids of queries (B, T) and keys (B, S); None: each row is one.
  """
  if parts == 1:
    return jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments, sink_BN)

  def divide(x: jax.Array) -> jax.Array:
    return x.reshape(parts, x.shape[1] // parts, *x.shape[2:])

  heads = (divide(x) for x in (q_BNTH, k_BKSH, v_BKSH))
  sink = None if sink_BN is None else divide(sink_BN)
  ids = jax.tree.map(lambda x: jnp.broadcast_to(x, (parts, *x.shape[1:])), segments)
  return jax.vmap(kernel)(*heads, ids, sink).reshape(q_BNTH.shape)


def segment_ids(queries_BT: jax.Array, keys_BS: jax.Array) -> Any:
  """Returns the kernel's segments, of which a token sees its own."""
  return _splash().SegmentIds(queries_BT, keys_BS)


def device_kind() -> str:
  """Returns what jax calls the device that is compiled for; "" without one."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.device_kind if device else ""


def splash_kernel(
  num_heads: int,
  q_BTNH: jax.Array,
  places_T: np.ndarray,
  window: int,
  soft_cap: float,
  *,
  shards: int = 1,
  interpret: bool,
) -> Any:
  """Returns the kernel for queries like these at these places of a row, divided over devices; it skips
  blocks that the mask leaves empty."""
  length = len(places_T)
  shape = length, length
  splash, (seen_before, seen_in_window) = _splash(), _masks()
  mask = seen_in_window(shape, window) if window else seen_before(shape)
  mask.q_sequence = places_T.astype(np.int32)
  part = length // (2 * shards) if shards > 1 else length
  head_bytes = q_BTNH.shape[-1] * q_BTNH.dtype.itemsize
  asked = device_kind(), length, part, window, head_bytes
  X, joint = attention_block(*asked), joint_block(*asked)
  backward = joint or X
  return splash.make_splash_mha(
    splash.MultiHeadMask([mask] * num_heads),
    block_sizes=splash.BlockSizes(
      block_q=X,
      block_kv=X,
      block_kv_compute=min(X, USUAL),
      block_q_dkv=backward,
      block_kv_dkv=backward,
      block_kv_dkv_compute=min(backward, USUAL),
      block_q_dq=None if joint else X,
      block_kv_dq=None if joint else X,
      use_fused_bwd_kernel=joint > 0,
    ),
    attn_logits_soft_cap=soft_cap or None,
    residual_checkpoint_name="context",
    head_shards=1,
    q_seq_shards=shards,
    interpret=interpret,
  )


class _SameForAll(np.ndarray):
  """A block with the same value everywhere, which numpy would look for in each element."""

  def any(self, *_: Any, **__: Any) -> Any:
    """Returns the value."""
    return self.flat[0]

  all = any


def _block_of_one(places: np.ndarray, keys: slice, length: int, window: float) -> np.ndarray | None:
  """Returns whether queries at these places see some keys, where the answer is one for all pairs; else None.

  Of rows of 131,072 tokens jax would compare all pairs of 65,536 blocks, three times, before a step compiles.
  """
  low, high, (first, end, _) = int(places.min()), int(places.max()), keys.indices(length)
  is_full = low >= end - 1 and high - first < window
  if is_full or high < first or low - (end - 1) >= window:
    return np.broadcast_to(np.bool_(is_full), (len(places), end - first)).view(_SameForAll)
  return None


@functools.cache
def _splash() -> Any:
  """Returns the module of the kernel for TPUs: to import it, with Pallas, takes a fifteenth of a start."""
  from jax.experimental.pallas.ops.tpu import splash_attention

  return splash_attention


@functools.cache
def _masks() -> tuple[Any, Any]:
  """Returns the masks of rows, and of rows in which each token sees so many, itself included."""
  splash = _splash()

  class SeenBefore(splash.CausalMask):
    """What tokens see at their places of a row: all before them."""

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
      """Returns whether queries see keys, of a slice of both."""
      one = _block_of_one(self.q_sequence[idx[0]], idx[1], self.shape[1], math.inf)
      return super().__getitem__(idx) if one is None else one

  class SeenInWindow(splash.LocalMask):
    """What they see where each sees so many tokens, itself included."""

    def __init__(self, shape: tuple[int, int], window: int):
      super().__init__(shape, window_size=(window - 1, 0), offset=0)
      self._window = window

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
      """Returns whether queries see keys, of a slice of both."""
      one = _block_of_one(self.q_sequence[idx[0]], idx[1], self.shape[1], self._window)
      return super().__getitem__(idx) if one is None else one

  return SeenBefore, SeenInWindow
