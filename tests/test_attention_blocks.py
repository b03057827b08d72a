"""Blocks of the TPUs' attention kernel: which ones it takes, and what scripts/attention_blocks.py counts of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_flash import by_products, operands, segments, with_gradients

from maxbatch.estimate import attention_blocks
from maxbatch.estimate.attention_blocks import attention_block
from maxbatch.models import flash
from scripts.attention_blocks import Bundles, head_bytes, head_cycles, read_bundles

V5E, V5P, V6E = "TPU v5 lite", "TPU v5", "TPU v6 lite"


@pytest.mark.parametrize(
  ("device_kind", "length", "part", "window", "head_bytes", "block"),
  [
    (V6E, 2048, 2048, 0, 256, 1024),
    (V5P, 2048, 2048, 0, 512, 1024),
    (V5E, 2048, 2048, 0, 256, 512),
    (V5E, 4096, 4096, 0, 256, 1024),
    (V6E, 1024, 1024, 0, 256, 512),
    (V6E, 3072 + 512, 3072 + 512, 0, 256, 512),
    (V6E, 8192, 8192, 0, 1024, 512),
    (V6E, 8192, 8192, 2047, 256, 512),
    (V6E, 8192, 8192, 2048, 256, 1024),
    (V6E, 8192, 512, 0, 256, 512),
    (V6E, 8192 + 384, 384, 0, 256, 384),
    ("NVIDIA H100", 8192, 8192, 0, 256, 512),
    ("", 2048, 128, 0, 256, 128),
  ],
)
def test_blocks_are_the_largest_that_pay_and_divide(
  device_kind: str, length: int, part: int, window: int, head_bytes: int, block: int
):
  assert attention_block(device_kind, length, part, window, head_bytes) == block


DUMP = """\
LB: loop body
     0   :  { %s1 = smov.u32 0 }
   0x1 LB: > { %s2 = sphi %s1, %s9 }
   0x2   : > { %3 = sbr.rel (%p1) target bundleno = 70 (0x46), region = 44 }
   0x8   : > { %4 = sbr.rel (%p2) target bundleno = 20 (0x14), region = 60  ;;  %s5 = sand.u32 1, %s2 }
  0x14 PF: > { %6 = sbr.rel (%p3) target bundleno = 60 (0x3c), region = 64 }
  0x3c PF: > { %7 = vst [vmem:[#allocation]] %v1 }
  0x46 PF: > { %8 = sbr.rel (!%p4) target bundleno = 1 (0x1), region = 5 }
  0x4b   :  { %9 = vsyncpa [#allocation13], 1 }
"""


def test_bundles_are_those_of_the_loop_by_what_branches_jump_over():
  """The loop has 74 bundles: 35 of a block, 7 of ends; the branch around both is no part of its own."""
  assert read_bundles(DUMP) == Bundles(step=32, block=35, ends=7)
  with pytest.raises(SystemExit, match="found 2"):
    read_bundles(DUMP + "  0x50 LB: > { %s2 = sphi %s1, %s9 }\n")


def test_a_head_takes_the_steps_of_its_grid_and_the_blocks_below_the_diagonal():
  parts = Bundles(step=1, block=100, ends=10_000)
  assert head_cycles("fwd", (512, 512, 512), parts, 2048) == 16 + 10 * 100 + 4 * 10_000
  assert head_cycles("dkv", (512, 1024, 512), parts, 2048) == 8 + 6 * 100 + 2 * 10_000
  assert head_cycles("dq", (1024, 512, 512), parts, 2048) == 8 + 6 * 100 + 2 * 10_000
  # Keys and values of ten blocks, with ids; queries, outputs, positions, ids and sums once.
  assert head_bytes("fwd", (512, 512, 512), 2048, 128) == 10 * 512 * 544 + 2048 * 2048


def attend_in_blocks(T: int) -> Any:
  """The TPU's kernel, interpreted."""
  ids_BT = segments(2, T)
  return lambda q, k, v: flash.tpu_attention(q, k, v, ids_BT, 0, interpret=True)


def test_a_block_of_keys_is_multiplied_in_parts_with_the_same_result(
  monkeypatch: pytest.MonkeyPatch,
):
  """Blocks of 256 that multiply 128 keys at once stand for those of 1,024."""
  monkeypatch.setattr(attention_blocks, "_BLOCKS", (256, 128))
  monkeypatch.setattr(attention_blocks, "_SHORTEST", {"": 512})
  monkeypatch.setattr(attention_blocks, "LARGEST", 256)
  for module in (attention_blocks, flash):
    monkeypatch.setattr(module, "USUAL", 128)
  arrays = operands(2, 1, 512)
  kernel = flash._splash_kernel(2, arrays[0], np.arange(512), 0, 0.0, interpret=True)
  assert kernel.fwd_mask_info.block_mask.shape[-2:] == (2, 2)
  wanted = with_gradients(by_products(segments(2, 512), 0), *arrays)
  for ours, theirs in zip(with_gradients(attend_in_blocks(512), *arrays), wanted, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(("device_kind", "blocks"), [(V6E, 2), (V5E, 4)])
def test_the_kernel_takes_the_blocks_of_the_chip_that_it_is_compiled_for(
  device_kind: str, blocks: int
):
  device = jax.sharding.AbstractDevice(device_kind, 1, "tpu")
  mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    kernel = flash._splash_kernel(
      2, jnp.zeros((1, 2048, 2, 128), jnp.bfloat16), np.arange(2048), 0, 0.0, interpret=True
    )
  for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info):
    assert info.block_mask.shape[-2:] == (blocks, blocks)
