"""The rule that grows the batch: each of its conditions, and what holds whatever happens."""

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.core.confidence import Interval
from maxbatch.core.noise_scale import Estimate
from maxbatch.core.phases import Position
from maxbatch.errors import UserError
from maxbatch.noise.controller import Controller, ControllerLimits, Decision

WINDOW = 16


def estimate(low: float, value: float | None = None, high: float | None = None) -> Estimate:
  value = 1.2 * low if value is None else value
  scale = Interval(value, low, 2 * value - low if high is None else high)
  return Estimate("total", "ok", WINDOW, WINDOW, scale=scale)


def controller(**limits: Any) -> Controller:
  """One that has seen quiet losses and grows at once unless a limit forbids it."""
  given: dict[str, Any] = {"max_batch": 1024, "windows_before_growth": 1} | limits
  one = Controller(ControllerLimits(**given))
  for step in range(64):
    one.observe(3 + 0.01 * (step % 5))
  return one


def decided(one: Controller, low: float = 500, batch: int = 32, step: int = 100) -> Decision:
  return one.decide(Position(step, step * 32), batch, estimate(low))


def test_it_grows():
  assert decided(controller()) == Decision(
    64,
    "the noise scale is at least 500 samples, above 2 × 32, in 1 window in a row; at most 64 "
    "allowed",
    grew=True,
  )


@pytest.mark.parametrize(
  ("limits", "low", "batch"),
  [
    ({"growth_limit": Fraction(4)}, 500, 128),
    ({"growth_limit": Fraction(4)}, 100, 100),
    ({"growth_limit": Fraction(4), "unit": 8}, 100, 96),
    ({"growth_limit": Fraction(3, 2), "unit": 8}, 500, 48),
    ({"growth_limit": Fraction(23, 20)}, 500, 36),
    ({"max_batch": 50, "unit": 8}, 500, 48),
    ({"unit": 24}, 500, 48),
  ],
)
def test_it_grows_to_the_largest_allowed_multiple(limits, low, batch):
  assert decided(controller(**limits), low).batch == batch


@pytest.mark.parametrize("unit", [32, 40])
def test_a_unit_may_leave_no_larger_batch(unit):
  assert decided(controller(unit=unit, growth_limit=Fraction(6, 5))) == Decision(
    32, f"no multiple of {unit} is above 32 and at most 38", grew=False
  )


def test_the_lower_bound_must_exceed_twice_the_batch():
  assert decided(controller(), low=64) == Decision(
    32, "the noise scale may be 64 samples, not above 2 × 32", grew=False
  )
  assert decided(controller(), low=64.1).grew


def test_a_smaller_batch_is_never_taken():
  assert decided(controller(), low=1, batch=512).batch == 512


@pytest.mark.parametrize("batch", [1024, 1056])
def test_nothing_grows_beyond_the_largest_batch(batch):
  assert decided(controller(), low=1e6, batch=batch) == Decision(
    batch, f"batch {batch:,} is at its maximum: max_batch=1024", grew=False
  )


def test_an_uncertain_noise_scale_is_not_acted_on():
  one, position = controller(max_relative_half_width=0.5), Position(100, 3200)
  assert one.decide(position, 32, estimate(100, 210, 320)) == Decision(
    32, "the noise scale, 210 ± 110, is too uncertain: max_relative_half_width=0.5", grew=False
  )
  assert one.decide(position, 32, estimate(100, 200, 300)).grew


@pytest.mark.parametrize("status", ["insufficient", "unavailable"])
def test_no_number_is_not_acted_on(status):
  none = Estimate("total", status, WINDOW, WINDOW)
  assert controller().decide(Position(100, 3200), 32, none) == Decision(
    32, f"no noise scale: {status}", grew=False
  )


def test_nothing_is_decided_in_the_warm_up():
  one = controller(warmup_samples=3201)
  assert decided(one, step=100) == Decision(32, "warm-up until 3,201 samples", grew=False)
  assert decided(one, step=101).grew
  assert decided(controller(warmup_samples=3200), step=100).grew


def test_windows_of_the_warm_up_do_not_count():
  one = controller(warmup_samples=3201, windows_before_growth=2)
  assert [decided(one, step=step).grew for step in (80, 90, 100, 110, 120)] == [False] * 4 + [True]


def test_windows_in_a_row_must_agree():
  one = controller(windows_before_growth=3)
  assert decided(one, step=100) == Decision(
    32, "the noise scale's interval is above 2 × 32 in 1 of 3 windows", grew=False
  )
  decided(one, step=110)
  assert not decided(one, low=60, step=120).grew
  assert [decided(one, step=step).grew for step in (130, 140, 150)] == [False, False, True]
  assert not decided(one, batch=64, step=160).grew


def test_windows_that_share_more_than_half_count_once():
  one = controller(windows_before_growth=2)
  assert not decided(one, step=100).grew
  assert not decided(one, step=107).grew
  assert decided(one, step=108).grew


def test_a_window_counts_once_even_after_a_growth():
  one = controller()
  assert decided(one, step=100).grew
  assert not decided(one, batch=64, step=107).grew
  assert decided(one, batch=64, step=108).grew


def test_a_batch_stays_for_a_while():
  one = controller(dwell_samples=1000)
  assert decided(one, step=40).grew
  assert decided(one, batch=64, step=50) == Decision(
    64, "batch 64 stays for 680 more samples: dwell_samples=1000", grew=False
  )
  assert not decided(one, batch=64, step=71).grew
  assert decided(one, batch=64, step=72).grew


def test_the_first_batch_stays_for_a_while_too():
  assert not decided(controller(dwell_samples=3201)).grew
  assert decided(controller(dwell_samples=3200)).grew


def test_agreement_is_kept_while_a_batch_must_stay():
  one = controller(dwell_samples=3840, windows_before_growth=2)
  assert [decided(one, step=step).grew for step in (90, 100, 110, 119, 120)] == [False] * 4 + [True]


def spiked(*newest: float) -> Decision:
  one = controller()
  for loss in newest:
    one.observe(loss)
  return decided(one)


def test_it_waits_in_a_loss_spike():
  assert spiked(*[9.0] * 8) == Decision(32, "loss spike: 9 now, 3.02 ± 0.015 before", grew=False)
  assert not spiked(*[3.09] * 8).grew
  assert spiked(*[3.07] * 8).grew


def test_a_lower_loss_is_no_spike_nor_is_a_single_outlier():
  assert spiked(*[1.0] * 8).grew
  assert spiked(9.0, *[3.0] * 7).grew


def test_a_spike_that_has_passed_is_none():
  assert spiked(*[9.0] * 8, *[3.0] * 8).grew


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_spike(loss):
  assert spiked(loss).reason == "a loss was not finite"
  assert not spiked(loss, *[3.0] * 63).grew
  assert spiked(loss, *[3.0] * 64).grew


def test_a_spike_breaks_the_row():
  one = controller(windows_before_growth=2, loss_window=8)
  decided(one, step=100)
  one.observe(99.0)
  assert not decided(one, step=110).grew
  one.observe(3.0)
  assert [decided(one, step=step).grew for step in (120, 130)] == [False, True]


def test_without_losses_a_spike_cannot_be_excluded():
  one = Controller(ControllerLimits(1024, windows_before_growth=1))
  for _ in range(7):
    one.observe(3.0)
  assert decided(one).reason == "7 of the 8 losses that detecting a spike needs"
  one.observe(3.0)
  assert decided(one).grew


@pytest.mark.parametrize(
  ("limits", "said"),
  [
    ({"unit": 0}, "unit=0 must be at least 1; for example unit=1"),
    ({"max_batch": 7, "unit": 8}, "max_batch=7 must be at least 8; for example max_batch=8"),
    (
      {"dwell_samples": -1},
      "dwell_samples=-1 must be at least 0; for example dwell_samples=0",
    ),
    (
      {"windows_before_growth": 0},
      "windows_before_growth=0 must be at least 1; for example windows_before_growth=1",
    ),
    (
      {"growth_limit": Fraction(1)},
      "growth_limit=1 must be above 1; for example growth_limit=2",
    ),
    (
      {"max_relative_half_width": 0.0},
      "max_relative_half_width=0.0 must be above 0; for example max_relative_half_width=1",
    ),
    (
      {"warmup_samples": -1},
      "warmup_samples=-1 must be at least 0; for example warmup_samples=0",
    ),
    (
      {"spike_deviations": 0.0},
      "spike_deviations=0.0 must be above 0; for example spike_deviations=1",
    ),
    ({"loss_window": 7}, "loss_window=7 must be at least 8; for example loss_window=8"),
  ],
)
def test_limits_without_sense_are_refused(limits, said):
  with pytest.raises(UserError) as caught:
    ControllerLimits(**({"max_batch": 8} | limits))
  assert str(caught.value) == said


@dataclasses.dataclass(frozen=True)
class Moment:
  """One decision point: the steps since the last one, their loss, and the estimate."""

  steps: int
  loss: float
  estimate: Estimate


def scales() -> st.SearchStrategy[Estimate]:
  known = st.tuples(
    st.floats(1, 3000) | st.floats(500, 3000), st.floats(1, 1.5), st.floats(1, 1.5)
  ).map(lambda drawn: estimate(drawn[0], drawn[0] * drawn[1], drawn[0] * drawn[1] * drawn[2]))
  return known | st.just(Estimate("total", "insufficient", WINDOW, WINDOW))


# Quiet losses and large scales are drawn more often: otherwise hardly a run would ever grow.
quiet = st.floats(2, 2.2)
runs = st.lists(
  st.builds(Moment, st.integers(1, 20), quiet | quiet | quiet | st.just(50.0), scales()),
  min_size=5,
  max_size=25,
)
any_limits = st.builds(
  lambda unit, units, **rest: ControllerLimits(unit=unit, max_batch=unit * units, **rest),
  st.integers(1, 24),
  st.integers(1, 100),
  dwell_samples=st.sampled_from([0, 100, 2000]),
  windows_before_growth=st.integers(1, 3),
  growth_limit=st.sampled_from([Fraction(3, 2), Fraction(2), Fraction(5)]),
  warmup_samples=st.sampled_from([0, 500]),
  loss_window=st.sampled_from([8, 64]),
)


def run(
  limits: ControllerLimits, batch: int, moments: list[Moment], restore_at: int = -1
) -> list[tuple[Position, int, Estimate, Decision]]:
  """Position, batch, estimate and decision of every decision point; restored before one of them."""
  one, position, made = Controller(limits), Position(0, 0), []
  for number, moment in enumerate(moments):
    if number == restore_at:
      one = Controller.from_dict(limits, json.loads(json.dumps(one.as_dict(), allow_nan=False)))
    for _ in range(moment.steps):
      one.observe(moment.loss)
    position = Position(position.step + moment.steps, position.samples + moment.steps * batch)
    made.append((position, batch, moment.estimate, one.decide(position, batch, moment.estimate)))
    batch = made[-1][-1].batch
  return made


@settings(max_examples=examples(150))
@given(any_limits, st.integers(1, 6), runs)
def test_what_holds_whatever_happens(limits, units, moments):
  changed, counted = 0, 0
  for position, batch, seen, decision in run(limits, limits.unit * units, moments):
    assert decision.reason
    assert decision.grew == (decision.batch != batch)
    if not decision.grew:
      continue
    assert seen.scale is not None
    assert 2 * batch < seen.scale.low
    assert batch < decision.batch <= min(limits.max_batch, seen.scale.low)
    assert decision.batch <= limits.growth_limit * batch
    assert decision.batch % limits.unit == 0
    assert position.samples >= max(limits.warmup_samples, changed + limits.dwell_samples)
    assert position.step >= counted + (limits.windows_before_growth - 1) * WINDOW / 2
    changed, counted = position.samples, position.step


@settings(max_examples=examples(100))
@given(any_limits, runs, st.data())
def test_a_restored_controller_decides_the_same(limits, moments, data):
  whole = run(limits, limits.unit, moments)
  restore_at = data.draw(st.integers(0, len(moments) - 1))
  assert run(limits, limits.unit, moments, restore_at) == whole


def test_restored_at_any_point_it_follows_the_same_batches():
  limits = ControllerLimits(512, 8, dwell_samples=3000, windows_before_growth=2, warmup_samples=500)
  moments = [
    Moment(9, 50.0 if number in (10, 11) else 2.0, estimate(40 * number)) for number in range(1, 50)
  ]
  whole = run(limits, 16, moments)
  batches = [made[-1].batch for made in whole]
  assert sorted(set(batches)) == [16, 32, 64, 128, 256, 512]
  for restore_at in range(len(moments)):
    assert run(limits, 16, moments, restore_at) == whole


def test_an_infinite_loss_survives_the_state():
  one = controller()
  one.observe(math.inf)
  again = Controller.from_dict(one.limits, json.loads(json.dumps(one.as_dict(), allow_nan=False)))
  assert decided(again).reason == decided(one).reason == "a loss was not finite"


def test_a_rising_noise_scale_is_followed_to_the_largest_batch():
  quiet = [Moment(20, 2.0, estimate(low)) for low in range(40, 2000, 40)]
  batches = [made[-1].batch for made in run(ControllerLimits(256, 8), 16, quiet)]
  assert sorted(set(batches)) == [16, 32, 64, 128, 256]
