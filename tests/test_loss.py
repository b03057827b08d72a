"""The tiled cross entropy: equal to the plain formula, without ever holding all logits.

B rows, T tokens, D width, V vocabulary.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mesh
from tiny_model import loud_parameters, random_rows, tiny_config, tiny_model

from maxbatch.errors import UserError
from maxbatch.models.registry import Model
from maxbatch.training.loss import LossOptions, cross_entropy_parts, loss_options, loss_sum
from maxbatch.training.metrics import NO_METRICS
from maxbatch.training.tiles import keeps_gradients, num_tiles, unwritten

B, T, D, V = 3, 12, 8, 29


class Inputs(NamedTuple):
  hidden_BTD: jax.Array
  matrix_DV: jax.Array
  targets_BT: jax.Array
  weights_BT: jax.Array


def inputs(scale: float = 1.0, dtype: str = "float32") -> Inputs:
  """Random arrays; weights are 0, 1 or between, and the last row is all padding."""
  random = np.random.default_rng(0)
  weights_BT = random.choice([0.0, 0.5, 1.0], (B, T))
  weights_BT[-1] = 0.0
  return Inputs(
    hidden_BTD=jnp.asarray(random.normal(size=(B, T, D)) * scale, dtype),
    matrix_DV=jnp.asarray(random.normal(size=(D, V)), dtype),
    targets_BT=jnp.asarray(random.integers(0, V, (B, T)), jnp.int32),
    weights_BT=jnp.asarray(weights_BT, jnp.float32),
  )


class Result(NamedTuple):
  loss: np.ndarray
  d_hidden_BTD: np.ndarray
  d_matrix_DV: np.ndarray


def tiled(
  x: Inputs, tiles: int, z_weight: float = 0.0, soft_cap: float = 0.0, *, is_kept: bool = False
) -> Result:
  """Value and gradients by the function under test; of 3 times the sum, as a caller may scale."""
  options = LossOptions(tiles, z_weight, soft_cap, is_kept=is_kept)

  def total(hidden_BTD: jax.Array, matrix_DV: jax.Array) -> jax.Array:
    rows = x.targets_BT, x.weights_BT
    return cross_entropy_parts(hidden_BTD, matrix_DV, *rows, options).loss.sum()

  @jax.jit
  def both(*arrays: jax.Array) -> Any:
    scaled = jax.value_and_grad(lambda *arrays: 3 * total(*arrays), (0, 1))
    return scaled(*arrays), total(*arrays)

  (loss, gradients), value = both(*x[:2])
  np.testing.assert_allclose(loss, 3 * value, rtol=1e-6)
  return Result(np.asarray(value), *(np.asarray(gradient) for gradient in gradients))


def plain(x: Inputs, z_weight: float = 0.0, soft_cap: float = 0.0) -> Result:
  """The same by the formula and its derivative, in float64."""
  hidden_BTD, matrix_DV, _, weights_BT = (np.asarray(part, np.float64) for part in x)
  logits_BTV = hidden_BTD @ matrix_DV
  capped_BTV = soft_cap * np.tanh(logits_BTV / soft_cap) if soft_cap else logits_BTV
  largest_BT1 = capped_BTV.max(-1, keepdims=True)
  log_z_BT1 = largest_BT1 + np.log(np.exp(capped_BTV - largest_BT1).sum(-1, keepdims=True))
  is_target_BTV = np.eye(V)[np.asarray(x.targets_BT)]
  losses_BT = (log_z_BT1 + z_weight * log_z_BT1**2)[..., 0] - (is_target_BTV * capped_BTV).sum(-1)
  d_BTV = np.exp(capped_BTV - log_z_BT1) * (1 + 2 * z_weight * log_z_BT1) - is_target_BTV
  d_BTV *= 3 * weights_BT[..., None]
  if soft_cap:
    d_BTV *= 1 - (capped_BTV / soft_cap) ** 2
  return Result(
    np.asarray((weights_BT * losses_BT).sum()),
    d_BTV @ matrix_DV.T,
    np.einsum("btd,btv->dv", hidden_BTD, d_BTV),
  )


def assert_close(result: Result, expected: Result, rtol: float) -> None:
  for name, a, b in zip(Result._fields, result, expected, strict=True):
    allowed = rtol * np.abs(b).max()
    np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=allowed, err_msg=name)


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize(
  ("tiles", "z_weight"),
  [*((tiles, 0.01) for tiles in (1, 2, 3, 5, 7, 11, T)), (1, 0.0), (5, 0.0)],
)
def test_equals_the_formula(tiles, z_weight, is_kept):
  x = inputs()
  assert_close(tiled(x, tiles, z_weight, is_kept=is_kept), plain(x, z_weight), 2e-6)


@pytest.mark.parametrize("tiles", [1, 5])
def test_capped_logits_equal_the_formula(tiles):
  x = inputs()
  assert_close(tiled(x, tiles, 0.01, 1.5), plain(x, 0.01, 1.5), 2e-6)
  assert plain(x, 0.0, 1.5).loss < 0.9 * plain(x).loss


def test_z_loss_matters():
  assert plain(inputs(), 0.01).loss > 1.01 * plain(inputs()).loss


@pytest.mark.parametrize("tiles", [1, T])
def test_tokens_of_weight_zero_give_nothing(tiles):
  x = inputs()._replace(weights_BT=jnp.zeros((B, T)))
  result = tiled(x, tiles, 0.01)
  assert all(not part.any() for part in result)
  assert not tiled(inputs(), tiles, 0.01).d_hidden_BTD[-1].any()


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("tiles", [1, 2])
def test_bfloat16_states_cost_no_more_than_their_own_rounding(tiles, is_kept):
  x = inputs(dtype="bfloat16")
  result = tiled(x, tiles, 0.01, is_kept=is_kept)
  assert result.loss.dtype == np.float32
  assert result.d_hidden_BTD.dtype == result.d_matrix_DV.dtype == jnp.bfloat16
  expected = plain(x, 0.01)
  np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
  assert_close(result, expected, 0.01)


@pytest.mark.parametrize("of_hidden", [False, True])
def test_kept_gradients_of_frozen_arrays_are_not_formed(of_hidden):
  x = inputs()
  options = LossOptions(3, is_kept=True)

  def loss(trained: jax.Array) -> jax.Array:
    hidden_BTD, matrix_DV = (trained, x.matrix_DV) if of_hidden else (x.hidden_BTD, trained)
    rows = x.targets_BT, x.weights_BT
    return cross_entropy_parts(hidden_BTD, matrix_DV, *rows, options).loss.sum()

  expected = tiled(x, 3, is_kept=True)
  result = jax.grad(loss)(x.hidden_BTD if of_hidden else x.matrix_DV)
  wanted = expected.d_hidden_BTD if of_hidden else expected.d_matrix_DV
  np.testing.assert_allclose(3 * result, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_logits_stay_finite(dtype):
  x = inputs(scale=1e4, dtype=dtype)
  result = tiled(x, 2)
  assert float(jnp.abs(x.hidden_BTD @ x.matrix_DV).max()) > 1e4
  assert all(np.isfinite(part).all() for part in result)
  np.testing.assert_allclose(result.loss, plain(x).loss, rtol=1e-5)


# --- through the model ----------------------------------------------------------------------------


@functools.cache
def loss_of(model: Model) -> jax.stages.Wrapped:
  return jax.jit(functools.partial(loss_sum, model))


def test_z_loss_is_for_training_only():
  plain_model, model = tiny_model(), tiny_model("z_loss_multiplier=0.1")
  parameters, rows = loud_parameters(model), random_rows(2)
  without = loss_of(plain_model)(parameters, rows, None)
  np.testing.assert_array_equal(loss_of(model)(parameters, rows, None), without)
  assert float(loss_of(model)(parameters, rows, jax.random.key(0))) > 1.01 * float(without)


def test_padding_does_not_count():
  model, rows = tiny_model(), random_rows(2)
  parameters = loud_parameters(model)
  weights_BT = rows.weights.at[1, 5:].set(0.0)
  padded = rows._replace(weights=weights_BT)
  other = padded._replace(targets=rows.targets.at[1, 5:].set(0))
  loss = loss_of(model)(parameters, padded, None)
  np.testing.assert_array_equal(loss_of(model)(parameters, other, None), loss)
  assert float(loss) < float(loss_of(model)(parameters, rows, None))


# --- memory ---------------------------------------------------------------------------------------

LARGE_V, LARGE_T, LARGE_B = 4096, 64, 2


@functools.cache
def compiled_gradient(tiles: int) -> jax.stages.Compiled:
  """Loss and gradients of a narrow model with a large vocabulary."""
  large = f"vocab_size={LARGE_V}", f"num_vocab_tiling={tiles}", "base_num_decoder_layers=1"
  model = tiny_model(*large, "logits_via_embedding=true", "base_emb_dim=4", length=LARGE_T)
  rows = random_rows(LARGE_B, LARGE_T)
  step = jax.value_and_grad(lambda parameters: loss_sum(model, parameters, rows, None))
  return jax.jit(step).lower(model.shapes()).compile()


def largest_array(compiled: jax.stages.Compiled) -> int:
  """Elements of the largest array in the compiled program."""
  text = compiled.as_text()
  assert text is not None
  shapes = re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)
  return max(math.prod(int(size) for size in shape.split(",")) for shape in shapes)


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
  analysis = compiled.memory_analysis()
  assert analysis is not None
  return analysis.temp_size_in_bytes


def test_all_logits_at_once_are_never_held():
  logits = LARGE_B * LARGE_T * LARGE_V
  assert largest_array(compiled_gradient(1)) >= logits
  assert largest_array(compiled_gradient(8)) <= logits / 8


def test_memory_shrinks_with_the_tiles():
  one, four, eight = (temporary_bytes(compiled_gradient(tiles)) for tiles in (1, 4, 8))
  logits_bytes = LARGE_B * LARGE_T * LARGE_V * 4
  assert one >= logits_bytes
  assert four < one - 0.7 * logits_bytes
  assert eight < four - 0.1 * logits_bytes


# --- how many tiles -------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1, 3, 4, 127, 128])
def test_the_tiles_that_are_asked_for(wanted):
  assert num_tiles(tiny_config(f"num_vocab_tiling={wanted}"), 2, 128) == wanted


def test_more_tiles_than_tokens_are_refused():
  with pytest.raises(UserError) as caught:
    num_tiles(tiny_config("num_vocab_tiling=129"), 2, 128)
  assert str(caught.value) == (
    "num_vocab_tiling=129 must be at most max_target_length=128: a tile has at least one token of "
    "each row; for example num_vocab_tiling=128"
  )


@pytest.mark.parametrize(
  ("rows", "length", "vocabulary", "tiles"),
  [
    (8, 128, 259, 1),
    (1, 4096, 4096, 1),
    (2, 4096, 4096, 2),
    # 8 × 2048 × 128256 × 4 bytes are 125.25 times 64 MiB; 128 is the next that divides 2048.
    (8, 2048, 128_256, 128),
    # A single token of all rows may be larger than a tile: then it is the tile.
    (100_000, 2, 128_256, 2),
    # A prime length: no tile per token.
    (2, 4093, 4096, 2),
    (8, 2039, 128_256, 125),
  ],
)
def test_unset_cuts_narrow_models_into_pieces_of_64_mebibytes(rows, length, vocabulary, tiles):
  assert num_tiles(tiny_config(f"vocab_size={vocabulary}"), rows, length) == tiles


def test_tiles_have_as_many_tokens_as_the_model_is_wide_where_that_is_more():
  config = tiny_config("vocab_size=128256", "base_emb_dim=4096")
  assert num_tiles(config, 8, 2048) == 4
  with jax.sharding.use_abstract_mesh(mesh(tensor=4).abstract_mesh):
    assert num_tiles(config, 8, 2048) == 4


def test_tiles_have_at_least_4096_tokens_on_gpus_or_a_gibibyte_of_logits(monkeypatch):
  monkeypatch.setattr("maxbatch.training.tiles.is_for_gpu", lambda: True)
  narrow, wide = (tiny_config("vocab_size=65536", f"base_emb_dim={D}") for D in (256, 8192))
  assert num_tiles(narrow, 8, 2048) == 4
  assert num_tiles(narrow, 2, 2048) == 1
  assert num_tiles(narrow, 8, 2048, is_kept=True) == 4
  assert num_tiles(wide, 8, 2048) == 4
  assert num_tiles(tiny_config("vocab_size=128256"), 8, 2048) == 8
  with jax.sharding.use_abstract_mesh(mesh(fsdp=2, tensor=2).abstract_mesh):
    assert num_tiles(narrow, 8, 2048) == 2


def test_tiles_are_sized_by_what_one_device_holds():
  config = tiny_config("vocab_size=65536")
  assert num_tiles(config, 16, 64) == 4
  with jax.sharding.use_abstract_mesh(mesh(fsdp=2, tensor=2).abstract_mesh):
    assert num_tiles(config, 16, 64) == 1


def test_gradients_of_logits_are_kept_where_they_are_no_larger_than_the_matrix_s():
  config = tiny_config("vocab_size=128256", "base_emb_dim=4096")
  assert keeps_gradients(config, 4, 2048, "bfloat16")
  assert not keeps_gradients(config, 5, 2048, "bfloat16")
  assert not keeps_gradients(config, 4, 2048, "float32")
  with jax.sharding.use_abstract_mesh(mesh(fsdp=4).abstract_mesh):
    assert keeps_gradients(config, 16, 2048, "bfloat16")


def test_tiles_that_add_to_nothing_are_smaller():
  wide = "vocab_size=128256", "base_emb_dim=4096"
  assert num_tiles(tiny_config(*wide), 4, 2048) == 2
  assert num_tiles(tiny_config(*wide), 4, 2048, is_kept=True) == 16
  model = tiny_model("vocab_size=65536", "base_emb_dim=2048", "dtype=bfloat16")
  options = [
    loss_options(model, rows, 512, is_training=is_training, metrics=NO_METRICS)
    for rows, is_training in ((8, True), (8, False), (9, True), (1, True))
  ]
  # 4096 tokens are twice the width: their logits take twice the gradient's 512 MiB.
  assert [(x.tiles, x.is_kept) for x in options] == [(8, True), (2, False), (4, False), (1, False)]


def test_kept_gradients_have_memory_on_tpus_once_there_are_hidden_states(monkeypatch):
  x = inputs()
  plain = tiled(x, 3, is_kept=True)
  monkeypatch.setattr("maxbatch.training.tiles.is_for_tpu", lambda: True)
  program = jax.make_jaxpr(lambda hidden_BTD: unwritten(hidden_BTD, (3, V)))(x.hidden_BTD)
  # XLA's schedulers keep a conditional behind what it depends on.
  assert "cond" in [e.primitive.name for e in program.eqns]
  for result, expected in zip(tiled(x, 3, is_kept=True), plain, strict=True):
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("is_kept", [False, True])
def test_no_sum_over_tiles_where_their_gradients_are_kept(is_kept):
  x, options = inputs(dtype="bfloat16"), LossOptions(3, is_kept=is_kept)

  def loss(matrix_DV: jax.Array) -> jax.Array:
    arrays = x.hidden_BTD, matrix_DV, x.targets_BT, x.weights_BT
    return cross_entropy_parts(*arrays, options).loss.sum()

  equations = jax.make_jaxpr(jax.grad(loss))(x.matrix_DV).eqns
  loops = [e for e in equations if e.primitive.name == "scan"]
  results = [str(variable.aval) for loop in loops for variable in loop.outvars]
  assert (f"bfloat16[3,{B},{T // 3},{V}]" in results) == is_kept
  assert (f"float32[{D},{V}]" in results) != is_kept


def test_the_measured_gradient_is_the_same_where_gradients_of_logits_are_kept():
  x = inputs()

  def of(is_kept: bool) -> list[np.ndarray]:
    def loss(hidden_BTD: jax.Array, matrix_DV: jax.Array, probe_B1: jax.Array) -> jax.Array:
      arrays = hidden_BTD, matrix_DV, x.targets_BT, x.weights_BT
      options = LossOptions(6, is_kept=is_kept)
      return cross_entropy_parts(*arrays, options, probe_B1, jnp.float32(2)).loss.sum()

    return list(map(np.asarray, jax.grad(loss, (0, 1, 2))(*x[:2], jnp.zeros((B, 1)))))

  for result, expected in zip(of(is_kept=True), of(is_kept=False), strict=True):
    assert expected.any()
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)
