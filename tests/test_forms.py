"""What is written in another form for TPUs or GPUs computes the same, to rounding: all forms on CPU.

B rows, T tokens, N heads, H width of a head, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import mesh
from tiny_model import loud_parameters, random_rows, tiny_model

from maxbatch.core.topology import Topology
from maxbatch.hardware.devices import topology_devices
from maxbatch.hardware.sharding import constrain, make_mesh
from maxbatch.models import forms
from maxbatch.models.layers import Projection
from maxbatch.precision.policy import PLAIN
from maxbatch.training.loss import loss_parts

B, T, N, H = 2, 3, 4, 6


def test_the_form_follows_the_devices_of_the_mesh_around():
  pytest.importorskip("libtpu")
  elsewhere = make_mesh(Topology.of(data=4), topology_devices("v5e-4"))
  results = [(forms.is_for_tpu(), forms.is_for_gpu())]
  for devices in (mesh(data=4), elsewhere):
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
      results.append((forms.is_for_tpu(), forms.is_for_gpu()))
  assert results == [(False, False), (False, False), (True, False)]


@pytest.fixture
def in_both(monkeypatch: pytest.MonkeyPatch):
  """Calls a function of arrays in the form for CPUs, and in that for TPUs or GPUs."""

  def both(device: str, function, *arrays) -> tuple[Any, Any]:
    results = []
    for is_for_it in (False, True):
      monkeypatch.setattr(forms, f"is_for_{device}", lambda is_for_it=is_for_it: is_for_it)
      results.append(jax.jit(lambda *arrays: function(*arrays))(*arrays))
    return results[0], results[1]

  return both


def assert_close(result: Any, expected: Any, tolerance: float) -> None:
  leaves = zip(jax.tree.leaves_with_path(result), jax.tree.leaves(expected), strict=True)
  for (path, a), b in leaves:
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=str(path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotations_are_the_same_to_the_bit_of_their_dtype(in_both, dtype):
  random = np.random.default_rng(0)
  x_BTNH, d_BTNH = (jnp.asarray(random.normal(size=(B, T, N, H)), dtype) for _ in range(2))
  angles_BTH = jnp.asarray(random.uniform(0, 9, (B, T, H // 2)), jnp.float32)

  def turned(x_BTNH, d_BTNH):
    def cast(x_BTNH):
      return forms.rotated(x_BTNH, jnp.cos(angles_BTH), jnp.sin(angles_BTH)).astype(dtype)

    y_BTNH, pullback = jax.vjp(cast, x_BTNH)
    return y_BTNH, pullback(d_BTNH)[0]

  plain, whole = in_both("tpu", turned, x_BTNH, d_BTNH)
  # Sums of two products may be rounded once or twice.
  assert_close(whole, plain, 1e-6 if dtype == "float32" else 0.0)


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "fsdp": 2, "context": 2}])
def test_tokens_are_looked_up_by_columns_as_they_are_in_the_whole_table(in_both, sizes):
  axes, random = ("vocab", "embed"), np.random.default_rng(0)
  table_VD, d_BTD = random.normal(size=(24, 2048)), random.normal(size=(8, 4, 2048))
  ids_BT = random.integers(0, 3, (8, 4)) * 7  # Some often, most never.

  def differentiated(table_VD, ids_BT, d_BTD):
    def embedded(table_VD):
      return forms.embedded(table_VD, axes, ids_BT, PLAIN)

    x_BTD, pullback = jax.vjp(embedded, constrain(table_VD, axes))
    return x_BTD, pullback(d_BTD)[0]

  with jax.set_mesh(mesh(**sizes)):
    arrays = jnp.float32(table_VD), jnp.asarray(ids_BT), jnp.float32(d_BTD)
    whole, by_columns = in_both("tpu", differentiated, *arrays)
    text = jax.jit(differentiated).lower(*arrays).as_text()
    narrow = arrays[0][:, :1024], arrays[1], arrays[2][..., :1024]
    text_of_narrow = jax.jit(differentiated).lower(*narrow).as_text()
  assert "all_to_all" in text
  assert "all_to_all" not in text_of_narrow
  assert_close(by_columns, whole, 1e-6)
  np.testing.assert_array_equal(by_columns[0], arrays[0][ids_BT])


def test_a_kernel_whose_last_dim_devices_divide_is_gathered_along_the_first(in_both):
  axes = "heads", "head_dim", "embed"
  projection = Projection(nnx.Rngs(0), (N, H), (8,), axes, bias=False)
  graph, weights, others = nnx.split(projection, nnx.Param, ...)
  random = np.random.default_rng(0)
  x_BTNH, d_BTD = (jnp.float32(random.normal(size=(4, T, *each))) for each in ((N, H), (8,)))

  def differentiated(weights, x_BTNH, d_BTD):
    def project(weights, x_BTNH):
      return nnx.merge(graph, weights, others)(x_BTNH)

    weights = jax.tree.map(lambda x: constrain(x, axes), weights)
    y_BTD, pullback = jax.vjp(project, weights, x_BTNH)
    return y_BTD, pullback(d_BTD)

  with jax.set_mesh(mesh(fsdp=4)):
    plain, turned = in_both("tpu", differentiated, weights, x_BTNH, d_BTD)
    text = jax.jit(differentiated).lower(weights, x_BTNH, d_BTD).as_text()
  assert f"-> tensor<8x{N}x{H}xf32>" in text
  assert_close(turned, plain, 1e-6)


@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_loss_gradients_and_probes_of_a_model_are_the_same(in_both, device):
  more = ["use_qk_norm=true", "attention_qkv_bias=true", "base_num_decoder_layers=1"]
  more += ["mlp_activation=gelu", "num_vocab_tiling=2"] if device == "gpu" else []
  model = tiny_model(*more, "gns=all")
  parameters, rows = loud_parameters(model), random_rows(4, 12)

  def differentiated(parameters, rows):
    def loss(parameters, probes):
      return loss_parts(model, parameters, rows, None, probes).loss.sum()

    probes = model.probes(rows.inputs.shape[0], 1)
    return jax.value_and_grad(loss, argnums=(0, 1))(parameters, probes)

  plain, whole = in_both(device, differentiated, parameters, rows)
  assert_close(whole, plain, 2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_gelu_and_its_gradient_are_those_by_tanh_in_double_precision(monkeypatch, dtype, tolerance):
  monkeypatch.setattr(forms, "is_for_gpu", lambda: True)
  x = jnp.concatenate([jnp.linspace(-9, 9, 999), jnp.array([0.0, -1e4, 1e4])]).astype(dtype)
  y, pullback = jax.vjp(forms.gelu, x)
  exact = np.asarray(x, np.float64)
  factor, cubic = np.sqrt(2 / np.pi), 0.044715
  tanh = np.tanh(factor * (exact + cubic * exact**3))
  slope = (1 + tanh) / 2 + exact / 2 * (1 - tanh**2) * factor * (1 + 3 * cubic * exact**2)
  np.testing.assert_allclose(np.asarray(y, float), exact * (1 + tanh) / 2, tolerance, tolerance)
  d_x = np.asarray(pullback(jnp.ones_like(x))[0], float)
  np.testing.assert_allclose(d_x, slope, tolerance, 2 * tolerance)


def test_the_largest_logit_and_its_sum_are_the_same_in_one_pass(in_both):
  logits = np.random.default_rng(1).normal(0, 30, (2, 3, 1000)).astype(np.float32)
  logits[0, 0] = -1e4  # All of them equal, and far below zero.
  plain, one_pass = in_both("gpu", forms.largest_and_sum, jnp.asarray(logits))
  np.testing.assert_array_equal(one_pass[0], plain[0])
  np.testing.assert_allclose(one_pass[1], plain[1], rtol=1e-6)
  assert float(plain[1][0, 0, 0]) == 1000
  logits[1, 0, 7] = np.nan  # So is the loss, and the step is skipped.
  assert all(np.isnan(sums[1][1, 0, 0]) for sums in in_both("gpu", forms.largest_and_sum, logits))


def test_a_divided_vocabulary_keeps_the_form_that_can_be_divided(monkeypatch):
  monkeypatch.setattr(forms, "is_for_gpu", lambda: True)
  logits, targets = jnp.zeros((4, 2, 8)), jnp.zeros((4, 2), int)

  def traced():
    def both(logits):
      hit = targets[..., None] == jnp.arange(8)[None, None]
      return forms.largest_and_sum(logits), forms.chosen(logits, targets, hit)

    return str(jax.make_jaxpr(both)(logits))

  with jax.sharding.use_abstract_mesh(mesh(tensor=2, data=2).abstract_mesh):
    divided = traced()
  whole = traced()
  assert "gather" in whole
  assert "gather" not in divided
  assert " reduce_max" in divided
  assert " reduce_max" not in whole
