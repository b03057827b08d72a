"""What is written in another form for TPUs computes the same, to rounding: both forms on CPU.

B rows, T tokens, N heads, H width of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mesh
from tiny_model import loud_parameters, random_rows, tiny_model

from maxbatch.core.topology import Topology
from maxbatch.hardware.devices import topology_devices
from maxbatch.hardware.sharding import make_mesh
from maxbatch.models import forms
from maxbatch.training.loss import loss_parts

B, T, N, H = 2, 3, 4, 6


def test_the_form_follows_the_devices_of_the_mesh_around():
  pytest.importorskip("libtpu")
  elsewhere = make_mesh(Topology.of(data=4), topology_devices("v5e-4"))
  results = [forms.is_for_tpu()]
  for devices in (mesh(data=4), elsewhere):
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
      results.append(forms.is_for_tpu())
  assert results == [False, False, True]


@pytest.fixture
def for_tpu(monkeypatch: pytest.MonkeyPatch):
  """Calls a function of arrays in the form for CPUs, and in that for TPUs."""

  def both(function, *arrays) -> tuple[Any, Any]:
    results = []
    for is_for_tpu in (False, True):
      monkeypatch.setattr(forms, "is_for_tpu", lambda is_for_tpu=is_for_tpu: is_for_tpu)
      results.append(jax.jit(lambda *arrays: function(*arrays))(*arrays))
    return results[0], results[1]

  return both


def assert_close(result: Any, expected: Any, tolerance: float) -> None:
  leaves = zip(jax.tree.leaves_with_path(result), jax.tree.leaves(expected), strict=True)
  for (path, a), b in leaves:
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=str(path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotations_are_the_same_to_the_bit_of_their_dtype(for_tpu, dtype):
  random = np.random.default_rng(0)
  x_BTNH, d_BTNH = (jnp.asarray(random.normal(size=(B, T, N, H)), dtype) for _ in range(2))
  angles_BTH = jnp.asarray(random.uniform(0, 9, (B, T, H // 2)), jnp.float32)

  def turned(x_BTNH, d_BTNH):
    def cast(x_BTNH):
      return forms.rotated(x_BTNH, jnp.cos(angles_BTH), jnp.sin(angles_BTH)).astype(dtype)

    y_BTNH, pullback = jax.vjp(cast, x_BTNH)
    return y_BTNH, pullback(d_BTNH)[0]

  plain, whole = for_tpu(turned, x_BTNH, d_BTNH)
  # Sums of two products may be rounded once or twice.
  assert_close(whole, plain, 1e-6 if dtype == "float32" else 0.0)


def test_loss_gradients_and_probes_of_a_model_are_the_same(for_tpu):
  more = "use_qk_norm=true", "attention_qkv_bias=true", "base_num_decoder_layers=1"
  model = tiny_model(*more, "gns=all")
  parameters, rows = loud_parameters(model), random_rows(4, 12)

  def differentiated(parameters, rows):
    def loss(parameters, probes):
      return loss_parts(model, parameters, rows, None, probes).loss.sum()

    probes = model.probes(rows.inputs.shape[0], 1)
    return jax.value_and_grad(loss, argnums=(0, 1))(parameters, probes)

  plain, whole = for_tpu(differentiated, parameters, rows)
  assert_close(whole, plain, 2e-6)
