"""The published rules give what their papers publish, in the units that they say."""

import dataclasses
import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.batch_rules import published
from maxbatch.batch_rules.findings import FINDINGS, Setting
from maxbatch.batch_rules.post_training import CHOICES
from maxbatch.batch_rules.published import expected_loss, half_life_tokens
from maxbatch.batch_rules.rule import Fitted, Training, at_overhead, data_factor, steps_factor

BACKTEST = Path(__file__).resolve().parents[2] / "scripts" / "backtest_advice.py"


def training(parameters: float, tokens: float) -> Training:
  """With the usual 6 FLOPs for each parameter and token."""
  return Training(parameters, tokens, 6 * parameters, expected_loss(parameters, tokens))


EXAMPLES = (training(125e6, 2.5e9), training(7e9, 140e9), training(70e9, 1.4e12))
TABLE = {
  # Rounded as in the table of worked examples, in millions of tokens.
  "step-law": (0.13, 1.34, 5.0),
  "power-lines-optimal": (0.25, 1.16, 2.8),
  "deepseek": (0.28, 3.9, 17.4),
  "zhang": (0.46, 3.1, 9.1),
  "nanochat": (0.52, 4.2, 8.4),
  "kaplan": (0.62, 4.9, 8.6),
  "minicpm": (0.62, 9.3, 19.6),
  "minimax": (1.25, 17.7, 36.8),
  "power-lines-critical": (2.1, 13.6, 39.4),
}


def value(name: str, one: Training) -> float:
  return next(rule for rule in published.batch_rules() if rule.name == name).batch_tokens(one)


@pytest.mark.parametrize("name", TABLE)
def test_the_worked_examples(name):
  results = [value(name, one) / 1e6 for one in EXAMPLES]
  assert results == pytest.approx(TABLE[name], rel=0.02, abs=0.006)


def test_a_fifth_of_the_critical_batch_is_near_the_batch_at_a_fifth_more_data():
  for one in EXAMPLES:
    zhang, critical = value("zhang", one), value("power-lines-critical", one)
    assert 0.85 < 0.2 * critical / zhang < 1.15


def test_minimax_published_four_points():
  for loss, tokens in published.MINIMAX_DOUBLED_AT:
    one = dataclasses.replace(EXAMPLES[0], loss=loss)
    assert value("minimax", one) == pytest.approx(tokens, rel=0.05)


def test_deepseek_trained_its_models_by_its_own_rule():
  # Its table of models, from memory: 2304 and 4608 rows of 4,096 tokens, 2T tokens; 7B and 67B.
  small, large = (Training(n, 2e12, c, 2.0) for n, c in ((7e9, 4.3e10), (67e9, 4.2e11)))
  assert value("deepseek", small) == pytest.approx(2304 * 4096, rel=0.05)
  assert value("deepseek", large) == pytest.approx(4608 * 4096, rel=0.15)
  _, rate = published.rate_rules()
  assert rate.learning_rate(small) == pytest.approx(4.2e-4, rel=0.05)
  assert rate.learning_rate(large) == pytest.approx(3.2e-4, rel=0.05)


def test_power_lines_at_610_million_parameters():
  one = training(610e6, 20 * 610e6)
  assert value("power-lines-optimal", one) / 2048 == pytest.approx(223, abs=1)


def test_the_rates_of_the_worked_examples():
  step_law, deepseek_rate = published.rate_rules()
  results = [rule.learning_rate(one) for rule in (step_law, deepseek_rate) for one in EXAMPLES]
  assert results == pytest.approx([2.3e-3, 4.5e-4, 1.8e-4, 1.6e-3, 5.9e-4, 3.3e-4], rel=0.03)


def test_the_plateau_is_a_batch_of_4096_rows():
  assert value("merrill", EXAMPLES[1]) == 2**24


positive = st.floats(1e-3, 1e3)


@given(st.floats(1e-3, 100))
def test_data_and_steps_are_on_the_hyperbola(overhead):
  data, steps = data_factor(overhead), steps_factor(overhead)
  assert (data - 1) * (steps - 1) == pytest.approx(1)
  # Tokens = batch × steps: at Bcrit = Emin / Smin, with both minima 1.
  assert data == pytest.approx(overhead * steps)


@given(st.floats(1e7, 1e12), st.floats(1e8, 1e13), st.floats(1.5, 5))
def test_every_batch_is_in_tokens_and_grows_with_the_data_by_its_exponent(n, d, loss):
  exponents = {"zhang": 0.47, "step-law": 0.571, "deepseek": 0.3271, "power-lines-optimal": 0.383}
  exponents |= {"power-lines-critical": 0.462}
  one = Training(n, d, 6 * n, loss)
  for name, exponent in exponents.items():
    twice = dataclasses.replace(one, tokens=2 * d)
    assert value(name, twice) / value(name, one) == pytest.approx(2**exponent)
  for rule in published.batch_rules():
    # No rule of a run of 10M to 10T tokens says less than a row or more than all of it.
    assert 100 < rule.batch_tokens(one) < 1e10


@given(st.floats(1e-5, 1e-2), st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.01, 1))
def test_a_setting_scaled_twice_is_scaled_once_and_back_is_itself(value_, one, two, share):
  for rule in published.scaling_rules("learning_rate"):
    once = rule.scaled(value_, one * two, share)
    twice = rule.scaled(rule.scaled(value_, one, share), two, share * one)
    assert once == pytest.approx(twice)
    assert rule.scaled(once, 1 / (one * two), share * one * two) == pytest.approx(value_)


@given(st.floats(0.5, 0.9999), st.floats(0.01, 50), st.floats(1e3, 1e7))
def test_the_half_life_stays_in_tokens(decay, factor, batch):
  [marek] = [rule for rule in published.scaling_rules("adam_b2") if rule.name == "marek-b2"]
  scaled = marek.scaled(decay, factor, 1.0)
  if scaled < 1 - 1e-9:
    before, after = half_life_tokens(decay, batch), half_life_tokens(scaled, factor * batch)
    assert after == pytest.approx(before, rel=1e-4)


def test_the_moments_of_malladi_reach_zero_and_agree_with_marek_nearby():
  by_name = {
    rule.name: rule for key in ("adam_b1", "adam_b2") for rule in published.scaling_rules(key)
  }
  assert by_name["malladi-b1"].scaled(0.9, 10, 1) == pytest.approx(0)
  assert by_name["malladi-b1"].scaled(0.9, 100, 1) == 0
  close = [by_name[name].scaled(0.999, 1.5, 1) for name in ("malladi-b2", "marek-b2")]
  assert close[0] == pytest.approx(close[1], abs=1e-6)


@given(st.floats(1e5, 1e8), st.floats(1e-5, 1e-2))
def test_the_weight_decay_keeps_the_timescale(batch, rate):
  one = EXAMPLES[1]
  rule = published.WEIGHT_DECAY
  decay = rule.weight_decay(one, batch, rate)
  share = batch / (rate * decay * one.tokens)
  assert share == pytest.approx(0.2235, rel=1e-3)
  assert rule.weight_decay(one, 2 * batch, rate) == pytest.approx(2 * decay)


def test_under_adam_the_rate_peaks_at_the_noise_scale():
  surge = next(r for r in published.scaling_rules("learning_rate") if r.name == "surge-rate")
  rates = [surge.scaled(1.0, factor, 1.0) for factor in (0.25, 0.5, 1, 2, 4)]
  assert rates == pytest.approx([*reversed(rates)])
  assert max(rates) == rates[2] == 1
  # Far below the peak it is the square root.
  assert surge.scaled(1.0, 4, 1e-6) == pytest.approx(2, rel=1e-4)


def test_every_rule_says_what_it_is():
  for name, rule in published.RULES.items():
    assert name == rule.name
    assert all((rule.title, rule.formula, rule.units, rule.source, rule.caveat)), name
    assert all(0 < each.low <= each.high for each in rule.fitted), name
  # Of whose constants we have but the memory, the caveat says so.
  from_memory = [rule for rule in published.RULES.values() if rule.read == "memory"]
  assert len(from_memory) == 3
  assert all("memory" in rule.caveat for rule in from_memory)


def test_definitions_are_kept_apart():
  means = {rule.name: rule.means for rule in published.batch_rules()}
  assert {name for name, meaning in means.items() if meaning == "critical"} == {
    "kaplan",
    "minimax",
    "power-lines-critical",
  }
  for rule in published.batch_rules():
    at_a_tenth = at_overhead(rule, EXAMPLES[1], 0.1)
    if rule.means in ("optimal", "tolerance"):
      assert at_a_tenth is None
    elif rule.means == "overhead":
      assert at_a_tenth == pytest.approx(rule.batch_tokens(EXAMPLES[1]) / 2)


def test_outside_of_what_was_fitted_the_factor_is_said():
  zhang = next(rule for rule in published.batch_rules() if rule.name == "zhang")
  assert zhang.beyond(EXAMPLES[0]) == 1
  assert zhang.beyond(EXAMPLES[1]) == pytest.approx(7 / 1.2)
  assert Fitted("tokens", 1e9, 2e9).beyond(training(1e9, 5e8)) == pytest.approx(2)
  equal = next(rule for rule in published.batch_rules() if rule.name == "zhang-equal-tokens")
  assert equal.speaks_of(EXAMPLES[0])
  assert not equal.speaks_of(EXAMPLES[1])


def test_the_loss_is_that_of_chinchilla():
  results = [expected_loss(one.parameters, one.tokens) for one in EXAMPLES]
  assert results == pytest.approx([3.37, 2.18, 1.94], abs=0.005)
  assert math.isclose(expected_loss(1e30, 1e30), 1.69, rel_tol=1e-6)


def test_a_linear_rise_takes_the_steps_of_its_integral():
  script = runpy.run_path(str(BACKTEST))
  phases = script["rise"](1e6, 4e6, 60e9)
  schedule = script["PublishedSchedule"]("x", 1e9, 100e9, phases, "memory")
  # dt / B over a linear rise is over · ln(end / start) / (end − start).
  steps = 60e9 * math.log(4) / 3e6 + 40e9 / 4e6
  assert schedule.average_batch_tokens() == pytest.approx(100e9 / steps, rel=1e-3)
  assert (schedule.batch_tokens, schedule.reached_at()) == (4e6, 0.6)


def test_the_page_has_the_backtest_as_its_script_makes_it(capsys):
  runpy.run_path(str(BACKTEST))["main"]()
  page = BACKTEST.parent.parent / "docs" / "advice.md"
  assert capsys.readouterr().out.strip() in page.read_text()


def test_every_finding_says_what_it_is_and_for_whom():
  found = [*FINDINGS, *CHOICES]
  names = [one.name for one in found]
  assert len({*names, *published.RULES}) == len(names) + len(published.RULES)
  for one in found:
    assert all((one.title, one.formula, one.units, one.source, one.caveat, one.says)), one.name
    assert "arXiv" in one.source or "openreview.net" in one.source


@pytest.mark.parametrize(
  ("setting", "fitting"),
  [
    (Setting("adamw", "cosine", False), ["seesaw", "fast-catch-up", "lmo-scaling"]),
    (
      Setting("adamw", "wsd", True),
      ["wsd-crossing", "seesaw", "fast-catch-up", "lmo-scaling", "mixture-power-laws"],
    ),
    (
      Setting("muon", "cosine", False),
      ["fast-catch-up", "muon-efficiency", "muon-critical", "lmo-scaling"],
    ),
    (Setting("adafactor", "constant", False), ["wsd-crossing", "fast-catch-up"]),
  ],
)
def test_findings_are_of_their_optimizer_schedule_and_model(setting, fitting):
  assert [one.name for one in FINDINGS if not one.misfit(setting)] == fitting
