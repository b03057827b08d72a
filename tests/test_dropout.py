"""Dropout masks belong to (seed, sample, layer, place), so the split of the batch is not felt.

B rows, T tokens, D width.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import GPT2_LIKE, loud_parameters, random_rows, tiny_model

from maxbatch.core.terms import sample_keys
from maxbatch.data.rows import Rows
from maxbatch.models import transformer
from maxbatch.models.layers import dropout, fold
from maxbatch.models.registry import Model
from maxbatch.training.loss import loss_sum

RATE = 0.3
SEED = jax.random.key(7)


def model_with(rate: float, *overrides: str) -> Model:
  return tiny_model(*GPT2_LIKE, f"dropout_rate={rate}", *overrides)


def picked(rows: Rows, places: Sequence[int]) -> Rows:
  """Some rows, in another order."""
  return jax.tree.map(lambda x: x[jnp.array(places)], rows)


def masks(sample_ids: Sequence[int], seed: jax.Array = SEED, layer: int = 0, place: int = 0):
  """bool[B, 16, 16]: what is kept."""
  keys_B = fold(fold(sample_keys(seed, jnp.array(sample_ids)), layer), place)
  return np.asarray(dropout(jnp.ones((len(sample_ids), 16, 16)), RATE, keys_B) > 0)


# --- the masks ------------------------------------------------------------------------------------


def test_the_share_that_is_dropped_is_the_rate():
  keys_B = sample_keys(SEED, jnp.arange(4))
  y_BTD = np.asarray(dropout(jnp.full((4, 100, 100), 2.0), RATE, keys_B))
  np.testing.assert_allclose((y_BTD == 0).mean((1, 2)), RATE, atol=4 * (0.21 / 10_000) ** 0.5)
  np.testing.assert_allclose(y_BTD[y_BTD > 0], 2.0 / 0.7, rtol=1e-6)


def test_seed_sample_layer_and_place_each_change_the_mask():
  base = masks([5])
  others = {
    "seed": masks([5], seed=jax.random.key(8)),
    "sample": masks([6]),
    "layer": masks([5], layer=1),
    "place": masks([5], place=1),
  }
  for name, other in others.items():
    # Independent masks differ where one keeps and the other drops: 2 × 0.3 × 0.7.
    assert abs((base != other).mean() - 0.42) < 0.15, name
  assert (masks([5], layer=1) != masks([5], place=1)).any()
  np.testing.assert_array_equal(masks([5]), base)


def test_a_row_keeps_its_mask_wherever_it_lies():
  together = masks([3, 1, 2])
  for place, sample in enumerate((3, 1, 2)):
    np.testing.assert_array_equal(together[place], masks([sample])[0])


def test_gradients_pass_where_activations_do():
  keys_B = sample_keys(SEED, jnp.arange(2))
  x_BTD = jnp.ones((2, 8, 8))
  gradient = jax.grad(lambda x_BTD: dropout(x_BTD, RATE, keys_B).sum())(x_BTD)
  np.testing.assert_array_equal(gradient, dropout(x_BTD, RATE, keys_B))


def test_precision_is_kept():
  keys_B = sample_keys(SEED, jnp.arange(2))
  assert dropout(jnp.ones((2, 4, 4), jnp.bfloat16), RATE, keys_B).dtype == jnp.bfloat16


# --- in the model ---------------------------------------------------------------------------------


def hidden(model: Model, rows: Rows) -> np.ndarray:
  """Hidden states in training."""
  run = jax.jit(lambda p, rows: model.bind(p)(rows, sample_keys(SEED, rows.sample_ids)))
  return np.asarray(run(loud_parameters(model), rows))


def test_rows_in_another_order_give_the_same_outputs_in_that_order():
  model, rows, order = model_with(RATE), random_rows(4), [2, 0, 3, 1]
  whole = hidden(model, rows)
  np.testing.assert_allclose(hidden(model, picked(rows, order)), whole[order], rtol=0, atol=1e-5)
  moved = rows._replace(sample_ids=rows.sample_ids + 100)
  assert np.abs(hidden(model, moved) - whole).max() > 0.1


def test_microbatches_add_up_to_the_whole():
  model, rows = model_with(RATE), random_rows(4)
  parameters = loud_parameters(model)
  run = jax.jit(jax.value_and_grad(lambda p, rows: loss_sum(model, p, rows, SEED)))
  whole = run(parameters, rows)
  parts = [run(parameters, picked(rows, half)) for half in ([0, 2], [3, 1])]
  added = jax.tree.map(jnp.add, *parts)
  largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(whole[1]))
  for a, b in zip(jax.tree.leaves(added), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * largest)


def test_unrolled_layers_have_the_masks_of_scanned_ones():
  rows = random_rows(2)
  scanned, unrolled = (model_with(RATE, f"scan_layers={on}") for on in ("true", "false"))
  np.testing.assert_allclose(hidden(scanned, rows), hidden(unrolled, rows), rtol=0, atol=1e-5)


def test_every_place_of_every_layer_has_its_own_key(monkeypatch):
  seen: list[bytes] = []

  def record(x_BTD, rate, keys_B, places_T):
    assert rate == RATE
    assert places_T is None
    seen.extend(np.asarray(jax.random.key_data(key)).tobytes() for key in keys_B)
    return x_BTD

  monkeypatch.setattr(transformer, "dropout", record)
  model = model_with(RATE, "scan_layers=false", "base_num_decoder_layers=3")
  rows = random_rows(2)
  model.bind(loud_parameters(model))(rows, sample_keys(SEED, rows.sample_ids))
  # Two in each of three layers and one after the embedding, for two rows.
  assert len(seen) == len(set(seen)) == (2 * 3 + 1) * 2


@pytest.mark.parametrize("scan", ["true", "false"])
def test_evaluation_and_rate_zero_drop_nothing(scan):
  dropping = model_with(RATE, f"scan_layers={scan}")
  still = model_with(0.0, f"scan_layers={scan}")
  parameters, rows = loud_parameters(still), random_rows(2)

  def loss(model: Model, key: jax.Array | None) -> np.ndarray:
    return np.asarray(jax.jit(lambda p: loss_sum(model, p, rows, key))(parameters))

  expected = loss(still, None)
  np.testing.assert_array_equal(loss(dropping, None), expected)
  np.testing.assert_array_equal(loss(still, SEED), expected)
  assert abs(loss(dropping, SEED) / expected - 1) > 0.01
