"""Squared gradient norms of every row, against the gradient of each row by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import GEMMA_LIKE, GPT2_LIKE, OLMO_LIKE, loud_parameters, random_rows, tiny_model

from maxbatch.data.rows import Rows
from maxbatch.models import probes
from maxbatch.models.registry import Model, Parameters, by_path
from maxbatch.training.loss import loss_parts, loss_sum

KEY = jax.random.key(3)
ROWS, LENGTH = 5, 12


@functools.cache
def make_rows(is_packed: bool) -> Rows:
  """Rows of very different weight, the second without any; packed, each of two segments."""
  rows = random_rows(ROWS, LENGTH)
  weights = np.random.default_rng(5).integers(0, 3, (ROWS, LENGTH)).astype(np.float32)
  weights[1] = 0.0
  rows = rows._replace(weights=jnp.asarray(weights))
  if not is_packed:
    return rows
  place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
  is_second = (place >= 5).astype(np.int32)
  return rows._replace(
    segment_ids=jnp.asarray(is_second), positions=jnp.asarray(place - 5 * is_second)
  )


@functools.cache
def measured(
  keys: tuple[str, ...], is_packed: bool
) -> tuple[jax.Array, Parameters, list[np.ndarray]]:
  """The loss and its gradient, and the squares (L or 1, B) of every probe."""
  model, rows = tiny_model(*keys), make_rows(is_packed)

  @jax.jit
  def both(parameters, probes, rows):
    def loss(parameters, probes):
      return loss_parts(model, parameters, rows, KEY, probes).loss.sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(parameters, probes)

  loss, (gradients, squares) = both(loud_parameters(model), model.probes(ROWS, 1), rows)
  squares = [np.asarray(x).reshape(-1, ROWS) for x in jax.tree.leaves(squares)]
  return loss, jax.device_get(gradients), squares


@functools.cache
def gradients_by_row(keys: tuple[str, ...], is_packed: bool) -> Parameters:
  """float64: one gradient per row (B, …) of a model with these keys that measures nothing."""
  model = tiny_model(*keys)
  rows = jax.tree.map(np.asarray, make_rows(is_packed))
  of_one = jax.jit(jax.grad(lambda parameters, row: loss_sum(model, parameters, row, KEY)))
  parameters = loud_parameters(model)
  results = [
    jax.device_get(of_one(parameters, jax.tree.map(lambda x, at=at: x[at : at + 1], rows)))
    for at in range(ROWS)
  ]
  return jax.tree.map(lambda *leaves: np.stack(leaves).astype(np.float64), *results)


def expected(model: Model, gradients: Parameters) -> tuple[Parameters, list[np.ndarray]]:
  """What `measured` should find, from the gradients of each row."""
  flat = {}
  by_path(lambda path, gradient: flat.update({path: gradient}), gradients)
  squares = []
  for probed in model.probed():
    L, total = max(1, probed.num_layers), 0.0
    for path in probed.parameters:
      total = total + (flat[path].reshape(ROWS, L, -1) ** 2).sum(2).T
    squares.append(total)
  return jax.tree.map(lambda x: x.sum(0), gradients), squares


def whole_error(result: Parameters, expected: Parameters) -> float:
  """Of the whole gradient: some leaves (the keys' biases) are zero but for rounding."""
  ours, theirs = (
    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    for tree in (result, expected)
  )
  return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def assert_as_expected(
  gns: str,
  keys: tuple[str, ...],
  like: tuple[str, ...] | None = None,
  *,
  is_packed: bool = False,
  tolerance: float = 1e-5,
) -> None:
  """Beside the gradients by row of a model with the keys `like`; None: with the same keys."""
  model = tiny_model(f"gns={gns}", *keys)
  _, gradients, squares = measured((f"gns={gns}", *keys), is_packed)
  by_row = gradients_by_row(keys if like is None else like, is_packed)
  whole, squares_by_row = expected(model, by_row)
  assert len(squares) == len(model.probed()) > 0
  for probed, ours, theirs in zip(model.probed(), squares, squares_by_row, strict=True):
    assert np.linalg.norm(theirs) > 0
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error < tolerance, (probed.path, error)
  assert whole_error(gradients, whole) < tolerance


MODELS = {
  "llama": (),
  "gpt2": GPT2_LIKE,
  "untied gpt2": (*GPT2_LIKE, "logits_via_embedding=false"),
  "tied": ("logits_via_embedding=true",),
  "tied and scaled": GEMMA_LIKE,
  "qwen": ("use_qk_norm=true", "z_loss_multiplier=0.01"),
  "mistral": ("sliding_window_size=4",),
  "gemma": (*GEMMA_LIKE, "logits_via_embedding=false", "attention_sink=true"),
  "olmo": OLMO_LIKE,
  "dropout": ("dropout_rate=0.2",),
}
FORMS = {
  "unrolled": ("scan_layers=false",),
  "remat": ("remat_policy=full",),
  "remat minimal": ("remat_policy=minimal", "scan_layers=false"),
  "tiles": ("num_vocab_tiling=4",),
  "uneven tiles": ("num_vocab_tiling=11",),
}
"""Other programs for what the first of MODELS computes."""


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_every_layer_of_every_model(keys):
  assert_as_expected("all", keys)


@pytest.mark.parametrize("keys", FORMS.values(), ids=FORMS.keys())
def test_every_layer_however_it_is_computed(keys):
  assert_as_expected("all", keys, like=())


@pytest.mark.parametrize("name", ["gpt2", "qwen", "gemma", "olmo"])
def test_the_norm_layers_alone(name):
  model = tiny_model("gns=norm", *MODELS[name])
  assert all("norm" in probed.path[-2] for probed in model.probed())
  assert_as_expected("norm", MODELS[name])


@pytest.mark.parametrize("keys", [(), (*GPT2_LIKE, "logits_via_embedding=false")])
def test_a_packed_row_is_one_example(keys):
  assert_as_expected("all", keys, is_packed=True)


def test_every_parameter_is_measured_once():
  for keys in (MODELS | FORMS).values():
    model = tiny_model("gns=all", *keys)
    named = [path for probed in model.probed() for path in probed.parameters]
    assert sorted(named) == sorted(model.axes())


def test_bfloat16_is_near():
  assert_as_expected("all", ("dtype=bfloat16",), like=(), tolerance=0.05)


@functools.cache
def unmeasured() -> tuple[jax.Array, Parameters]:
  """The loss and its gradient of the first of MODELS, measuring nothing."""
  model, rows = tiny_model(), make_rows(False)
  return jax.jit(jax.value_and_grad(lambda p: loss_sum(model, p, rows, KEY)))(
    loud_parameters(model)
  )


@pytest.mark.parametrize("gns", ["norm", "all"])
def test_measuring_changes_neither_loss_nor_gradient(gns):
  assert_as_expected(gns, ())
  loss, gradients, _ = measured((f"gns={gns}",), False)
  np.testing.assert_allclose(loss, unmeasured()[0], rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * float(np.abs(b).max())),
    gradients,
    unmeasured()[1],
  )


def test_short_rows_take_the_ghost_norm(monkeypatch):
  lengths = []

  def always(length, inputs, outputs):
    lengths.append(length)
    return True

  monkeypatch.setattr(probes, "is_ghost", always)
  measured.cache_clear()
  assert_as_expected("all", ())
  measured.cache_clear()
  assert set(lengths) == {12}
  monkeypatch.undo()
  assert probes.is_ghost(20, 1024, 1024)
  assert not probes.is_ghost(25, 1024, 1024)
