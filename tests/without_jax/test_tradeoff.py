"""The curve of data against steps: what is put in comes out, within its intervals, and no sooner."""

import math

import numpy as np
import pytest

from maxbatch.experiments.tradeoff import fit_tradeoff, smooth_crossing
from scripts.runs_to_a_loss import (
  crossing,
  lowest_on_grid,
  mean_noise_scale,
  overhead_with,
  samples_with,
  steps_with,
)

SIZES = np.array([4, 8, 16, 32, 64, 128, 256, 512.0])


def runs(
  min_steps: float, critical: float, scatter: float = 0.0, seed: int = 0, seeds: int = 2
) -> tuple[np.ndarray, np.ndarray]:
  """Samples and steps of runs on the curve, off it by a random share."""
  sizes = np.repeat(SIZES, seeds)
  off = np.exp(scatter * np.random.default_rng(seed).normal(size=sizes.size))
  steps = min_steps * (1 + critical / sizes) * off
  return sizes * steps, steps


def test_runs_on_the_curve_give_it_back():
  result = fit_tradeoff(*runs(150, 40))
  assert result.critical_batch.value == pytest.approx(40, rel=2e-3)
  assert result.min_steps.value == pytest.approx(150, rel=2e-3)
  assert result.min_samples.value == pytest.approx(6000, rel=2e-3)
  assert result.misfit < 2e-3
  # (S/Smin − 1)(E/Emin − 1) = 1, at any batch.
  steps, samples = steps_with(result, 77), samples_with(result, 77)
  assert samples == pytest.approx(77 * steps)
  rest = (steps / result.min_steps.value - 1) * (samples / result.min_samples.value - 1)
  assert rest == pytest.approx(1)
  assert overhead_with(result, 80).value == pytest.approx(2, rel=2e-3)


def test_95_of_100_intervals_hold_the_truth():
  held = np.zeros(3)
  for seed in range(200):
    result = fit_tradeoff(*runs(150, 40, scatter=0.1, seed=seed))
    each = (result.critical_batch, 40), (result.min_steps, 150), (result.min_samples, 6000)
    held += [one.low < truth < one.high for one, truth in each]
    assert result.critical_batch.high < 40 * 2
  assert (held / 200 > 0.92).all()


def test_sizes_far_from_the_critical_one_leave_an_end_open():
  below = fit_tradeoff(*runs(1, 1e6, scatter=0.1))
  assert below.critical_batch.high == math.inf
  assert below.critical_batch.low > 512
  assert below.min_steps.low == 0
  assert overhead_with(below, 512).low == 0
  above = fit_tradeoff(*runs(100, 1e-3, scatter=0.1))
  assert above.critical_batch.low == 0
  assert above.min_samples.low == 0
  assert overhead_with(above, 4).high == math.inf


def test_one_batch_size_has_no_curve():
  with pytest.raises(ValueError, match="two batch sizes"):
    fit_tradeoff([100, 110, 90], [10, 11, 9])


def test_a_crossing_lies_between_evaluations():
  samples = 1000 * 1.05 ** np.arange(80)
  losses = 4 - 0.5 * np.log(samples / 1000)
  assert crossing(samples, losses, 3.0) == pytest.approx(1000 * math.exp(2), rel=1e-6)
  # Not the first lucky evaluation, but that of the mean around it.
  rough = losses + 0.02 * np.random.default_rng(0).normal(size=80)
  assert crossing(samples, rough, 3.0) == pytest.approx(1000 * math.exp(2), rel=0.06)
  assert crossing(samples, losses, 1.0) is None
  assert crossing(samples[:4], losses[:4], 5.0) is None
  assert crossing(samples, losses, 5.0) == pytest.approx(samples[2])


def test_a_branch_crosses_on_the_parabola_through_its_steps():
  samples = np.arange(16, 5000, 16)
  rough = 0.1 * np.random.default_rng(0).normal(size=samples.size)
  losses = 2.2 - 0.3 * np.log1p(samples / 4800) + rough
  expected = 4800 * (math.exp(0.1 / 0.3) - 1)
  assert smooth_crossing(samples, losses, 2.1, 4800) == pytest.approx(expected, rel=0.05)
  assert smooth_crossing(samples, losses, 1.5, 4800) is None


def noise_at(progress: float) -> float:
  """A noise scale that grows in training."""
  return 5 + 45 * progress


def trained(samples_per_step: float, num_perfect_steps: float) -> np.ndarray:
  """The noise scale at every step of a run that gains what the theory says it does."""
  progress, scales = 0.0, []
  while progress < 1:
    scales.append(noise_at(progress))
    progress += 1 / num_perfect_steps / (1 + scales[-1] / samples_per_step)
  return np.array(scales)


@pytest.mark.parametrize("samples_per_step", [8, 128])
def test_the_mean_noise_scale_of_any_run_is_the_critical_batch_of_all(samples_per_step):
  steps = np.array([len(trained(size, 300)) for size in SIZES])
  result = fit_tradeoff(SIZES * steps, steps)
  assert result.critical_batch.value == pytest.approx(27.5, rel=0.02)
  scales = trained(samples_per_step, 300)
  # Gradients shrink, and their squares are measured with noise.
  signal = np.geomspace(100, 1, len(scales))
  rough = np.random.default_rng(1).normal(size=(2, len(scales)))
  measured = mean_noise_scale(
    signal * (1 + 0.3 * rough[0]), signal * scales * (1 + 0.1 * rough[1]), samples_per_step
  )
  assert measured is not None
  assert measured.low < 27.5 < measured.high
  assert measured.value == pytest.approx(27.5, rel=0.1)
  # A plain mean over the steps of a small batch would be that of its end, where it is slow.
  if samples_per_step == 8:
    assert scales.mean() > 32


def test_noise_alone_gives_no_mean():
  rough = np.random.default_rng(2).normal(size=100)
  assert mean_noise_scale(rough, np.full(100, 5.0), 8) is None


def test_walks_downhill_and_asks_once():
  asked = []

  def score(place: int) -> tuple[float]:
    asked.append(place)
    return (abs(place - 7),)

  assert lowest_on_grid(score, 3) == 7
  assert len(asked) == len(set(asked))
  assert set(asked) == {2, 3, 4, 5, 6, 7, 8}
