"""The moments of one step against gradients whose mean and covariance are known."""

import functools
import math

import numpy as np
import pytest
from noise_samples import equal_parts, gradients

from maxbatch.core.noise_scale import Moments, moments
from maxbatch.noise.advice import cost, cost_of_change


def test_two_examples_by_hand():
  # g = (3, 0) and (1, 2): squares 9 and 5, mean gradient (2, 1). Their product is 3, and they
  # differ by (2, −2): half the square of that is the unbiased variance.
  assert equal_parts(2, 7.0, 5.0) == Moments(signal=3.0, noise=4.0)


def test_equal_examples_are_all_signal():
  assert equal_parts(4, 5.0, 5.0) == Moments(signal=5.0, noise=0.0)


def test_the_signal_may_be_negative():
  assert equal_parts(2, 4.0, 1.0) == Moments(signal=-2.0, noise=6.0)


@pytest.mark.parametrize("examples", [0, 1])
def test_less_than_two_examples_say_nothing(examples):
  share = 1 / max(examples, 1)
  assert moments(examples, share, 5.0, 5.0) is None
  # One of eight rows has all tokens.
  assert moments(8, 1.0, 5.0, 5.0) is None


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_says_nothing(bad):
  assert equal_parts(4, bad, 1.0) is None
  assert equal_parts(4, 1.0, bad) is None


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_means_over_many_steps_have_no_bias(batch):
  truth = gradients(noise_scale=10)
  steps = truth.steps(np.random.default_rng(batch), min(25_000, 100_000 // batch), batch)
  signal, noise = (
    sum(values) for values in zip(*((s.signal, s.noise) for s in steps), strict=True)
  )
  assert noise / len(steps) == pytest.approx(1.0, rel=0.005)
  assert noise / signal == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_parts_measure_the_same_as_examples(rows):
  """Real gradients, averaged over parts of a step as microbatches or devices do."""
  truth, rng, batch, steps = (
    gradients(noise_scale=20, size=20),
    np.random.default_rng(rows),
    32,
    3000,
  )
  g_NBD = truth.mean_D + rng.normal(size=(steps, batch, 20)) * np.sqrt(truth.variance_D)
  parts_NPD = g_NBD.reshape(steps, batch // rows, rows, 20).mean(2)
  small_N = (parts_NPD**2).sum(-1).mean(-1)
  big_N = (g_NBD.mean(1) ** 2).sum(-1)
  results = [
    equal_parts(batch // rows, small, big, rows)
    for small, big in zip(small_N.tolist(), big_N.tolist(), strict=True)
  ]
  signal = sum(step.signal for step in results if step)
  noise = sum(step.noise for step in results if step)
  assert noise / steps == pytest.approx(1.0, rel=0.04)
  assert noise / signal == pytest.approx(20, rel=0.06)


@functools.cache
def rows_of_1_or_16() -> tuple[np.ndarray, np.ndarray]:
  """A linear model's gradients of the rows of a corpus, (N, D), and the rows' tokens, (N,).

  The loss of a token is (x·(w − target) + noise)² / 2, and a part of the noise is the row's.
  """
  rng, N, T, D = np.random.default_rng(0), 40_000, 16, 4
  tokens_N = np.where(rng.random(N) < 0.5, 1, T)
  x_NTD, noise_NT = rng.normal(size=(N, T, D)), rng.normal(size=(N, T)) + rng.normal(size=(N, 1))
  error_NT = (x_NTD @ rng.normal(size=D) * 0.5 + 2.1 * noise_NT) * (
    np.arange(T) < tokens_N[:, None]
  )
  return -np.einsum("nt,ntd->nd", error_NT, x_NTD), tokens_N


@pytest.mark.parametrize(("batch", "steps"), [(8, 30_000), (256, 8000)])
def test_rows_of_different_lengths_leave_no_bias(batch, steps):
  """Against the mean and the variance of the mean gradient over steps that are drawn anew."""
  gradients_ND, tokens_N = rows_of_1_or_16()
  drawn = np.random.default_rng(batch).integers(0, len(tokens_N), (steps, batch))
  tokens_SB, weight_S = tokens_N[drawn], tokens_N[drawn].sum(1)
  mean_SD = gradients_ND[drawn].sum(1) / weight_S[:, None]
  signal = (mean_SD.mean(0) ** 2).sum()
  noise = batch * mean_SD.var(0, ddof=1).sum()

  squares_N = (gradients_ND**2).sum(1)
  share_S = (tokens_SB**2).sum(1) / weight_S**2
  small_S, big_S = squares_N[drawn].sum(1) / weight_S**2, (mean_SD**2).sum(1)
  results = [
    moments(batch, *step)
    for step in zip(share_S.tolist(), small_S.tolist(), big_S.tolist(), strict=True)
  ]
  assert np.mean([step.signal for step in results if step]) == pytest.approx(signal, rel=0.02)
  assert np.mean([step.noise for step in results if step]) == pytest.approx(noise, rel=0.03)


def test_at_the_noise_scale_both_costs_are_twice_the_least():
  assert (cost(50, 50).data, cost(50, 50).steps) == (2, 2)


@pytest.mark.parametrize("batch", [1, 7, 50, 4000])
def test_costs_lie_on_the_hyperbola(batch):
  costs = cost(batch, 83)
  assert (costs.data - 1) * (costs.steps - 1) == pytest.approx(1)
  assert costs.data == 1 + batch / 83


def test_a_change_of_batch_changes_both_costs():
  change = cost_of_change(32, 2, 83)
  assert change.data == pytest.approx((1 + 64 / 83) / (1 + 32 / 83))
  assert change.steps == pytest.approx((1 + 83 / 64) / (1 + 83 / 32))
  # A batch takes data / steps.
  assert change.data / change.steps == pytest.approx(2)
