"""Flash attention: when it can be had, and that its kernels compute what matrix products compute.

B rows, T query and S key tokens, N query heads, K key/value heads, H width of a head.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_model import GEMMA_LIKE, loud_parameters, random_rows, tiny_model

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.load import load_config
from maxbatch.config.schema import ModelConfig
from maxbatch.core.topology import Topology
from maxbatch.data.rows import in_order
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import make_mesh
from maxbatch.models import flash, splash
from maxbatch.models.dot_product import dot_product_attention
from maxbatch.precision.formats import BFLOAT16, FORMATS
from maxbatch.training.build import build_trainer
from maxbatch.training.loss import loss_sum

KERNELS = {
  "tpu": functools.partial(flash.tpu_attention, interpret=True),
  "gpu": functools.partial(flash.gpu_attention, implementation="xla"),
}


def model(**keys: object) -> ModelConfig:
  """The default model with `keys` changed."""
  return load_config(["config=base", *(f"{key}={value}" for key, value in keys.items())]).model


def test_every_tpu_has_a_kernel():
  assert flash.flash_obstacle(model(head_dim=80), 1000, "tpu") is None
  assert flash.flash_obstacle(model(attn_logits_soft_cap=50), 1000, "tpu") is None


def test_an_nvidia_gpu_has_a_kernel_for_bfloat16():
  assert flash.flash_obstacle(model(head_dim=64), 128, "gpu", "9.0", BFLOAT16) is None


@pytest.mark.parametrize(
  ("keys", "length", "platform", "capability", "message"),
  [
    (
      {},
      128,
      "cpu",
      "",
      "there is a kernel for TPUs and NVIDIA GPUs, but the devices are cpu",
    ),
    (
      {"dtype": "bfloat16"},
      128,
      "gpu",
      "gfx942",
      "there is a kernel for TPUs and NVIDIA GPUs, but the devices are gpu gfx942",
    ),
    (
      {"dtype": "bfloat16"},
      128,
      "gpu",
      "7.5",
      "cuDNN's kernel needs compute capability 8.0, but the GPU has 7.5",
    ),
    (
      {"dtype": "bfloat16", "attn_logits_soft_cap": 50},
      128,
      "gpu",
      "9.0",
      "cuDNN's kernel knows no attn_logits_soft_cap=50",
    ),
    (
      {"dtype": "bfloat16", "attention_type": "mla"},
      128,
      "gpu",
      "9.0",
      "cuDNN's kernel takes keys as wide as values, and attention_type=mla has others",
    ),
    (
      {"dtype": "bfloat16", "attention_sink": True},
      128,
      "gpu",
      "9.0",
      "cuDNN's kernel knows no attention_sink=true",
    ),
    (
      {"dtype": "cbfloat16"},
      128,
      "tpu",
      "",
      "the kernel for TPUs computes in float32 and bfloat16, not in dtype=cbfloat16",
    ),
    (
      {"dtype": "float32"},
      128,
      "gpu",
      "9.0",
      "cuDNN's kernel computes in bfloat16, not in dtype=float32; use dtype=bfloat16",
    ),
    (
      {"dtype": "bfloat16", "head_dim": 256},
      128,
      "gpu",
      "8.6",
      "on this GPU cuDNN's kernel takes a head_dim that is a multiple of 8 and at most 128, not "
      "head_dim=256; use for example head_dim=128",
    ),
    (
      {"dtype": "bfloat16", "head_dim": 100},
      128,
      "gpu",
      "10.0",
      "on this GPU cuDNN's kernel takes a head_dim that is a multiple of 8 and at most 256, not "
      "head_dim=100; use for example head_dim=104",
    ),
    (
      {"dtype": "bfloat16"},
      127,
      "gpu",
      "9.0",
      "cuDNN's kernel, when rows are packed, takes an even max_target_length, not "
      "max_target_length=127; use max_target_length=128",
    ),
  ],
)
def test_an_obstacle_names_what_is_wrong_and_what_works(
  keys: dict[str, object], length: int, platform: str, capability: str, message: str
):
  compute = FORMATS[str(keys.get("dtype", "float32"))]
  result = flash.flash_obstacle(model(**keys), length, platform, capability, compute)
  assert result == message


def test_auto_multiplies_matrices_on_cpu():
  config = load_config(["config=base", "attention=auto"])
  layout = topology(config.mesh, 8)
  trainer = build_trainer(config, plan_batches(config.batch, config.run, layout), jax.devices())
  assert trainer.model.config == dataclasses.replace(config.model, attention="dot_product")


def test_auto_and_flash_are_flash_where_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(flash, "flash_obstacle", lambda *_: None)
  for choice in ("auto", "flash", "dot_product"):
    resolved = flash.resolve_attention(model(attention=choice), 128, jax.devices()[0])
    assert resolved.attention == ("dot_product" if choice == "dot_product" else "flash")


def test_flash_on_cpu_is_refused_before_anything_is_compiled():
  config = load_config(["config=base", "attention=flash"])
  layout = topology(config.mesh, 8)
  plan = plan_batches(config.batch, config.run, layout)
  message = (
    "attention=flash: there is a kernel for TPUs and NVIDIA GPUs, but the devices are cpu; "
    "attention=auto and attention=dot_product work"
  )
  with pytest.raises(UserError) as raised:
    build_trainer(config, plan, jax.devices())
  assert str(raised.value) == message


def operands(N: int, K: int, T: int, B: int = 2) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries, keys and values of `B` rows with heads of 16."""
  random = np.random.default_rng(N)
  q, k, v = (random.normal(size=(B, T, heads, 16)).astype(np.float32) for heads in (N, K, K))
  return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


def segments(B: int, T: int) -> jax.Array:
  """Three segments in every row, the borders elsewhere in each."""
  borders_B2 = np.array([[T // 5 + row, T // 2 + 3 * row] for row in range(B)])
  return jnp.asarray((np.arange(T)[None, :, None] >= borders_B2[:, None]).sum(-1), jnp.int32)


def with_gradients(attend, q_BTNH, k_BSKH, v_BSKH) -> list[np.ndarray]:
  """The output and its gradients by queries, keys and values, for one fixed cotangent."""

  @jax.jit
  def run(*arguments):
    out, pull = jax.vjp(attend, *arguments)
    return out, *pull(np.cos(np.arange(out.size)).astype(np.float32).reshape(out.shape))

  return [np.asarray(x) for x in run(q_BTNH, k_BSKH, v_BSKH)]


def by_products(
  segment_ids_BT: jax.Array | None,
  window: int,
  soft_cap: float = 0.0,
  sink_BN: jax.Array | None = None,
):
  """The same attention by matrix products, the mask written out."""

  def attend(q_BTNH, k_BSKH, v_BSKH):
    B, T = q_BTNH.shape[:2]
    back_TS = np.arange(T)[:, None] - np.arange(T)[None]
    seen_TS = (back_TS >= 0) & (back_TS < (window or T))
    ids_BT = jnp.zeros((B, T), int) if segment_ids_BT is None else segment_ids_BT
    mask_BTS = jnp.asarray(seen_TS)[None] & (ids_BT[:, :, None] == ids_BT[:, None])
    first_BT = jnp.argmax(mask_BTS, axis=-1)
    return dot_product_attention(q_BTNH, k_BSKH, v_BSKH, first_BT, soft_cap, sink_BN=sink_BN)

  return attend


@functools.cache
def wanted_of(K: int, T: int, packed: bool, window: int) -> list[np.ndarray]:
  """What every kernel should give."""
  ids_BT = segments(2, T) if packed else None
  return with_gradients(by_products(ids_BT, window), *operands(4, K, T))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
  ("K", "T", "packed", "window"),
  [(4, 128, False, 0), (2, 160, True, 0), (1, 256, False, 40), (2, 256, True, 40)],
  ids=["plain", "grouped, packed, padded", "one key head, window", "all at once"],
)
def test_a_kernel_equals_matrix_products(kernel: str, K: int, T: int, packed: bool, window: int):
  arrays, ids_BT = operands(4, K, T), segments(2, T) if packed else None
  got = with_gradients(lambda q, k, v: KERNELS[kernel](q, k, v, ids_BT, window), *arrays)
  for ours, theirs in zip(got, wanted_of(K, T, packed, window), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


def test_sinks_and_narrow_values_have_exact_gradients():
  """By matrix products, of two blocks of queries, and by the TPU's kernel, against a key of its own without a value."""
  (*arrays, v_BSKH), ids_BT = operands(4, 2, 256), segments(2, 256)
  arrays += [v_BSKH[..., :8]]
  sink_BN = jnp.asarray([[0.5, -1.0, 2.0, 0.0]])

  def formula(q_BTNH, k_BSKH, v_BSKH):
    logits_BNTS = jnp.einsum("btnh,bsnh->bnts", q_BTNH / 4, jnp.repeat(k_BSKH, 2, axis=2))
    back_TS = np.arange(256)[:, None] - np.arange(256)[None]
    seen_BTS = (ids_BT[:, :, None] == ids_BT[:, None]) & jnp.asarray(back_TS >= 0)[None]
    logits_BNTS = jnp.where(seen_BTS[:, None], logits_BNTS, -1e30)
    sinks_BNT1 = jnp.broadcast_to(sink_BN[..., None, None], (2, 4, 256, 1))
    weights = jax.nn.softmax(jnp.concatenate([logits_BNTS, sinks_BNT1], -1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v_BSKH, 2, axis=2))

  def kernel(q_BTNH, k_BSKH, v_BSKH):
    return flash.tpu_attention(
      q_BTNH, k_BSKH, v_BSKH, ids_BT, 0, sink_BN.repeat(2, 0), interpret=True
    )

  wanted = with_gradients(formula, *arrays)
  for attend in (by_products(ids_BT, 0, sink_BN=sink_BN), kernel):
    for ours, theirs in zip(with_gradients(attend, *arrays), wanted, strict=True):
      np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


def test_capped_logits_have_exact_gradients():
  """By matrix products and by the TPU's kernel, against the formula and autodiff."""
  arrays, ids_BT = operands(4, 2, 128), segments(2, 128)

  def formula(q_BTNH, k_BSKH, v_BSKH):
    q_BTKGH = q_BTNH.reshape(2, 128, 2, 2, 16) / 4
    logits_BKGTS = 0.5 * jnp.tanh(jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH) / 0.5)
    back_TS = np.arange(128)[:, None] - np.arange(128)[None]
    seen_BTS = (ids_BT[:, :, None] == ids_BT[:, None]) & jnp.asarray(
      (back_TS >= 0) & (back_TS < 40)
    )[None]
    weights = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], logits_BKGTS, -1e30))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_BSKH).reshape(q_BTNH.shape)

  wanted = with_gradients(formula, *arrays)

  def kernel(q_BTNH, k_BSKH, v_BSKH):
    return flash.tpu_attention(q_BTNH, k_BSKH, v_BSKH, ids_BT, 40, soft_cap=0.5, interpret=True)

  for attend in (by_products(ids_BT, 40, 0.5), kernel):
    for ours, theirs in zip(with_gradients(attend, *arrays), wanted, strict=True):
      np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


def test_layers_of_two_kinds_take_two_kernels(monkeypatch: pytest.MonkeyPatch):
  """A window that is data, in a scan, chooses between kernels compiled for one window each."""
  windows = []

  def kernel(q_BTNH, k_BSKH, v_BSKH, ids_BT, window):
    windows.append(window)
    return KERNELS["gpu"](q_BTNH, k_BSKH, v_BSKH, ids_BT, window)

  monkeypatch.setitem(flash.KERNELS, "cpu", kernel)
  mesh = make_mesh(Topology.of(fsdp=2), jax.devices()[:2])
  rows, results = random_rows(2)._replace(segment_ids=segments(2, 12)), []
  for attention in ("flash", "dot_product"):
    tiny = tiny_model(*GEMMA_LIKE, "attn_logits_soft_cap=0", f"attention={attention}")
    loss = functools.partial(loss_sum, tiny, rows=rows, dropout_key=None)
    with jax.set_mesh(mesh):
      results.append(jax.jit(jax.value_and_grad(loss))(loud_parameters(tiny)))
  assert set(windows) == {0, 4}
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max())),
    *results,
  )


@pytest.mark.parametrize(
  ("sizes", "N", "K"),
  [
    ((1, 2, 4, 1), 4, 2),
    ((2, 2, 2, 1), 4, 4),
    ((2, 1, 2, 2), 4, 1),
    ((1, 4, 2, 1), 3, 3),
    ((2, 1, 2, 1, 2), 4, 2),
  ],
  ids=["key heads repeated", "all axes", "stage idle", "heads whole", "tokens divided"],
)
def test_devices_with_their_own_rows_and_heads_equal_one(sizes: tuple[int, ...], N: int, K: int):
  """Under a mesh, and inside a shard_map over data as in the step; gradients too."""
  names = ("data", "fsdp", "tensor", "stage", "context")
  mesh = make_mesh(Topology(dict(zip(names, sizes, strict=False))), jax.devices())
  arrays, ids_BT = operands(N, K, 128, B=8), segments(8, 128)

  def attend(q_BTNH, k_BSKH, v_BSKH, ids_BT):
    return flash.flash_attention(q_BTNH, k_BSKH, v_BSKH, ids_BT, 40, KERNELS["gpu"])

  def on_data(q_BTNH, k_BSKH, v_BSKH):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      if sizes[0] == 1:
        return attend(q_BTNH, k_BSKH, v_BSKH, ids_BT)
      rows = PartitionSpec("data")
      return jax.shard_map(
        attend, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False
      )(q_BTNH, k_BSKH, v_BSKH, ids_BT)

  with jax.set_mesh(mesh):
    got = with_gradients(on_data, *arrays)
  wanted = with_gradients(by_products(ids_BT, 40), *arrays)
  for ours, theirs in zip(got, wanted, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(
  ("window", "in_zigzag", "sizes", "device_kind"),
  [
    (0, True, {"context": 2}, ""),
    (200, False, {"data": 2, "context": 2}, ""),
    (0, True, {"data": 2, "context": 2}, "TPU v5"),
  ],
)
def test_devices_that_gather_keys_mask_them_for_their_own_tokens(
  window: int,
  in_zigzag: bool,
  sizes: dict[str, int],
  device_kind: str,
  monkeypatch: pytest.MonkeyPatch,
):
  """Under a mesh, and inside a shard_map over data as in the step; a sample alone in halves of its heads."""
  monkeypatch.setattr(splash, "device_kind", lambda: device_kind)
  num_devices, T = math.prod(sizes.values()), 512
  mesh = make_mesh(Topology.of(**sizes), jax.devices()[:num_devices])
  arrays, ids_BT = operands(4, 2, T), segments(2, T)
  places_T = np.arange(T).reshape(4, -1)[[0, 3, 1, 2]].reshape(-1)
  order_T = places_T if in_zigzag else None
  places_T = places_T if in_zigzag else np.arange(T)

  def attend(*arrays):
    q, k, v, ids = (in_order(x, places_T) for x in arrays)
    out = flash.flash_attention_to_all_keys(
      q, k, v, ids, window, order_T, keeps_all=in_zigzag, interpret=True
    )
    return in_order(out, np.argsort(places_T))

  def on_data(*arrays):
    if "data" not in sizes:
      return attend(*arrays, ids_BT)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      rows = PartitionSpec("data")
      return jax.shard_map(
        attend, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False
      )(*arrays, ids_BT)

  with jax.set_mesh(mesh):
    got = with_gradients(on_data, *arrays)
  for ours, theirs in zip(got, with_gradients(by_products(ids_BT, window), *arrays), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 129, 300])
def test_blocks_that_are_not_compared_hold_what_the_mask_says(window: int):
  length, part = 1024, 128
  shape = length, length
  order_T = np.arange(length, dtype=np.int32).reshape(8, -1)[[0, 7, 1, 6, 2, 5, 3, 4]].reshape(-1)
  seen_before, seen_in_window = splash._masks()
  mask = seen_in_window(shape, window) if window else seen_before(shape)
  mask.q_sequence = order_T
  behind = order_T[:, None] - np.arange(length)[None]
  wanted = (behind >= 0) & (behind < (window or length))
  for rows, keys in np.ndindex(8, 8):
    at = slice(part * rows, part * (rows + 1)), slice(part * keys, part * (keys + 1))
    block = mask[at]
    np.testing.assert_array_equal(block, wanted[at])
    assert (block.any(), block.all()) == (wanted[at].any(), wanted[at].all())


def test_heads_that_the_devices_of_a_row_cannot_divide_are_refused():
  mesh = make_mesh(Topology.of(tensor=2, context=4), jax.devices())
  with jax.set_mesh(mesh), pytest.raises(UserError) as caught:
    jax.eval_shape(
      lambda q, k, v: flash.flash_attention(q, k, v, None, 0, KERNELS["gpu"]), *operands(4, 2, 128)
    )
  assert str(caught.value) == (
    "attention=flash divides the heads of a row over the devices that share its tokens, and "
    "base_num_query_heads=4 is not a multiple of tensor 2 × context 4; use attention=dot_product, or "
    "for example ici_context_parallelism=2"
  )


def test_without_a_mesh_nothing_is_known_of_the_devices():
  """A sample of text is written without one, so the model must multiply matrices there."""
  mesh = make_mesh(Topology.of(data=8), jax.devices())
  assert not flash.has_devices()
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    assert flash.has_devices()
