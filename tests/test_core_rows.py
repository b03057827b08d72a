"""Rows cut into microbatches, and keys that belong to samples."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mesh

from maxbatch.core.accumulate import accumulate, divisor
from maxbatch.core.terms import Ratio, microbatches, sample_keys


def batch(size: int) -> dict[str, np.ndarray]:
  random = np.random.default_rng(0)
  ids = np.arange(1, size + 1, dtype=np.int32)
  return {"x": random.normal(size=(size, 3)).astype(np.float32), "id": ids}


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_keys_belong_to_samples_in_any_shape(shape):
  ids = np.random.default_rng(0).integers(0, 99, shape)
  result = sample_keys(jax.random.key(3), ids)
  assert result.shape == shape
  for index in np.ndindex(shape):
    one = jax.random.fold_in(jax.random.key(3), int(ids[index]))
    assert (jax.random.key_data(result[index]) == jax.random.key_data(one)).all()


@pytest.mark.parametrize(("size", "micro", "capacity"), [(12, 4, None), (13, 4, 6), (3, 8, 2)])
def test_every_row_is_there_once_and_the_rest_is_zeros(size, micro, capacity):
  rows, k = microbatches(batch(size), micro, capacity=capacity)
  assert k == -(-size // micro)
  assert rows["x"].shape == (capacity or k, micro, 3)
  ids = rows["id"].reshape(-1)
  np.testing.assert_array_equal(ids[:size], batch(size)["id"])
  assert not ids[size:].any()
  assert not rows["x"].reshape(-1, 3)[size:].any()


@pytest.mark.parametrize("micro", [4, 8, 16])
def test_a_replica_has_the_same_rows_for_any_microbatch(micro):
  rows, _ = microbatches(batch(32), micro, mesh=mesh(data=4))
  on_devices = {s.device.id: np.sort(np.ravel(s.data)) for s in rows["id"].addressable_shards}
  for replica in range(4):
    np.testing.assert_array_equal(on_devices[replica], np.arange(1, 9) + 8 * replica)


def test_another_number_of_rows_runs_the_same_program():
  def loss(params: Any, rows: Any, keys_B: Any) -> Any:
    assert keys_B is not None
    noise_BD = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys_B)
    is_row_B = (rows["id"] > 0).astype(jnp.float32)
    values_B = jnp.tanh((rows["x"] + noise_BD) @ params)
    return {"loss": Ratio((is_row_B * values_B).sum(), is_row_B.sum())}, {}

  params, traced = jnp.ones(3), []

  @functools.partial(jax.jit, static_argnames="devices")
  def gradient(rows: Any, k: Any, devices: Any) -> Any:
    traced.append(k)
    keys = sample_keys(jax.random.key(0), rows["id"])
    sums = accumulate(loss, devices)(params, rows, k, keys)
    return sums.gradients / divisor(sums.terms)

  for size in (9, 16, 21):
    whole = gradient(*microbatches(batch(size), size), None)
    rows, k = microbatches(batch(size), 8, capacity=3, mesh=mesh(data=2))
    np.testing.assert_allclose(gradient(rows, k, mesh(data=2)), whole, rtol=2e-6)
  assert len(traced) == 3 + 1


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match=r"9 rows are 3 microbatches of 4.*capacity=2; for example "):
    microbatches(batch(9), 4, capacity=2)
  with pytest.raises(
    ValueError, match=r"micro_batch_size=6 must be a multiple of the 4.*example 8"
  ):
    microbatches(batch(9), 6, mesh=mesh(data=4))
