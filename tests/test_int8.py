"""Weights in int8, for sampling: those of the checkpoint, rounded, wherever they are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from support import configured, mesh
from test_sampling import FAMILIES, GREEDY, LENGTH, LETTERS, TEXTS, prompts
from tiny_model import loud_parameters, tiny_model

from maxbatch.conversion.for_sampling import read_parameters
from maxbatch.errors import UserError
from maxbatch.models.quantization import SCALE, in_int8
from maxbatch.models.registry import Model, Parameters
from maxbatch.precision.policy import check_quantization, policy_of
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
  model = tiny_model(*keys, "quantization=int8", length=LENGTH)
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


def test_it_is_refused_in_training():
  settings = configured("quantization=int8")
  with pytest.raises(
    UserError, match=r"int8: weights in int8 are for `maxbatch sample`.*=fp8 trains"
  ):
    check_quantization(settings, policy_of(settings.precision))
