"""The learning rate against optax's schedules, in every unit."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.batch import learning_rate as learning_rate_module
from maxbatch.batch.from_config import plan_batches
from maxbatch.batch.learning_rate import SCHEDULES, LearningRate, learning_rate
from maxbatch.config.load import load_config
from maxbatch.core.keys import Unit
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

_CONFIG = load_config(["config=base"])
_UNITS: tuple[Unit, ...] = ("steps", "samples", "tokens")
STEPS, PEAK = 40, 0.5


def plan_of(steps: int = STEPS) -> BatchPlan:
  run = dataclasses.replace(_CONFIG.run, steps=steps)
  return plan_batches(_CONFIG.batch, run, Topology.of(data=8))


PLAN = plan_of()


def schedule(unit: Unit = "steps", plan: BatchPlan = PLAN, **keys: Any) -> LearningRate:
  defaults: dict[str, Any] = {"learning_rate": PEAK, "warmup_steps": 0}
  return learning_rate(dataclasses.replace(_CONFIG.optimizer, **(defaults | keys)), plan, unit)


def rates(schedule: LearningRate, steps: int = STEPS) -> list[float]:
  return [schedule(Position(step, schedule.plan.samples_at(step))) for step in range(steps)]


def message(**keys: Any) -> str:
  with pytest.raises(UserError) as caught:
    schedule(**keys)
  return str(caught.value)


WARMUP = 10
AFTER = STEPS - WARMUP
FINAL = 0.1 * PEAK
REFERENCES = {
  "constant": optax.constant_schedule(PEAK),
  "cosine": optax.cosine_decay_schedule(PEAK, AFTER, alpha=0.1),
  "linear": optax.linear_schedule(PEAK, FINAL, AFTER),
  # The last fifth of what follows the warm-up.
  "wsd": optax.linear_schedule(PEAK, FINAL, AFTER // 5, transition_begin=AFTER - AFTER // 5),
}


def test_every_schedule_is_compared():
  assert REFERENCES.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", REFERENCES)
def test_schedules_equal_those_of_optax(name):
  ours = schedule(lr_schedule_type=name, warmup_steps=WARMUP, wsd_decay_steps_fraction=0.2)
  warmup = optax.linear_schedule(0.0, PEAK, WARMUP)
  # The update moves by the rate at its end while warming up, and by that at its start afterwards.
  expected = [float(jnp.asarray(warmup(step + 1))) for step in range(WARMUP)]
  expected += [float(jnp.asarray(REFERENCES[name](step))) for step in range(AFTER + 20)]
  assert rates(ours, STEPS + 20) == pytest.approx(expected, rel=1e-5)


def test_the_first_change_that_contributing_shows(monkeypatch):
  page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
  added, reference = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
  names = dict(vars(learning_rate_module))
  exec(added, names)
  monkeypatch.setitem(SCHEDULES, "quadratic", names["quadratic"])
  with pytest.raises(AssertionError):
    test_every_schedule_is_compared()
  monkeypatch.setitem(REFERENCES, "quadratic", eval(f"{{{reference}}}", globals())["quadratic"])
  test_every_schedule_is_compared()
  test_schedules_equal_those_of_optax("quadratic")


def test_the_first_update_already_moves():
  assert rates(schedule(warmup_steps=4))[:4] == pytest.approx(
    [PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK]
  )
  assert rates(schedule(warmup_steps=0))[0] == PEAK


@given(st.sampled_from(sorted(SCHEDULES)), st.floats(0, 1), st.floats(0, 1), st.integers(1, STEPS))
def test_steps_samples_and_tokens_agree(name, warmup, decay, length):
  in_steps = {"steps": 1, "samples": 32, "tokens": 32 * 128}
  curves = [
    rates(
      schedule(
        unit,
        lr_schedule_type=name,
        warmup_steps=-1,
        warmup_steps_fraction=warmup,
        wsd_decay_steps_fraction=decay,
        learning_rate_schedule_steps=length * in_steps[unit],
      )
    )
    for unit in _UNITS
  ]
  assert curves[1] == pytest.approx(curves[0], abs=1e-9)
  assert curves[2] == pytest.approx(curves[0], abs=1e-9)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 20), st.integers(20, 30), st.floats(0, 1))
def test_a_schedule_shorter_than_the_budget_ends_at_its_final_value(name, warmup, length, final):
  short = schedule(
    lr_schedule_type=name,
    warmup_steps=warmup,
    learning_rate_schedule_steps=length,
    learning_rate_final_fraction=final,
  )
  curve = rates(short)
  assert curve[length:] == pytest.approx(
    [PEAK * (1 if name == "constant" else final)] * (STEPS - length)
  )
  assert max(curve) <= PEAK
  assert all(before <= after for before, after in itertools.pairwise(curve[:warmup]))
  assert all(before >= after for before, after in itertools.pairwise(curve[warmup:]))


def test_the_share_of_the_warmup_is_of_the_schedule():
  curve = rates(schedule(warmup_steps=-1, warmup_steps_fraction=0.25))
  assert curve == rates(schedule(warmup_steps=10))


def test_a_longer_budget_leaves_a_schedule_of_fixed_length_as_it_was():
  keys: dict[str, Any] = {"learning_rate_schedule_steps": STEPS, "warmup_steps": 5}
  longer = rates(schedule(plan=plan_of(2 * STEPS), **keys), 2 * STEPS)
  assert longer[:STEPS] == rates(schedule(**keys))


def test_a_warmup_longer_than_the_schedule_is_refused():
  assert message(warmup_steps=50) == (
    "warmup_steps=50 must be at most the 40 steps of the learning rate's schedule, which "
    "includes the warm-up; for example warmup_steps=4"
  )


def test_an_unknown_schedule_is_refused_with_the_nearest_name():
  assert message(lr_schedule_type="cosin") == (
    "lr_schedule_type=cosin: there is no such lr_schedule_type. Did you mean cosine? "
    "Known: constant, cosine, linear, wsd."
  )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, STEPS])
@pytest.mark.parametrize("coupling", ["none", "sqrt"])
def test_the_highest_rate_of_a_phase(name, warmup, coupling):
  batch = dataclasses.replace(
    _CONFIG.batch, batch_schedule=((0, 32), (160, 64), (1000, 128)), batch_size=128
  )
  run = dataclasses.replace(_CONFIG.run, steps=STEPS)
  plan = plan_batches(batch, run, Topology.of(data=8))
  keys = {"learning_rate_batch_coupling": coupling, "lr_schedule_type": name}
  result = schedule(plan=plan, warmup_steps=warmup, **keys)
  assert len(plan.phases) == 3
  for phase in plan.phases:
    every = [result(phase.after(step)) for step in range(phase.num_steps)]
    assert result.highest(phase) == max(every)
