"""Flash attention: softmax attention whose logits never reach the devices' main memory.

B rows, T query, S key tokens, N query, K key/value heads, H width of a head, X tokens of a block.

The kernels are jax's own: splash attention, written in Pallas, on TPU, and cuDNN's on NVIDIA GPUs
(Dao et al. 2022 is the algorithm of both). Both keep logits, maximum and sum of the softmax in
float32 and round the weights as the chip's matrix unit does, so they agree with
dot_product_attention to the rounding of the inputs' dtype, not bit by bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from maxbatch.config.schema import ModelConfig, is_latent
from maxbatch.data.rows import in_order, whole_in_order
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device
from maxbatch.hardware.sharding import auto_axes_spec, auto_axis_sizes, local_shape
from maxbatch.models.context_attention import divisible_heads, over_own_heads
from maxbatch.models.splash import LANES, attend, heads_as_samples, segment_ids, splash_kernel
from maxbatch.precision.formats import BFLOAT16, FLOAT32, Format

Kernel = Callable[..., jax.Array]
"""(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window) → out_BTNH, on one device; where the kernel knows
it, with soft_cap too."""

_AMPERE, _HOPPER = (8, 0), (9, 0)


def resolve_attention(
  config: ModelConfig, max_target_length: int, device: Device, compute: Format = FLOAT32
) -> ModelConfig:
  """Resolves attention=auto to what `device` can do in a format; returns the configuration.

  Raises:
    UserError: attention=flash where there is no kernel for it.
  """
  if config.attention == "dot_product":
    return config
  capability = str(getattr(device, "compute_capability", ""))
  obstacle = flash_obstacle(config, max_target_length, device.platform, capability, compute)
  if obstacle is None:
    return dataclasses.replace(config, attention="flash")
  if config.attention == "flash":
    raise UserError(f"attention=flash: {obstacle}; attention=auto and attention=dot_product work")
  return dataclasses.replace(config, attention="dot_product")


def flash_obstacle(
  config: ModelConfig,
  max_target_length: int,
  platform: str,
  compute_capability: str = "",
  compute: Format = FLOAT32,
) -> str | None:
  """Returns why flash attention cannot be used, and what would work; None if it can.

  The platform is cpu, gpu or tpu, the compute capability of a GPU such as 9.0 (AMD's begin with gfx), and
  `compute` the format of queries, keys and values.
  """
  strategy = config.context_parallel_strategy
  if strategy == "ring":
    return (
      "context_parallel_strategy=ring computes attention by matrix products; kernels take ulysses"
    )
  if platform == "gpu" and strategy == "all_gather":
    return "cuDNN's kernel takes whole rows, not context_parallel_strategy=all_gather; use ulysses"
  if platform == "tpu" and compute not in (FLOAT32, BFLOAT16):
    return f"the kernel for TPUs computes in float32 and bfloat16, not in dtype={compute.name}"
  if platform == "tpu":
    return None
  if platform != "gpu" or not compute_capability[:1].isdigit():
    chips = f"{platform} {compute_capability}".strip()
    return f"there is a kernel for TPUs and NVIDIA GPUs, but the devices are {chips}"
  return _cudnn_obstacle(config, max_target_length, compute_capability, compute)


def _cudnn_obstacle(
  config: ModelConfig, max_target_length: int, capability: str, compute: Format
) -> str | None:
  """Returns the limits of cuDNN's kernel, as jax checks them while it compiles, only earlier."""
  chip = tuple(int(part) for part in capability.split("."))
  if chip < _AMPERE:
    return f"cuDNN's kernel needs compute capability 8.0, but the GPU has {capability}"
  if config.attn_logits_soft_cap:
    return f"cuDNN's kernel knows no attn_logits_soft_cap={config.attn_logits_soft_cap:g}"
  if is_latent(config):
    return "cuDNN's kernel takes keys as wide as values, and attention_type=mla has others"
  if config.attention_sink:
    return "cuDNN's kernel knows no attention_sink=true"
  if compute != BFLOAT16:
    return f"cuDNN's kernel computes in bfloat16, not in dtype={compute.name}; use dtype=bfloat16"
  widest = 256 if chip >= _HOPPER else 128
  if config.head_dim % 8 or config.head_dim > widest:
    working = min(widest, -(-config.head_dim // 8) * 8)
    return (
      f"on this GPU cuDNN's kernel takes a head_dim that is a multiple of 8 and at most {widest}, "
      f"not head_dim={config.head_dim}; use for example head_dim={working}"
    )
  if max_target_length % 2:
    return (
      "cuDNN's kernel, when rows are packed, takes an even max_target_length, not "
      f"max_target_length={max_target_length}; use max_target_length={max_target_length + 1}"
    )
  return None


def has_devices() -> bool:
  """Returns whether the devices are known here: under a mesh, as in training and evaluation.

  A model called without one, to write a sample of text, multiplies matrices instead.
  """
  return jax.sharding.get_abstract_mesh().abstract_device is not None


def flash_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_ids_BT: jax.Array | None,
  window: int,
  kernel: Kernel | None = None,
  *,
  soft_cap: float = 0.0,
  sink_BN: jax.Array | None = None,
) -> jax.Array:
  """Returns causal attention (B, T, N, H), each device working on its own rows and heads.

  The compiler cannot divide these kernels by itself. So a shard_map takes over all mesh axes that
  none around it has taken: rows are divided over fsdp and heads over tensor, as everywhere. A kernel
  needs whole rows: where context divides their tokens, it divides heads meanwhile (ulysses).

  Args:
    k_BSKH: keys, S equal to T.
    segment_ids_BT: tokens see only their own segment; None: each row is one segment.
    window: tokens each token sees, itself included; 0: all before it.
    kernel: what to run on each device; None: what belongs to the mesh's devices.
    soft_cap: logits become cap·tanh(logit/cap), on a TPU; 0: they stay as they are.
    sink_BN: as in `dot_product_attention`, on a TPU.

  Raises:
    UserError: context divides tokens, and not the heads.
  """
  mesh = jax.sharding.get_abstract_mesh()
  run = kernel or KERNELS[mesh.abstract_device.platform]
  run = functools.partial(run, soft_cap=soft_cap) if soft_cap else run
  B, _, N, _ = q_BTNH.shape
  _check_heads(N, mesh.shape["tensor"], mesh.shape.get("context", 1))
  sink_BN = None if sink_BN is None else jnp.broadcast_to(sink_BN, (B, N))

  def attend(q, k, v, ids, sink_BN):
    return run(q, k, v, ids, window, *([] if sink_BN is None else [sink_BN]))

  rows = q_BTNH, k_BSKH, v_BSKH, [segment_ids_BT], sink_BN
  return over_own_heads(attend, *rows, by_heads=True)


def flash_attention_to_all_keys(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_ids_BT: jax.Array | None,
  window: int,
  order_T: np.ndarray | None,
  *,
  soft_cap: float = 0.0,
  sink_BN: jax.Array | None = None,
  keeps_all: bool = False,
  interpret: bool = False,
) -> jax.Array:
  """Returns `flash_attention` of a TPU where context divides the tokens of rows: each device attends for its
  own tokens, with a mask of its own, to keys and values that are all-gathered.

  Args:
    order_T: in which tokens stand, `token_order`; None: as they were read.
    keeps_all: whether the backward pass would keep the gathered keys, which it gathers again.

  Raises:
    UserError: a device's tokens are not whole blocks of the kernel.
  """
  sizes = auto_axis_sizes()
  B, T, N, H = q_BTNH.shape
  D = sizes["context"]
  if T % (2 * D * LANES):
    near = max(1, round(T / (2 * D * LANES))) * 2 * D * LANES
    raise UserError(
      f"max_target_length={T} must be a multiple of {2 * LANES} × the {D} devices that share a row, with "
      f"context_parallel_strategy=all_gather and the kernel of TPUs; for example max_target_length={near}"
    )
  places_T = np.arange(T) if order_T is None else order_T
  back_T = np.argsort(places_T)
  own_heads = N // sizes["tensor"] if N % sizes["tensor"] == 0 else N
  own_B, *_ = local_shape(("batch", None), (B, T))
  kv_heads = divisible_heads(k_BSKH, N, sizes["tensor"]).shape[2]
  parts = heads_as_samples(own_B, own_heads, kv_heads * own_heads // N)
  kernel = splash_kernel(
    own_heads // parts, q_BTNH, places_T, window, soft_cap, shards=D, interpret=interpret
  )
  # Of this axis alone: jax (0.12) finds no shape of a shard on a mesh with axes that a shard_map has taken.
  by_shard = NamedSharding(AbstractMesh((D,), ("context",)), PartitionSpec(None, "context"))
  others = [(kernel, kernel.manual_sharding_spec(by_shard))]
  if segment_ids_BT is not None:
    ids_BS = whole_in_order(segment_ids_BT, back_T)
    others += [(ids_BS, auto_axes_spec(("batch", None), ids_BS.shape))]
  sink_BN = None if sink_BN is None else jnp.broadcast_to(sink_BN, (B, N))

  def attend_to_all(q, k, v, ids, sink_BN, kernel, ids_BS=None):
    k, v = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
    k, v = (in_order(x, back_T) for x in (k, v))
    segments = None if ids_BS is None else segment_ids(ids, ids_BS)
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q / math.sqrt(H), k, v))
    out_BNTH = attend(kernel, parts, q_BNTH, k_BKSH, v_BKSH, segments, sink_BN)
    return jnp.swapaxes(out_BNTH, 1, 2)

  if keeps_all:
    attend_to_all = jax.checkpoint(
      attend_to_all, policy=jax.checkpoint_policies.save_only_these_names("context")
    )
  rows = q_BTNH, k_BSKH, v_BSKH, [segment_ids_BT], sink_BN
  return over_own_heads(attend_to_all, *rows, others, by_heads=False)


def _check_heads(num_heads: int, tensor: int, context: int) -> None:
  """Refuses rows whose tokens are divided over devices that cannot divide their heads."""
  if context == 1 or num_heads % (tensor * context) == 0:
    return
  fitting = math.gcd(num_heads // math.gcd(num_heads, tensor), context)
  raise UserError(
    f"attention=flash divides the heads of a row over the devices that share its tokens, and "
    f"base_num_query_heads={num_heads} is not a multiple of tensor {tensor} × context {context}; use "
    f"attention=dot_product, or for example ici_context_parallelism={fitting}"
  )


def tpu_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_ids_BT: jax.Array | None,
  window: int,
  sink_BN: jax.Array | None = None,
  *,
  soft_cap: float = 0.0,
  interpret: bool = False,
) -> jax.Array:
  """Computes splash attention of a device's rows and heads; `interpret` runs it without a TPU.

  Rows are padded to whole blocks. The padding comes last, so no token sees it.
  """
  B, T, N, H = q_BTNH.shape
  length = -(-T // LANES) * LANES
  pad = functools.partial(_pad, length=length)
  segments = None if segment_ids_BT is None else segment_ids(*(pad(segment_ids_BT),) * 2)
  scaled = q_BTNH / math.sqrt(H), k_BSKH, v_BSKH
  q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(pad(x), 1, 2) for x in scaled)
  parts = heads_as_samples(B, N, k_BSKH.shape[2])
  places_T = np.arange(length)
  kernel = splash_kernel(N // parts, q_BTNH, places_T, window, soft_cap, interpret=interpret)
  out_BNTH = attend(kernel, parts, q_BNTH, k_BKSH, v_BKSH, segments, sink_BN)
  return jnp.swapaxes(out_BNTH, 1, 2)[:, :T]


def _pad(x: jax.Array, length: int) -> jax.Array:
  """Returns zeros after the tokens of (B, T, …), up to `length`."""
  return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def gpu_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_ids_BT: jax.Array | None,
  window: int,
  *,
  implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
  """Computes cuDNN's attention of one device's rows and heads; implementation="xla" runs anywhere.

  jax can tell cuDNN about segments only by a mask: (B, 1, T, S) in bfloat16, and as much again for
  its gradient, which nobody needs. That is 2·N times smaller than float32 logits but still grows
  with T². Without segments (packing=false) there is no mask.
  """
  attend = functools.partial(
    jax.nn.dot_product_attention, is_causal=True, implementation=implementation
  )
  if segment_ids_BT is None:
    local = (window - 1, 0) if 0 < window < q_BTNH.shape[1] else None
    return attend(q_BTNH, k_BSKH, v_BSKH, local_window_size=local)
  mask_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
  if window:
    # In the mask, because cuDNN before 9.10.2 takes a mask or a window, not both.
    places_T = jnp.arange(q_BTNH.shape[1])
    mask_BTS &= (places_T[:, None] - places_T[None, :] < window)[None]
  return attend(q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None])


KERNELS: Mapping[str, Kernel] = {"tpu": tpu_attention, "gpu": gpu_attention}
