"""Products in int8 in training, whose scales are each token's, and weights in int8 in sampling."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from initial_states import quantized_steps
from support import configured, error, mesh
from test_sampling import FAMILIES, GREEDY, LENGTH, LETTERS, TEXTS, prompts
from tiny_model import loud_parameters, tiny_model

from maxbatch.conversion.for_sampling import read_parameters
from maxbatch.models.int8 import SCALE, in_int8, int8_product, rounded_tokens
from maxbatch.models.probes import product
from maxbatch.models.registry import Model, Parameters, build_model
from maxbatch.precision.policy import policy_of, sampling_policy_of
from maxbatch.sampling.sampler import Sampler, sample


@dataclasses.dataclass
class Stored:
  """A source of parameters, and which of them were read at once."""

  parameters: Parameters
  together: list[set[str]] = dataclasses.field(default_factory=list)

  def check(self, model: Model) -> None:
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), self.parameters)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), model.shapes())

  def read(self, model: Model, wanted: Parameters) -> Parameters:
    own, flat = (dict[Any, Any](flatten_dict(tree)) for tree in (self.parameters, wanted))
    self.together.append({"/".join(path) for path in flat})
    return unflatten_dict({path: jax.device_put(own[path], flat[path].sharding) for path in flat})


def weights_of(parameters: Parameters, model: Model) -> Parameters:
  """What the whole numbers and their scales stand for."""
  flat, weights = dict[Any, Any](flatten_dict(parameters)), {}
  for path, leaf in flat.items():
    scale = flat.get((*path[:-1], SCALE))
    if path[-1] == "kernel" and scale is not None:
      inputs = range(int(model.axes()[path][0] == "layers"), leaf.ndim)
      inputs = inputs[: leaf.ndim - scale.ndim]
      leaf = np.asarray(leaf, np.float32) * np.expand_dims(np.asarray(scale), tuple(inputs))
    if path[-1] != SCALE:
      weights[path] = np.asarray(leaf)
  return unflatten_dict(weights)


@pytest.mark.parametrize(
  ("family", "sizes"),
  [("llama", {"fsdp": 2, "tensor": 2}), ("gpt2", {}), ("deepseek, unrolled", {})],
)
def test_a_model_in_int8_writes_what_the_model_of_its_rounded_weights_writes(family, sizes):
  keys, devices = FAMILIES[family], mesh(**sizes)
  stored = tiny_model(*keys, length=LENGTH)
  settings = configured("quantization=int8")
  policy = sampling_policy_of(settings.precision)
  model = build_model(stored.config, LENGTH, policy=policy)
  source: Any = Stored(loud_parameters(stored))
  parameters = read_parameters(source, model, devices)
  own = weights_of(parameters, model)
  written = [
    sample(Sampler(each, GREEDY, 6, LENGTH, where), given, prompts(TEXTS), LETTERS)
    for each, where, given in ((model, devices, parameters), (stored, None, own))
  ]
  ours, theirs = written
  np.testing.assert_array_equal(ours.tokens_BN, theirs.tokens_BN)
  np.testing.assert_allclose(ours.log_probs_BN, theirs.log_probs_BN, atol=2e-5)
  # Off by half of a step at most: of 127 up to the largest weight of an output.
  stored_as = dict[Any, Any](flatten_dict(source.parameters))
  for path, leaf in dict[Any, Any](flatten_dict(own)).items():
    steps = np.abs(stored_as[path]).max() / 127 if path[-1] == "kernel" else 0
    assert np.abs(leaf - stored_as[path]).max() <= 0.501 * steps, path
  # Each kernel is read by itself, after all others at once.
  assert [len(each) for each in source.together[1:]] == [1] * (len(source.together) - 1)
  assert all(path.endswith("/kernel") for each in source.together[1:] for path in each)
  assert len(source.together) > 6


def test_a_kernel_is_rounded_by_output_and_zeros_stay():
  kernel = np.random.default_rng(0).normal(size=(3, 4, 2, 5)).astype(np.float32)
  kernel[1, :, :, 2] = 0
  kernel[2, :, :, 3] *= 1e-6
  result = in_int8(jnp.asarray(kernel), 1, 1)
  numbers, scale = np.asarray(result["kernel"], np.float32), np.asarray(result[SCALE])
  assert (result["kernel"].dtype, scale.shape) == (jnp.int8, (3, 5))
  assert (np.abs(numbers).max((1, 2))[kernel.any((1, 2))] == 127).all()
  off = np.abs(numbers * scale[:, None, None] - kernel)
  assert (off <= 0.501 * np.abs(kernel).max((1, 2), keepdims=True) / 127).all()


@functools.cache
def after_a_step(axes=(1, 1, 1), k=1, *, streamed=False):
  """What a step with products in int8 added to all parameters."""
  ((begun, after),) = quantized_steps("int8", (2,), axes, k, streamed=streamed)
  return jax.tree.map(np.subtract, after, begun)


@pytest.mark.parametrize(
  ("axes", "k", "streamed"),
  [((1, 1, 1), 4, False), ((2, 2, 2), 2, False), ((2, 1, 1), 4, True)],
)
def test_training_is_the_same_however_a_batch_is_split(axes, k, streamed):
  """Up to numbers near a half, which another order of sums rounds the other way: one can make 2e-3 here, and
  without any these are 5e-6. With scales of a microbatch's maximum they are 5e-2."""
  assert error(after_a_step(axes, k, streamed=streamed), after_a_step()) < 5e-3


@pytest.mark.parametrize(("inputs", "outputs"), [((24,), (4, 8)), ((4, 6), (16,)), ((24,), (16,))])
def test_products_and_gradients_are_near_those_in_full(inputs, outputs):
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(2, 8, *inputs)), jnp.float32)
  kernel = jnp.asarray(random.normal(size=(*inputs, *outputs)), jnp.float32)
  weights = jnp.asarray(random.normal(size=(2, 8, *outputs)), jnp.float32)
  axes, probe_BS = (None,) * kernel.ndim, jnp.zeros((2, 1))

  def of(multiply, *probe):
    def products(x, kernel, *probe):
      return jnp.asarray(multiply(x, kernel, len(inputs), *probe or (None,), axes))

    y, backward = jax.vjp(products, x, kernel, *probe)
    return y, *backward(weights)

  with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
    y, d_x, d_kernel, squares_BS = of(int8_product, probe_BS)
    unmeasured = of(int8_product)
    y_full, d_x_full, d_kernel_full, squares_full_BS = of(product, probe_BS)
  # Rounded are the products of the forward pass and the gradient of x.
  assert 1e-3 < error(y, y_full) < 0.02
  assert 1e-3 < error(d_x, d_x_full) < 0.02
  np.testing.assert_array_equal(unmeasured[1], d_x)
  for each in (d_kernel, unmeasured[2]):
    np.testing.assert_allclose(each, d_kernel_full, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(squares_BS, squares_full_BS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_rounded_away(bad):
  x, kernel = np.ones((1, 3, 4), np.float32), jnp.ones((4, 4))
  x[0, 1, 2] = bad

  def multiply(x):
    return jnp.asarray(int8_product(x, kernel, 1, None, (None, None)))

  with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
    y, backward = jax.vjp(multiply, jnp.ones_like(x))
    results = multiply(jnp.asarray(x)), *backward(jnp.asarray(x))
  assert np.isfinite(y).all()
  for result in results:
    assert np.isfinite(result).all(-1).tolist() == [[True, False, True]]


@pytest.mark.parametrize("shape", [(2, 300, 128), (1, 40, 4, 128), (3, 1, 256)])
@pytest.mark.parametrize("has_factor", [False, True])
def test_the_kernel_rounds_as_the_compiler_does(shape, has_factor):
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=shape), jnp.bfloat16).at[0, 0].set(0)
  factor = jnp.asarray(random.uniform(1, 2, shape[2:]), jnp.float32) if has_factor else None
  numbers, scale = rounded_tokens(x, factor, interpret=True)
  expected = np.asarray(x, np.float32) * (1 if factor is None else np.asarray(factor))
  largest = np.abs(expected).reshape(*shape[:2], -1).max(-1)
  np.testing.assert_allclose(scale, np.where(largest > 0, largest / 127, 1), rtol=1e-6)
  assert (numbers.shape, numbers.dtype) == (shape, jnp.int8)
  scale = np.asarray(scale).reshape(*shape[:2], *(1,) * (len(shape) - 2))
  assert np.abs(np.asarray(numbers, np.float32) - expected / scale).max() < 0.5001


def test_a_model_that_samples_has_its_weights_in_int8_and_one_that_trains_has_not():
  settings = configured("quantization=int8").precision
  trained, sampled = policy_of(settings), sampling_policy_of(settings)
  assert (trained.int8, trained.int8_weights) == (True, False)
  assert (sampled.int8, sampled.int8_weights) == (False, True)
