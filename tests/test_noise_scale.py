"""The noise scale of a loop of one's own, from what accumulate gives, where the true one is known."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noise_samples import gradients
from support import mesh

from maxbatch.core.accumulate import accumulate
from maxbatch.core.noise_scale import NoiseScale
from maxbatch.core.terms import Ratio, Sum, microbatches
from maxbatch.core.train_step import init_state, step_optimizer, train_step

TRUTH = gradients(noise_scale=20, size=10)
ROWS, STEPS = 16, 400


def loss(params: Any, rows: Any, keys_B: Any) -> Any:
  """Linear in the parameters, so that a row's gradient is its `x`."""
  del keys_B
  squares = Sum(jnp.square(rows["x"]).sum()), Sum(jnp.square(rows["count"]).sum())
  term = Ratio((rows["x"] @ params).sum(), rows["count"].sum())
  return {"loss": term}, dict(zip(("squares", "divisors"), squares, strict=True))


def square(gradients: Any) -> jax.Array:
  return jnp.square(gradients).sum()


@functools.cache
def results(num_microbatches: int, replicas: int) -> tuple[list[Any], NoiseScale]:
  """Of the steps, and the noise scale of them."""
  devices = mesh(data=replicas) if replicas > 1 else None
  optimizer = step_optimizer(optax.sgd(0.0), clip_norm=1e-3)
  step = jax.jit(train_step(accumulate(loss, devices, squared_norm=square), optimizer))
  state = init_state(np.zeros(10, np.float32), optimizer)
  random, noise, found = np.random.default_rng(0), NoiseScale(STEPS), []
  for _ in range(STEPS):
    x = TRUTH.mean_D + random.normal(size=(ROWS, 10)) * np.sqrt(TRUTH.variance_D)
    rows = {"x": x.astype(np.float32), "count": np.ones(ROWS, np.float32)}
    rows, k = microbatches(rows, ROWS // num_microbatches, mesh=devices)
    state, result = step(state, rows, k)
    noise.add(result, rows=ROWS)
    found.append(jax.device_get(result._replace(gradients=None, updates=None)))
  return found, noise


@pytest.mark.parametrize(("num_microbatches", "replicas"), [(8, 1), (1, 4), (2, 2)])
def test_microbatches_and_replicas_measure_it(num_microbatches, replicas):
  estimate = results(num_microbatches, replicas)[1].estimate()
  assert estimate.status == "ok"
  assert estimate.steps == STEPS
  assert estimate.noise == pytest.approx(1.0, rel=0.1)
  assert estimate.scale is not None
  assert estimate.scale.low < TRUTH.noise_scale < estimate.scale.high
  assert estimate.scale.value == pytest.approx(TRUTH.noise_scale, rel=0.25)


def test_squares_of_rows_measure_it_where_there_is_one_microbatch():
  result, from_microbatches = results(1, 1)
  assert from_microbatches.estimate().status == "unavailable"
  noise = NoiseScale(STEPS)
  for one in result:
    stats = one.sums.stats
    squares = stats["squares"].total, stats["divisors"].total
    noise.add(one.sums, rows=ROWS, grad_norm=one.grad_norm, row_squares=squares)
  scale = noise.estimate().scale
  assert scale is not None
  assert scale.low < TRUTH.noise_scale < scale.high
  assert scale.value == pytest.approx(TRUTH.noise_scale, rel=0.15)


def test_it_is_a_sentence():
  result, noise = results(8, 1)
  estimate = noise.estimate()
  assert estimate.scale is not None
  value, low, high = (
    f"{x:.3g}" for x in (estimate.scale.value, estimate.scale.low, estimate.scale.high)
  )
  assert (
    str(noise) == f"noise scale: {value} samples ({low} to {high} with 95% confidence, 400 steps)"
  )
  assert str(results(1, 1)[1]) == "noise scale: not measured, as no step had two parts to compare"
  short = NoiseScale()
  short.add(result[0], rows=ROWS)
  assert str(short) == "noise scale: not known after 1 step, the mean gradient may still be 0"


def test_its_state_is_json():
  _, noise = results(8, 1)
  again = NoiseScale.from_dict(json.loads(json.dumps(noise.as_dict())))
  assert again.estimate() == noise.estimate()


def test_what_is_missing_is_named():
  result, noise = results(8, 1)
  with pytest.raises(ValueError, match="give grad_norm"):
    noise.add(result[0].sums, rows=ROWS)
  with pytest.raises(ValueError, match="give accumulate a squared_norm"):
    noise.add(result[0].sums._replace(squares=None), rows=ROWS, grad_norm=1.0)
