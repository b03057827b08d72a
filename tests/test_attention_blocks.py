"""Blocks of the TPUs' attention kernel: which ones it takes, and what scripts/attention_blocks.py counts of them."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_flash import by_products, operands, segments, with_gradients

from maxbatch.estimate import attention_blocks
from maxbatch.estimate.attention_blocks import attention_block, joint_block
from maxbatch.estimate.attention_kernels import (
  FILE,
  AttentionKernel,
  Heads,
  causal_kernel,
  layer_seconds,
)
from maxbatch.estimate.chips import CHIPS, GPUS
from maxbatch.estimate.flops import products
from maxbatch.estimate.hlo import parse
from maxbatch.models import flash, splash
from scripts.attention_blocks import Bundles, head_bytes, head_cycles, read_bundles

V5E, V5P, V6E = "TPU v5 lite", "TPU v5", "TPU v6 lite"


@pytest.mark.parametrize(
  ("choose", "device_kind", "length", "part", "window", "head_bytes", "block"),
  [
    (attention_block, V6E, 2048, 2048, 0, 256, 1024),
    (attention_block, V5P, 2048, 2048, 0, 512, 1024),
    (attention_block, V5E, 2048, 2048, 0, 256, 512),
    (attention_block, V5E, 4096, 4096, 0, 256, 1024),
    (attention_block, V6E, 1024, 1024, 0, 256, 512),
    (attention_block, V6E, 3072 + 512, 3072 + 512, 0, 256, 512),
    (attention_block, V6E, 8192, 8192, 0, 1024, 512),
    (attention_block, V6E, 8192, 8192, 2047, 256, 512),
    (attention_block, V6E, 8192, 8192, 2048, 256, 1024),
    (attention_block, V6E, 8192, 512, 0, 256, 512),
    (attention_block, V6E, 8192 + 384, 384, 0, 256, 384),
    (attention_block, "NVIDIA H100", 8192, 8192, 0, 256, 512),
    (attention_block, "", 2048, 128, 0, 256, 128),
    # One backward kernel where a row is one block.
    (joint_block, V6E, 1024, 1024, 0, 256, 1024),
    (joint_block, V6E, 2048, 2048, 0, 256, 2048),
    (joint_block, "TPU7x", 1024, 1024, 0, 128, 1024),
    # Parts to add up, wide heads, windows, shares of rows, other chips.
    (joint_block, V6E, 4096, 4096, 0, 256, 0),
    (joint_block, V6E, 2048 + 512, 2048 + 512, 0, 256, 0),
    (joint_block, V6E, 2048, 2048, 0, 512, 0),
    (joint_block, V6E, 2048, 2048, 1024, 256, 0),
    (joint_block, V6E, 2048, 1024, 0, 256, 0),
    (joint_block, V5P, 2048, 2048, 0, 256, 0),
    (joint_block, V5E, 2048, 2048, 0, 256, 0),
  ],
)
def test_blocks_are_the_largest_that_pay_and_divide(
  choose: Callable[..., int],
  device_kind: str,
  length: int,
  part: int,
  window: int,
  head_bytes: int,
  block: int,
):
  assert choose(device_kind, length, part, window, head_bytes) == block


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
  for module in (attention_blocks, splash):
    monkeypatch.setattr(module, "USUAL", 128)
  arrays = operands(2, 1, 512)
  kernel = splash.splash_kernel(2, arrays[0], np.arange(512), 0, 0.0, interpret=True)
  assert kernel.fwd_mask_info.block_mask.shape[-2:] == (2, 2)
  wanted = with_gradients(by_products(segments(2, 512), 0), *arrays)
  for ours, theirs in zip(with_gradients(attend_in_blocks(512), *arrays), wanted, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


def test_one_backward_kernel_gives_the_gradients_of_two(monkeypatch: pytest.MonkeyPatch):
  arrays, sink_BN = operands(4, 2, 256), jnp.array([[0.5, -1.0, 0.0, 2.0]] * 2)

  def attend(q: Any, k: Any, v: Any) -> jax.Array:
    return flash.tpu_attention(q, k, v, segments(2, 256), 0, sink_BN, soft_cap=2.0, interpret=True)

  wanted = with_gradients(attend, *arrays)
  monkeypatch.setattr(attention_blocks, "ONE_BACKWARD_KERNEL", ("",))
  monkeypatch.setattr(attention_blocks, "WHOLE_ROWS", (256,))
  program = str(jax.make_jaxpr(lambda *x: with_gradients_of(attend, *x))(*arrays))
  assert "splash_mha_dkv" in program
  assert "splash_mha_dq" not in program
  for ours, theirs in zip(with_gradients(attend, *arrays), wanted, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


def with_gradients_of(attend: Any, *arrays: jax.Array) -> Any:
  """The gradients of the sum."""
  return jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))(*arrays)


@pytest.mark.parametrize(("device_kind", "blocks"), [(V6E, 2), (V5E, 4)])
def test_the_kernel_takes_the_blocks_of_the_chip_that_it_is_compiled_for(
  device_kind: str, blocks: int
):
  device = jax.sharding.AbstractDevice(device_kind, 1, "tpu")
  mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    kernel = splash.splash_kernel(
      2, jnp.zeros((1, 2048, 2, 128), jnp.bfloat16), np.arange(2048), 0, 0.0, interpret=True
    )
  infos = kernel.fwd_mask_info, kernel.dkv_mask_info, kernel.dq_mask_info
  shapes = [info and info.block_mask.shape[-2:] for info in infos]
  # Of a v6e one backward kernel whose block is the row.
  backward = [(1, 1), None] if device_kind == V6E else [(blocks, blocks)] * 2
  assert shapes == [(blocks, blocks), *backward]


def test_a_kernel_takes_its_bundles_on_the_cores_that_its_samples_occupy():
  """Of a v6e 32 heads of rows of 2,048 tokens in four blocks of 1,024, three of which the mask leaves."""
  step, block, ends = attention_cycles("v6e", "fwd", 128, "1024/1024/512")
  one = causal_kernel("fwd", 1024, 2048, 0, Heads(128, 2, 32, 1))
  cycles = 4 * step + 3 * block + 2 * ends
  assert one.seconds(CHIPS["v6e"]) == pytest.approx(32 * cycles / CHIPS["v6e"].clock)
  assert one.pairs == 32 * 3 * 1024**2
  # In a chip of two cores a backward kernel of one sample has one of them.
  for kernel, cores in (("fwd", 1), ("dkv", 2)):
    alone, both = (causal_kernel(kernel, 512, 2048, 0, Heads(128, 2, 8, n)) for n in (1, 2))
    chip = CHIPS["v5p"]
    assert alone.seconds(chip) == pytest.approx(cores * both.seconds(chip))
  assert one.seconds(GPUS["h100"]) == 0


@pytest.mark.parametrize(
  ("generation", "kernels"),
  [("v6e", {"fwd": 1024, "fused": 2048}), ("v5p", {"fwd": 1024, "dq": 1024, "dkv": 1024})],
)
def test_a_layer_takes_the_kernels_that_its_model_runs(generation: str, kernels: dict[str, int]):
  """Of rows of 2,048 tokens, where the instructions take longer than the products."""
  chip, of = CHIPS[generation], Heads(128, 2, 32, 2)
  each = {
    kernel: causal_kernel(kernel, block, 2048, 0, of).seconds(chip)
    for kernel, block in kernels.items()
  }
  for again in (False, True):
    wanted = sum(each.values()) + again * each["fwd"]
    assert layer_seconds(chip, 2048, 0, of, again=again) == pytest.approx(wanted)


def test_blocks_and_widths_that_were_not_counted_are_taken_for_the_nearest():
  known = causal_kernel("fwd", 512, 2048, 0, Heads(128, 2, 1, 1))
  fewer = dataclasses.replace(known, blocks=(512, 256, 256), visits=2 * known.visits)
  step, block, ends = attention_cycles("v6e", "fwd", 128, "384/384/384")
  share = 512 * 256 / 384**2
  cycles = fewer.steps * step + fewer.visits * block * share + fewer.ends * ends
  assert fewer.seconds(CHIPS["v6e"]) == pytest.approx(cycles / CHIPS["v6e"].clock)
  narrow = dataclasses.replace(known, width=96)
  assert narrow.seconds(CHIPS["v6e"]) == known.seconds(CHIPS["v6e"])
  wide = dataclasses.replace(known, width=512)
  assert wide.seconds(CHIPS["v6e"]) > dataclasses.replace(known, width=256).seconds(CHIPS["v6e"])


def attention_cycles(generation: str, kernel: str, width: int, blocks: str) -> list[int]:
  """What the table has."""
  return json.loads(FILE.read_text())[generation][kernel][str(width)][blocks]


@pytest.mark.parametrize("kernel", ["fwd", "dq", "dkv"])
def test_a_compiled_step_names_its_kernels_blocks(kernel: str):
  """As libtpu 0.0.51 and 0.0.52 write them."""
  suffix = "" if kernel == "fwd" else f"_{kernel}"
  names = f'block_q{suffix}\\": 1024, \\"block_kv{suffix}\\": 512'
  if kernel != "dq":
    names += f', \\"block_kv{suffix}_compute\\": 256'
  if kernel == "fwd":
    names += ', \\"block_q_dkv\\": 128, \\"block_kv_dkv\\": 128, \\"block_kv_dkv_compute\\": 128'
  grid = "2,4" if kernel != "dkv" else "4,2"
  program = parse(f"""HloModule jit_step
ENTRY %main () -> bf16[4,8,2048,128] {{
  %grid = s8[1,{grid}]{{2,1,0}} parameter(0)
  %q = bf16[4,8,2048,128]{{3,2,1,0}} parameter(1)
  %k = bf16[4,2,2048,128]{{3,2,1,0}} parameter(2)
  ROOT %splash_mha_{kernel}_no_residuals.1 = bf16[4,8,2048,128]{{3,2,1,0}} custom-call(%grid, %q, %k), \
custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"{names}}}"
}}}}, metadata={{op_name="jit(step)/splash_mha_{kernel}_no_residuals/pallas_call"}}
}}
""")
  within = program.computations["main"]
  one = within.instructions[f"splash_mha_{kernel}_no_residuals.1"]
  result = products(program, within, one).attention
  assert result == AttentionKernel(
    kernel,
    (1024, 512, 512 if kernel == "dq" else 256),
    width=128,
    heads=32,
    samples=4,
    steps=8,
    visits=6,
    ends=4 if kernel == "dkv" else 2,
  )


@pytest.mark.parametrize("device_kind", [V5P, V6E])
def test_a_sample_alone_occupies_both_cores_with_halves_of_its_heads(device_kind: str):
  """On chips of two cores; and whatever the halves, results and gradients stay."""
  q, k, v = (x[:1] for x in operands(4, 2, 256))
  ids_BT, sink_BN = segments(2, 256)[:1], jnp.array([[0.5, -1.0, 0.0, 2.0]])

  def attend(q: Any, k: Any, v: Any) -> jax.Array:
    return flash.tpu_attention(q, k, v, ids_BT, 0, sink_BN, interpret=True)

  wanted = with_gradients(attend, q, k, v)
  device = jax.sharding.AbstractDevice(device_kind, 1, "tpu")
  mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    program = str(jax.make_jaxpr(attend)(q, k, v))
  assert ("[2,2,256,16]" in program) == (device_kind == V5P)
  assert splash.heads_as_samples(1, 4, 1) == 1
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(splash, "device_kind", lambda: device_kind)
    assert splash.heads_as_samples(1, 4, 1) == splash.heads_as_samples(2, 4, 2) == 1
    assert splash.heads_as_samples(1, 4, 2) == (2 if device_kind == V5P else 1)
    ours = with_gradients(attend, q, k, v)
  for one, other in zip(ours, wanted, strict=True):
    np.testing.assert_array_equal(one, other)
