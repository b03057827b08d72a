"""The transformer computes what transformers' GPT-2, Llama, Mistral and Qwen 3 compute.

The shapes are shrunk, everything else is as configs/models/NAME.yml says. The reference's weights
and matrix products are float64, its norms, rotations and softmax float32; ours is float32
throughout, and 1e-5 of the largest logit is ten times what rounding was seen to do.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import ENTRIES, GOLDEN_FILE, LENGTH, POSITIONS, SIZES, TOKENS_T, weight

from maxbatch.config.load import load_config
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters, build_model

GOLDEN = json.loads(GOLDEN_FILE.read_text())
TOLERANCE = 1e-5


def shrunk(name: str) -> Model:
  sizes = [f"{key}={value}" for key, value in SIZES[name].items()]
  config = load_config(["config=base", f"model_name={name}", "dtype=float32", *sizes])
  return build_model(config.model, LENGTH)


def filled(shapes: Parameters, path: tuple[str, ...] = ()) -> Parameters:
  """The parameters that the formula gives, in the model's tree."""
  return {
    name: filled(leaf, (*path, name))
    if isinstance(leaf, dict)
    else jnp.asarray(_value((*path, name), leaf.shape), leaf.dtype)
    for name, leaf in shapes.items()
  }


def _value(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
  dotted = ".".join(path)
  if path[0] != "layers":
    return weight(dotted, 0, int(np.prod(shape))).reshape(shape)
  size = int(np.prod(shape[1:]))
  return np.stack([weight(dotted, i, size).reshape(shape[1:]) for i in range(shape[0])])


def logits_of(model: Model) -> np.ndarray:
  """float64[T, V], from the model's own float32."""
  tokens_BT = jnp.asarray(TOKENS_T, jnp.int32)[None]
  bound = model.bind(filled(model.shapes()))
  rows = Rows(tokens_BT, tokens_BT, jnp.ones((1, LENGTH)), jnp.zeros(1, jnp.int32))
  return np.asarray(bound(rows, None)[0] @ bound.output_matrix(), np.float64)


@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_the_published_architecture(name):
  logits_TV = logits_of(shrunk(name))[POSITIONS]
  log_z = np.log(np.exp(logits_TV).sum(-1))
  expected = np.array(GOLDEN[name]["logits"])
  allowed = TOLERANCE * np.abs(expected).max()
  np.testing.assert_allclose(logits_TV[:, ENTRIES], expected, rtol=0, atol=allowed)
  np.testing.assert_allclose(log_z, GOLDEN[name]["log_z"], rtol=0, atol=allowed)


def test_every_published_model_has_golden_logits():
  assert set(GOLDEN) == set(SIZES)
  assert all(np.abs(golden["logits"]).max() > 0.1 for golden in GOLDEN.values())
