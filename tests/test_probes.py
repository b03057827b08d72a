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


def rows_with_padding(count: int, length: int = 12) -> Rows:
  """Rows of very different weight, the second without any."""
  rows = random_rows(count, length)
  weights = np.random.default_rng(5).integers(0, 3, (count, length)).astype(np.float32)
  weights[1] = 0.0
  return rows._replace(weights=jnp.asarray(weights))


def packed(rows: Rows) -> Rows:
  """The rows, each of them two segments."""
  B, T = rows.inputs.shape
  segments = jnp.broadcast_to((jnp.arange(T) >= 5).astype(jnp.int32)[None], (B, T))
  positions = jnp.broadcast_to((jnp.arange(T) - 5 * (jnp.arange(T) >= 5))[None], (B, T))
  return rows._replace(segment_ids=segments, positions=positions)


def measured(model: Model, parameters: Parameters, rows: Rows) -> tuple[Parameters, list]:
  """The gradient of the sum, and the squares (L or 1, B) of every probe."""

  @jax.jit
  def both(parameters, probes, rows):
    def loss(parameters, probes):
      return loss_parts(model, parameters, rows, KEY, probes).loss.sum()

    return jax.grad(loss, argnums=(0, 1))(parameters, probes)

  gradients, squares = both(parameters, model.probes(rows.inputs.shape[0], 1), rows)
  return gradients, [
    np.asarray(x).reshape(-1, rows.inputs.shape[0]) for x in jax.tree.leaves(squares)
  ]


def expected(model: Model, parameters: Parameters, rows: Rows) -> tuple[Parameters, list]:
  """The same from one gradient per row."""

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(None, 0))
  def of_each(parameters, row):
    one = jax.tree.map(lambda x: x[None], row)
    return jax.grad(lambda p: loss_sum(model, p, one, KEY))(parameters)

  gradients = jax.tree.map(lambda x: np.asarray(x, np.float64), of_each(parameters, rows))
  flat = {}
  by_path(lambda path, gradient: flat.update({path: gradient}), gradients)
  squares = []
  for probed in model.probed():
    L, total = max(1, probed.num_layers), 0.0
    for path in probed.parameters:
      total = total + (flat[path].reshape(rows.inputs.shape[0], L, -1) ** 2).sum(2).T
    squares.append(total)
  return jax.tree.map(lambda x: x.sum(0), gradients), squares


def assert_as_expected(model: Model, rows: Rows, tolerance: float = 1e-5) -> None:
  parameters = loud_parameters(model)
  gradients, squares = measured(model, parameters, rows)
  gradients_by_row, squares_by_row = expected(model, parameters, rows)
  assert len(squares) == len(model.probed()) > 0
  for probed, ours, theirs in zip(model.probed(), squares, squares_by_row, strict=True):
    assert np.linalg.norm(theirs) > 0
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error < tolerance, (probed.path, error)
  # The whole gradient: some leaves (the keys' biases) are zero but for rounding.
  ours, theirs = (
    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    for tree in (gradients, gradients_by_row)
  )
  assert np.linalg.norm(ours - theirs) < tolerance * np.linalg.norm(theirs)


MODELS = {
  "llama": (),
  "gpt2": GPT2_LIKE,
  "untied gpt2": (*GPT2_LIKE, "logits_via_embedding=false"),
  "tied": ("logits_via_embedding=true",),
  "qwen": ("use_qk_norm=true", "z_loss_multiplier=0.01"),
  "mistral": ("sliding_window_size=4",),
  "gemma": (*GEMMA_LIKE, "logits_via_embedding=false"),
  "olmo": OLMO_LIKE,
  "dropout": ("dropout_rate=0.2",),
  "unrolled": ("scan_layers=false",),
  "remat": ("remat_policy=full",),
  "remat minimal": ("remat_policy=minimal", "scan_layers=false"),
  "tiles": ("num_vocab_tiling=4",),
  "uneven tiles": ("num_vocab_tiling=11",),
}


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_every_layer_of_every_model(keys):
  assert_as_expected(tiny_model("gns=all", *keys), rows_with_padding(5))


@pytest.mark.parametrize("keys", [(), GPT2_LIKE, ("use_qk_norm=true",), GEMMA_LIKE, OLMO_LIKE])
def test_the_norm_layers_alone(keys):
  model = tiny_model("gns=norm", *keys)
  assert all("norm" in probed.path[-2] for probed in model.probed())
  assert_as_expected(model, rows_with_padding(5))


@pytest.mark.parametrize("keys", [(), (*GPT2_LIKE, "logits_via_embedding=false")])
def test_a_packed_row_is_one_example(keys):
  assert_as_expected(tiny_model("gns=all", *keys), packed(rows_with_padding(5)))


def test_short_rows_take_the_ghost_norm(monkeypatch):
  lengths = []

  def always(length, inputs, outputs):
    lengths.append(length)
    return True

  monkeypatch.setattr(probes, "is_ghost", always)
  assert_as_expected(tiny_model("gns=all"), rows_with_padding(5))
  assert set(lengths) == {12}
  monkeypatch.undo()
  assert probes.is_ghost(20, 1024, 1024)
  assert not probes.is_ghost(25, 1024, 1024)


def test_every_parameter_but_tied_ones_is_measured_once():
  for keys in MODELS.values():
    model = tiny_model("gns=all", *keys)
    named = [path for probed in model.probed() for path in probed.parameters]
    tied = {("embedding",)} if model.config.logits_via_embedding else set()
    assert sorted(named) == sorted(set(model.axes()) - tied)


def test_bfloat16_is_near():
  model = tiny_model("gns=all", "dtype=bfloat16")
  assert_as_expected(model, rows_with_padding(5), tolerance=0.05)


@pytest.mark.parametrize("gns", ["norm", "all"])
def test_measuring_changes_neither_loss_nor_gradient(gns):
  rows, plain, model = rows_with_padding(4), tiny_model(), tiny_model(f"gns={gns}")
  parameters = loud_parameters(plain)
  of_plain, of_model = (
    jax.jit(jax.value_and_grad(functools.partial(loss_sum, each), argnums=0))(parameters, rows, KEY)
    for each in (plain, model)
  )
  np.testing.assert_allclose(of_model[0], of_plain[0], rtol=1e-6)
  gradients, _ = measured(model, parameters, rows)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max())),
    gradients,
    of_plain[1],
  )
