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
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from maxbatch.config.schema import ModelConfig, is_latent
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device
from maxbatch.hardware.shard_maps import divisible_heads
from maxbatch.hardware.sharding import auto_axes_spec
from maxbatch.precision.formats import BFLOAT16, FLOAT32, Format

Kernel = Callable[..., jax.Array]
"""(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window) → out_BTNH, on one device; where the kernel knows
it, with soft_cap too."""

_LANES = 128
"""Tokens in the smallest block the TPU kernel works on."""

_BLOCKS = (512, 384, 256, 128)
"""Blocks of tokens, the best first: larger ones keep the matrix unit busier. The largest still fits
in the vector memory of a v5e and a v6e with head_dim=256 in float32."""

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
  needs whole rows: where context divides their tokens, an all-to-all divides heads instead, and
  another one tokens again (Jacobs et al. 2023).

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
  ways = mesh.shape["tensor"] * mesh.shape.get("context", 1)
  _check_heads(q_BTNH.shape[2], mesh.shape["tensor"], mesh.shape.get("context", 1))
  k_BSKH, v_BSKH = (divisible_heads(x, q_BTNH.shape[2], ways) for x in (k_BSKH, v_BSKH))
  axes = ("batch", None, "heads_of_rows", "head_dim")
  queries, keys = (auto_axes_spec(axes, x.shape) for x in (q_BTNH, k_BSKH))
  rows = auto_axes_spec(("batch", None), q_BTNH.shape[:2])
  B, _, N, _ = q_BTNH.shape
  sinks_BN = [] if sink_BN is None else [jnp.broadcast_to(sink_BN, (B, N))]
  sinks = [auto_axes_spec(("batch", "heads_of_rows"), (B, N))] * len(sinks_BN)
  # Without check_vma, which splash attention does not know, an axis that divides nothing costs an
  # all-reduce of equal gradients: correct, but only `stage` can be such an axis and be large.
  return jax.shard_map(
    lambda q, k, v, ids, *sinks: run(q, k, v, ids, window, *sinks),
    in_specs=(queries, keys, keys, rows, *sinks),
    out_specs=queries,
    axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    check_vma=False,
  )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, *sinks_BN)


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
  T, N, H = q_BTNH.shape[1:]
  length = -(-T // _LANES) * _LANES
  pad = functools.partial(_pad, length=length)
  segments = None if segment_ids_BT is None else splash.SegmentIds(*(pad(segment_ids_BT),) * 2)
  scaled = q_BTNH / math.sqrt(H), k_BSKH, v_BSKH
  q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(pad(x), 1, 2) for x in scaled)
  kernel = _splash_kernel(N, length, window, soft_cap, interpret=interpret)
  out_BNTH = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments, sink_BN)
  return jnp.swapaxes(out_BNTH, 1, 2)[:, :T]


def _splash_kernel(
  num_heads: int, length: int, window: int, soft_cap: float, *, interpret: bool
) -> Callable[..., Any]:
  """Returns the kernel for a row of `length` tokens; it skips blocks that the mask leaves empty."""
  if window:
    mask = splash.LocalMask((length, length), window_size=(window - 1, 0), offset=0)
  else:
    mask = splash.CausalMask((length, length))
  X = next(block for block in _BLOCKS if length % block == 0)
  return splash.make_splash_mha(
    splash.MultiHeadMask([mask] * num_heads),
    block_sizes=splash.BlockSizes(
      block_q=X,
      block_kv=X,
      block_q_dkv=X,
      block_kv_dkv=X,
      block_q_dq=X,
      block_kv_dq=X,
    ),
    attn_logits_soft_cap=soft_cap or None,
    residual_checkpoint_name="context",
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )


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
