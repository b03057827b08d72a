"""What the tracker claims against known noise scales: how often its intervals hold, what it refuses."""

import json
import math

import numpy as np
import pytest
from noise_samples import Gradients, equal_parts, gradients

from maxbatch.core.confidence import (
  FEWEST_STEPS,
  INFLATION,
  inflated_t,
  product_of_means,
  ratios_of_means,
)
from maxbatch.core.noise_scale import Moments
from maxbatch.noise.advice import NoiseTracker


def tracked(steps: list[Moments], window_steps: int, group: str = "total") -> NoiseTracker:
  tracker = NoiseTracker(window_steps)
  for step in steps:
    tracker.add({group: step})
  return tracker


def coverage(truth: Gradients, batch: int, steps: int, trials: int = 1000) -> tuple[float, float]:
  """Among trials that claim a number, the share whose interval holds it; and these trials' share."""
  small_TN, big_TN = truth.norms(np.random.default_rng(3), (trials, steps), batch)
  signal_TN = (batch * big_TN - small_TN) / (batch - 1)
  noise_TN = (small_TN - big_TN) / (1 - 1 / batch)
  result = ratios_of_means(noise_TN, signal_TN)
  claimed = np.isfinite(result.ratio)
  held = (result.low < truth.noise_scale) & (truth.noise_scale < result.high)
  return float(held[claimed].mean()), float(claimed.mean())


def test_the_scale_is_a_ratio_of_sums_over_the_window_alone():
  steps = [Moments(signal, 10.0) for signal in (1e6, -1.0, 3.0, 2.0, 4.0, 2.0, 2.0, 3.0, 1.0)]
  estimate = tracked(steps, 8).estimate("total")
  assert estimate.status == "ok"
  assert estimate.scale is not None
  # 80 / 16: the first step has left the window, and no value is clamped.
  assert estimate.scale.value == pytest.approx(5)
  assert (estimate.steps, estimate.window_steps, estimate.negative_share) == (8, 8, 1 / 8)
  assert (estimate.signal, estimate.noise) == (2.0, 10.0)
  assert estimate.scale.low < 5 < estimate.scale.high


def test_negative_noise_is_not_clamped_either():
  steps = [Moments(2.0, noise) for noise in (-5.0, 5.0, -6.0, 7.0, -4.0, 5.0, -3.0, 9.0)]
  scale = tracked(steps, 8).estimate("total").scale
  assert scale is not None
  assert scale.value == pytest.approx(0.5)
  assert scale.low < 0


def test_what_leaves_the_window_is_gone():
  tracker = tracked([Moments(1.0, 1.0)] * 8, 8)
  for _ in range(5):
    tracker.add({"norm": Moments(1.0, 1.0)})
  assert tracker.estimate("total").steps == 3
  for _ in range(3):
    tracker.add({"total": None})
  assert tracker.estimate("total").status == "unavailable"
  assert tracker.estimate("norm").steps == 5


@pytest.mark.parametrize("steps", [FEWEST_STEPS, 16, 32, 64])
@pytest.mark.parametrize("batch", [8, 16, 64])
def test_intervals_hold_the_truth(batch, steps):
  held, claimed = coverage(gradients(noise_scale=20), batch, steps)
  assert held >= 0.93
  assert claimed >= 0.4


@pytest.mark.parametrize("steps", [16, 32, 64])
def test_intervals_hold_the_truth_where_the_signal_is_faint(steps):
  """Here an interval of the form ratio ± error holds in 75% to 90% of cases."""
  held, claimed = coverage(gradients(noise_scale=50, size=30), 12, steps)
  assert held >= 0.93
  assert claimed > 0.2


def test_intervals_are_not_wider_than_they_must_be():
  held, _ = coverage(gradients(noise_scale=20), 64, 32, trials=1500)
  assert held <= 0.98


def test_the_width_is_that_of_fieller():
  """Both ends satisfy the equation that defines them."""
  rng = np.random.default_rng(0)
  above, below = 7 + rng.normal(size=20), 2 + rng.normal(size=20)
  result = ratios_of_means(above[None], below[None])
  t = inflated_t(np.array(19))
  for end in (result.low[0], result.high[0]):
    rest = above - end * below
    assert abs(rest.mean()) == pytest.approx(t * rest.std(ddof=1) / math.sqrt(20))
  assert result.low[0] < result.ratio[0] < result.high[0]


@pytest.mark.parametrize(
  ("degrees", "quantile"), [(7, 2.364), (15, 2.1314), (31, 2.0395), (63, 1.9983)]
)
def test_quantiles_are_those_of_the_tables(degrees, quantile):
  assert inflated_t(np.array(degrees)) / INFLATION == pytest.approx(quantile, rel=1e-3)


def test_no_number_is_claimed_where_the_signal_may_be_zero():
  steps = gradients(noise_scale=100_000).steps(np.random.default_rng(0), 64, 8)
  estimate = tracked(steps, 64).estimate("total")
  assert (estimate.status, estimate.scale) == ("insufficient", None)
  assert estimate.negative_share is not None
  assert 0.2 < estimate.negative_share < 0.8
  assert estimate.noise == pytest.approx(1, rel=0.1)


def test_a_negative_signal_claims_nothing_however_sure():
  estimate = tracked([Moments(-1.0, 5.0)] * 16, 16).estimate("total")
  assert (estimate.status, estimate.negative_share) == ("insufficient", 1.0)


def test_too_few_steps_claim_nothing():
  steps = [Moments(1.0, 5.0)] * FEWEST_STEPS
  assert tracked(steps[:-1], 64).estimate("total").status == "insufficient"
  assert tracked(steps, 64).estimate("total").status == "ok"


def test_gradients_without_noise_have_scale_zero():
  scale = tracked([Moments(2.0, 0.0)] * 16, 16).estimate("total").scale
  assert scale is not None
  assert (scale.low, scale.value, scale.high) == (0, 0, 0)


@pytest.mark.parametrize("exponent", [-200, 150])
def test_the_size_of_gradients_does_not_matter(exponent):
  steps = gradients(noise_scale=20).steps(np.random.default_rng(0), 32, 16)
  huge = [Moments(s.signal * 10.0**exponent, s.noise * 10.0**exponent) for s in steps]
  one, other = (tracked(which, 32).estimate("total").scale for which in (steps, huge))
  assert one is not None
  assert other is not None
  assert other.high == pytest.approx(one.high)


def test_a_batch_of_one_is_unavailable():
  tracker = NoiseTracker(4)
  for _ in range(9):
    tracker.add({"total": equal_parts(1, 5.0, 5.0)})
  estimate = tracker.estimate("total")
  assert (estimate.status, estimate.steps, estimate.scale) == ("unavailable", 0, None)
  assert (estimate.signal, estimate.noise, estimate.negative_share) == (None, None, None)


def test_a_name_never_measured_is_unavailable():
  assert NoiseTracker(4).estimate("head").status == "unavailable"
  assert NoiseTracker(4).estimates() == {}


def test_a_window_without_steps_is_refused():
  with pytest.raises(ValueError, match="length=0 must be at least 1 step"):
    NoiseTracker(0)


def mixed(steps: int, every: int, batch: int = 32, window_steps: int = 64) -> NoiseTracker:
  """A tracker that measured norm (scale 50) at every step, and all layers (70) at every so many."""
  tracker, rng = NoiseTracker(window_steps), np.random.default_rng(2)
  norm, rest = gradients(50, trace=1.0), gradients(9 / (10 / 70 - 1 / 50), trace=9.0, seed=2)
  for step in range(steps):
    small_norm, big_norm = norm.norms(rng, (), batch)
    small_rest, big_rest = rest.norms(rng, (), batch)
    results = {"norm": equal_parts(batch, float(small_norm), float(big_norm))}
    if step % every == 0:
      results["total"] = equal_parts(
        batch, float(small_norm + small_rest), float(big_norm + big_rest)
      )
    tracker.add(results)
  return tracker


def test_groups_may_be_missing_in_some_steps():
  tracker = mixed(40, every=4)
  assert tracker.groups == ("norm", "total")
  assert (tracker.estimate("norm").steps, tracker.estimate("total").steps) == (40, 10)
  assert set(tracker.estimates()) == {"norm", "total"}


def test_a_group_is_the_same_whether_asked_for_alone_or_with_others():
  tracker = mixed(40, every=3)
  assert tracker.estimates()["total"] == tracker.estimate("total")


def test_calibration_recovers_the_slope():
  result = mixed(2000, every=2, window_steps=1000).calibration()
  assert (result.status, result.steps) == ("ok", 1000)
  assert result.slope is not None
  assert result.slope.value == pytest.approx(1.4, rel=0.05)
  assert result.slope.low < 1.4 < result.slope.high


def test_calibration_leaves_out_first_steps_with_much_larger_gradients():
  tracker, random = NoiseTracker(64), np.random.default_rng(0)
  for step in range(40):
    size, spread = (100.0 if step < 2 else 1.0), random.uniform(0.3, 1.7)
    norm = Moments(signal=size * spread, noise=size * 50 * random.uniform(0.9, 1.1))
    total = Moments(signal=size * spread * 300, noise=size * 50 * 300 * 1.2)
    tracker.add({"norm": norm, "total": total})
  result = tracker.calibration()
  assert (result.status, result.steps) == ("ok", 20)
  assert result.slope is not None
  assert result.slope.low < 1.2 < result.slope.high


def test_calibration_steps_outlive_the_window():
  tracker = mixed(640, every=64, batch=256)
  assert tracker.estimate("total").steps == 1
  assert tracker.calibration().steps == 10
  assert tracker.calibration().status == "ok"


def test_the_whole_is_predicted_from_the_norm_layers():
  tracker = mixed(512, every=4)
  predicted, norm, slope = (
    tracker.predicted_total(),
    tracker.estimate("norm"),
    tracker.calibration(),
  )
  assert (predicted.group, predicted.status, predicted.calibration) == ("total", "ok", slope)
  assert predicted.scale is not None
  assert norm.scale is not None
  assert slope.slope is not None
  assert predicted.scale.value == pytest.approx(norm.scale.value * slope.slope.value)
  assert predicted.scale.low < 70 < predicted.scale.high
  errors = [part.high / part.value - 1 for part in (norm.scale, slope.slope, predicted.scale)]
  assert errors[2] == pytest.approx(math.hypot(*errors[:2]))
  errors = [1 - part.low / part.value for part in (norm.scale, slope.slope, predicted.scale)]
  assert errors[2] == pytest.approx(math.hypot(*errors[:2]))


def test_slopes_hold_in_as_many_cases_as_they_say():
  rng, batch, steps, trials = np.random.default_rng(4), 32, 16, 400
  norm, rest = gradients(50, trace=1.0), gradients(90, trace=9.0, seed=2)
  truth = 10 / (1 / 50 + 9 / 90) / 50
  ours, others = norm.norms(rng, (trials, steps), batch), rest.norms(rng, (trials, steps), batch)
  held = []
  for trial in range(trials):
    small, big = ours[0][trial], ours[1][trial]
    all_small, all_big = small + others[0][trial], big + others[1][trial]
    signals = [(batch * b - s) / (batch - 1) for s, b in ((small, big), (all_small, all_big))]
    noises = [(s - b) / (1 - 1 / batch) for s, b in ((small, big), (all_small, all_big))]
    slope = product_of_means((noises[1], signals[0]), (signals[1], noises[0]))
    held += [slope.low < truth < slope.high] if slope else []
  assert len(held) > 300
  assert np.mean(held) >= 0.92


def test_without_enough_calibration_steps_nothing_is_predicted():
  tracker = mixed(7 * 4, every=4)
  assert tracker.calibration().status == "unavailable"
  assert tracker.calibration().steps == 7
  predicted = tracker.predicted_total()
  assert (predicted.status, predicted.scale, predicted.steps) == ("unavailable", None, 28)


def test_calibration_steps_that_say_nothing_predict_nothing():
  tracker = NoiseTracker(16)
  for step in range(16):
    signal = 1.0 + 20 * (-1) ** step
    tracker.add({"norm": Moments(1.0, 5.0), "total": Moments(signal, 5.0)})
  assert tracker.calibration().status == "insufficient"
  assert tracker.predicted_total().status == "insufficient"


def test_a_norm_scale_that_is_insufficient_predicts_nothing():
  tracker = mixed(512, every=4, batch=64)
  assert tracker.predicted_total().status == "ok"
  for step in range(64):
    tracker.add({"norm": Moments((-1.0) ** step, 5.0)})
  assert tracker.calibration().status == "ok"
  assert tracker.predicted_total().status == "insufficient"


def test_a_norm_scale_below_zero_predicts_nothing():
  tracker = mixed(512, every=4, batch=64)
  for _ in range(64):
    tracker.add({"norm": Moments(1.0, -1.0)})
  assert tracker.estimate("norm").status == "ok"
  assert tracker.predicted_total().status == "insufficient"


@pytest.mark.parametrize("steps", [0, 5, 64, 100])
def test_a_restored_tracker_goes_on_identically(steps):
  tracker = mixed(steps, every=3)
  restored = NoiseTracker.from_dict(json.loads(json.dumps(tracker.as_dict(), allow_nan=False)))
  assert restored.as_dict() == tracker.as_dict()
  for step in gradients(30).steps(np.random.default_rng(9), 80, 8):
    for one in (tracker, restored):
      one.add({"norm": step, "total": Moments(step.signal / 3, step.noise), "layer/0": step})
    assert restored.estimates() == tracker.estimates()
    assert restored.predicted_total() == tracker.predicted_total()
