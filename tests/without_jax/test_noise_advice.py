"""The line that people read, word for word."""

import dataclasses

import pytest

from maxbatch.core.confidence import Interval
from maxbatch.core.noise_scale import Calibration, Estimate
from maxbatch.noise.advice import advice

CAVEAT = "a heuristic (McCandlish et al. 2018), verify with maxbatch critical_batch"
MEASURED = Estimate(
  "total", "ok", 64, 64, negative_share=0.0, signal=1.0, noise=83.0, scale=Interval(83, 69, 97)
)
PREDICTED = dataclasses.replace(
  MEASURED, signal=None, noise=None, calibration=Calibration("ok", 12, Interval(1.43, 1.2, 1.7))
)
UNKNOWN = Estimate("total", "insufficient", 64, 64, 0.2, signal=0.01, noise=83.0)


def test_in_the_efficient_range():
  assert advice(MEASURED, 32, 256) == (
    "noise scale ≈ 83 samples, 21,000 tokens (95% 69–97 over 64 steps); batch 32 is in the "
    "efficient range: doubling it would take about 36% fewer steps for 28% more data — " + CAVEAT
  )


def test_well_below():
  assert advice(MEASURED, 8, 256) == (
    "noise scale ≈ 83 samples, 21,000 tokens (95% 69–97 over 64 steps); batch 8 is well below it: "
    "doubling it would take about 46% fewer steps for 9% more data — " + CAVEAT
  )


def test_above():
  assert advice(MEASURED, 4096, 256) == (
    "noise scale ≈ 83 samples, 21,000 tokens (95% 69–97 over 64 steps); batch 4,096 is above it: "
    "halving it would take about 49% less data for 2% more steps — " + CAVEAT
  )


@pytest.mark.parametrize(
  ("batch", "place"),
  [(17, "well below"), (18, "in the efficient"), (97, "in the efficient"), (98, "above")],
)
def test_the_whole_interval_must_say_it(batch, place):
  # A quarter of 69 is 17.25.
  assert f"batch {batch} is {place}" in advice(MEASURED, batch, 256)


def test_predicted_from_the_norm_layers():
  assert advice(PREDICTED, 32, 256) == (
    "noise scale ≈ 83 samples, 21,000 tokens (95% 69–97 over 64 steps), predicted from the norm "
    "layers as 1.43 × theirs (95% 1.20–1.70 over 12 calibration steps); batch 32 is in the "
    "efficient range: doubling it would take about 36% fewer steps for 28% more data — " + CAVEAT
  )


def test_what_is_left_out():
  line = advice(MEASURED, 32, 256, ["the tied embedding"])
  assert line.endswith(CAVEAT + "; left out: the tied embedding")
  assert "left out: a, b" in advice(UNKNOWN, 32, 256, ["a", "b"])


@pytest.mark.parametrize(
  ("interval", "shown"),
  [
    (Interval(83.4, 69.3, 97.1), "≈ 83 samples, 21,400 tokens (95% 69–97"),
    (Interval(83.4, 40.1, 190.7), "≈ 80 samples, 21,000 tokens (95% 40–190"),
    (Interval(8_346, 8_300, 8_392), "≈ 8,350 samples, 2,137,000 tokens (95% 8,300–8,390"),
    (Interval(1.234, 1.1, 1.4), "≈ 1.23 samples, 316 tokens (95% 1.10–1.40"),
    (
      Interval(123_456, 45_000, 1_234_567),
      "≈ 120,000 samples, 32,000,000 tokens (95% 45,000–1,230,000",
    ),
    (Interval(50, 1, 600), "≈ 50 samples, 13,000 tokens (95% 1.0–600"),
    (Interval(50, 50, 50), "≈ 50.00 samples, 12,800 tokens (95% 50.00–50.00"),
  ],
)
def test_numbers_are_rounded_to_what_the_interval_supports(interval, shown):
  assert shown in advice(dataclasses.replace(MEASURED, scale=interval), 64, 256)


def test_a_wide_interval_leaves_few_digits_of_the_percentages():
  wide = dataclasses.replace(MEASURED, scale=Interval(50, 1, 600))
  assert "doubling it would take about 30% fewer steps for 40% more data" in advice(wide, 32, 256)


def test_a_small_change_is_no_change_of_zero():
  huge = dataclasses.replace(MEASURED, scale=Interval(9000, 8000, 10_000))
  assert "about 50% fewer steps for less than 1% more data" in advice(huge, 8, 256)
  near = dataclasses.replace(MEASURED, scale=Interval(100, 2, 120))
  assert "about 3% fewer" not in advice(near, 8, 256)
  assert "for 7% more data" in advice(near, 8, 256)


def test_a_scale_that_may_be_zero_has_only_an_upper_end():
  low = dataclasses.replace(MEASURED, scale=Interval(3.0, -2.0, 8.0))
  start = "noise scale below 8.0 samples, 2,000 tokens (95% over 64 steps); "
  assert advice(low, 8, 256) == (
    f"{start}batch 8 is not above that; more cannot be said — {CAVEAT}"
  )
  assert advice(low, 9, 256) == (
    f"{start}batch 9 is above that: a smaller one would save data — {CAVEAT}"
  )


def test_gradients_that_all_agree_are_no_division_by_zero():
  none = dataclasses.replace(MEASURED, scale=Interval(0.0, 0.0, 0.0))
  assert "a smaller one would save data" in advice(none, 8, 256)


def test_insufficient_says_to_average_longer():
  assert advice(UNKNOWN, 32, 256) == (
    "noise scale not known: over 64 steps the gradient cannot be distinguished from its noise "
    "(|G|² is estimated below 0 in 20% of them); average over a longer window, for example 128 "
    "steps"
  )


def test_insufficient_says_to_wait_while_the_window_fills():
  assert advice(dataclasses.replace(UNKNOWN, steps=20, negative_share=0.0), 32, 256) == (
    "noise scale not known yet: over 20 steps the gradient cannot be distinguished from its "
    "noise; the window holds 64: wait"
  )
  assert advice(dataclasses.replace(UNKNOWN, steps=7), 32, 256) == (
    "noise scale not known yet: 7 of at least 8 steps measured"
  )


def test_unavailable_with_a_batch_of_one():
  assert advice(Estimate("total", "unavailable", 64, 0), 1, 256) == (
    "noise scale unavailable: it compares the samples of a step, and a batch of 1 has one; use a "
    "batch of at least 2"
  )


def test_unavailable_without_data():
  assert advice(Estimate("total", "unavailable", 64, 0), 32, 256) == (
    "noise scale unavailable: none of the last 64 steps measured it"
  )


def test_not_calibrated_yet():
  few = dataclasses.replace(
    UNKNOWN, status="unavailable", calibration=Calibration("unavailable", 3)
  )
  assert advice(few, 32, 256) == (
    "noise scale not calibrated yet: 3 of at least 8 calibration steps"
  )
  none = dataclasses.replace(few, steps=0, calibration=Calibration("unavailable", 0))
  assert advice(none, 32, 256).endswith("none of the last 64 steps measured it")
  faint = dataclasses.replace(UNKNOWN, calibration=Calibration("insufficient", 9))
  assert advice(faint, 32, 256) == (
    "noise scale not calibrated yet: over 9 calibration steps the gradient cannot be "
    "distinguished from its noise; more of them are needed, as a smaller gns_calibrate_every gives"
  )
