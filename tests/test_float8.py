"""Products in float8: their scales are the whole step's, however its batch is split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from initial_states import quantized_steps, random_parameters
from support import config, configured, error, mesh

from maxbatch.errors import UserError
from maxbatch.models.float8 import (
  BACKWARD,
  FORWARD,
  float8_product,
  next_amax,
  rounded_to,
  scale_of,
  with_weights,
)
from maxbatch.models.forms import projected
from maxbatch.models.registry import build_model
from maxbatch.precision.policy import check_quantization, policy_of

T = 16


def after_two_steps(axes=(1, 1, 1), k=1, *, streamed=False):
  """The magnitudes after each of two steps, and what these added to all parameters."""
  steps = list(quantized_steps("fp8", (0, 1), axes, k, streamed=streamed))
  begun, after = steps[-1]
  return [magnitudes(params) for _, params in steps], jax.tree.map(np.subtract, after, begun)


def magnitudes(params):
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if path[-1].key == "amax"}


@functools.cache
def whole_batch():
  return after_two_steps()


@pytest.mark.parametrize(
  ("axes", "k", "streamed"), [((1, 1, 1), 4, False), ((2, 2, 2), 2, False), ((2, 1, 1), 4, True)]
)
def test_scales_are_those_of_the_whole_step(axes, k, streamed):
  (first, second), updates = after_two_steps(axes, k, streamed=streamed)
  (first_whole, second_whole), updates_whole = whole_batch()
  assert len(first) == len(first_whole) >= 6
  for path, of_step in first.items():
    assert of_step.shape[-1] == 3
    assert (of_step[:, :2] > 0).all()
    np.testing.assert_allclose(of_step, first_whole[path], rtol=1e-6)
    np.testing.assert_allclose(second[path], second_whole[path], rtol=1e-6)
  assert error(updates, updates_whole) < 1e-6


def test_a_scale_is_a_power_of_two_with_room_for_twice_as_much():
  for dtype in (FORWARD, BACKWARD):
    limit = float(jnp.finfo(dtype).max)
    largest = jnp.array([limit, limit / 2, limit / 2.001, 1e-6, 3.0])
    scales = scale_of(largest, dtype)
    assert (jnp.frexp(scales)[0] == 0.5).all()
    assert ((limit / 4 < largest * scales) & (largest * scales <= limit / 2)).all()
    assert (scale_of(jnp.array([0.0, jnp.inf, jnp.nan]), dtype) == 1).all()


def test_what_exceeds_the_range_becomes_its_largest_number():
  x = rounded_to(jnp.array([1e6, -1e6, 1.0]), jnp.float32(1), FORWARD)
  assert x.astype(jnp.float32).tolist() == [448.0, -448.0, 1.0]


def test_a_large_magnitude_is_forgotten_in_halves():
  assert next_amax(jnp.array([8.0, 1.0]), jnp.array([1.0, 3.0])).tolist() == [4.0, 3.0]


@pytest.mark.parametrize(("inputs", "outputs"), [((24,), (4, 8)), ((4, 6), (16,))])
def test_products_and_gradients_are_near_those_in_full(inputs, outputs):
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(2, 8, *inputs)), jnp.float32)
  kernel = jnp.asarray(random.normal(size=(*inputs, *outputs)), jnp.float32)
  weights = jnp.asarray(random.normal(size=(2, 8, *outputs)), jnp.float32)
  amax_3 = jnp.stack([jnp.abs(x).max(), jnp.abs(weights).max(), jnp.abs(kernel).max()])
  axes = (None,) * kernel.ndim

  def in_full(x, kernel):
    return (projected(x, kernel, len(inputs)) * weights).sum()

  def in_float8(x, kernel, amax_3):
    y = jnp.asarray(float8_product(x, kernel, amax_3, len(inputs), axes))
    return (y * weights).sum()

  with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
    *gradients, of_amax = jax.jit(jax.grad(in_float8, (0, 1, 2)))(x, kernel, amax_3)
    expected = jax.grad(in_full, (0, 1))(x, kernel)
  assert 1e-3 < error(gradients, expected) < 0.06
  np.testing.assert_array_equal(of_amax, amax_3.at[2].set(0))


def test_a_step_is_the_same_program_in_every_process():
  """A model has the paths in a set, whose order each process draws: others compile what none has cached."""
  settings = config(quantization="fp8")
  model = build_model(settings.model, T, policy=policy_of(settings.precision))
  paths, parameters = sorted(model.amax_buffers), random_parameters(model)
  programs = {
    str(jax.make_jaxpr(lambda x, paths=paths: with_weights(x, paths))(parameters))
    for paths in (paths, paths[::-1])
  }
  assert len(programs) == 1


@pytest.mark.parametrize(
  "others",
  [
    "dtype=float16",
    "pipeline_schedule=1f1b",
    "lora_rank=2",
    "trainable=[layers/*]",
    "gns=all",
    "gns=norm",
    "precision_report=true",
    "shard_optimizer_over_data=true",
  ],
)
def test_what_it_has_not_been_built_for_is_refused(others):
  settings = configured("quantization=fp8", others)
  with pytest.raises(UserError, match=r"quantization=fp8 .* for example \w+="):
    check_quantization(settings, policy_of(settings.precision))
