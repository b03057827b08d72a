"""Seesaw against a walk over its steps: where the batch doubles, the rate beside it, refusals."""

import math
from typing import Any

import pytest

from maxbatch.batch.from_config import plan_batches
from maxbatch.batch.learning_rate import LearningRate, learning_rate
from maxbatch.config.load import load_config
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

PEAK = 0.5
SEESAW = {
  "batch_schedule_type": "seesaw",
  "batch_size_start": 8,
  "batch_size": 32,
  "micro_batch_size": 1,
  "lr_schedule_type": "linear",
  "learning_rate": PEAK,
  "learning_rate_final_fraction": 0,
  "warmup_steps": 0,
  "steps": -1,
  "total_samples": 1600,
  "schedule_unit": "samples",
  "max_target_length": 16,
}


def made(devices: int = 8, **keys: Any) -> tuple[BatchPlan, LearningRate]:
  values = SEESAW | keys
  config = load_config(["config=base", *(f"{key}={value}" for key, value in values.items())])
  plan = plan_batches(config.batch, config.run, Topology.of(data=devices), config.optimizer)
  return plan, learning_rate(config.optimizer, plan, config.run.schedule_unit)


def message(**keys: Any) -> str:
  with pytest.raises(UserError) as caught:
    made(**keys)
  return str(caught.value)


def points(plan: BatchPlan) -> list[tuple[int, int]]:
  return [(int(point.at), point.batch) for point in plan.schedule.points]


def test_the_batch_doubles_where_the_rate_would_halve():
  plan, rate = made()
  assert points(plan) == [(0, 8), (800, 16), (1200, 32)]
  # At each doubling the rate is the one before it by the square root of 2.
  assert [rate(phase.first) for phase in plan.phases[:3]] == pytest.approx(
    [0.5, 0.5 / 2**0.5, 0.25]
  )


CURVES = {
  "linear": {},
  "cosine": {"lr_schedule_type": "cosine", "learning_rate_final_fraction": 0.1},
  "wsd": {"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.2},
  "warm-up": {"warmup_steps": 160},
  "tokens": {"schedule_unit": "tokens", "warmup_steps": 160 * 16},
  "shorter": {"learning_rate_schedule_steps": 1000, "learning_rate_final_fraction": 0.2},
}


@pytest.mark.parametrize("name", CURVES)
def test_the_rate_over_the_root_of_the_batch_is_the_constant_batch_s(name):
  keys = CURVES[name]
  plan, rate = made(**keys)
  last = plan.phases[-1].first.samples
  _, alone = made(**keys, batch_schedule_type="constant", batch_size=8, batch_size_start=-1)
  for position, batch, *_ in plan:
    assert rate(position) / math.sqrt(batch / 8) == pytest.approx(alone(position), rel=1e-12)
    # As often as that one has halved, after the warm-up, so often has the batch doubled.
    if rate.plan.measure(position, rate.unit) >= rate.warmup:
      assert batch <= max(8 * min(4.0, PEAK / max(alone(position), 1e-9)), 8)
      assert batch > 4 * min(4.0, PEAK / max(alone(position), 1e-9)) or position.samples == last
  assert {phase.batch for phase in plan.phases} >= {8, 16, 32}


def test_tokens_and_samples_are_one_schedule():
  assert points(made()[0]) == points(made(schedule_unit="tokens")[0])
  assert points(made()[0]) == points(made(total_samples=-1, total_tokens=25600)[0])


def test_it_does_not_depend_on_devices_or_microbatches():
  assert points(made()[0]) == points(made(devices=2, micro_batch_size=2)[0])


def test_a_plan_resumed_at_any_step_has_the_same_steps():
  plan, _ = made()
  steps = list(plan)
  for number, step in enumerate(steps):
    assert list(plan.starting_at(step.position)) == steps[number:]


def test_plain_sgd_keeps_its_rate():
  plan, rate = made(learning_rate_batch_coupling="linear")
  assert [rate(phase.first) for phase in plan.phases[:3]] == pytest.approx([0.5] * 3)


def test_other_schedules_keep_the_rate_of_their_last_batch():
  plan, rate = made(
    batch_schedule_type="doubling", batch_schedule_length=800, learning_rate_batch_coupling="sqrt"
  )
  assert not plan.rate_is_of_first_batch
  assert rate(plan.phases[0].first) == pytest.approx(0.25)


REFUSALS = {
  "steps": (
    {"schedule_unit": "steps"},
    "schedule_unit=steps: batch_schedule_type=seesaw doubles the batch where the learning rate's "
    "schedule halves, and so that schedule must not count steps, which are fewer with a larger batch; "
    "for example schedule_unit=samples",
  ),
  "a budget of steps": (
    {"steps": 50, "total_samples": -1},
    "steps=50: batch_schedule_type=seesaw needs a budget that does not depend on the batch, or "
    "learning_rate_schedule_steps; for example steps=-1 total_samples=1600",
  ),
  "constant": (
    {"lr_schedule_type": "constant"},
    "batch_size_start=8 doubles 2 times to batch_size=32, but lr_schedule_type=constant with "
    "learning_rate_final_fraction=0 halves the learning rate 0 times before its end; for example "
    "lr_schedule_type=cosine",
  ),
  "final": (
    {"learning_rate_final_fraction": 0.25},
    "batch_size_start=8 doubles 2 times to batch_size=32, but lr_schedule_type=linear with "
    "learning_rate_final_fraction=0.25 halves the learning rate 1 times before its end; for example "
    "batch_size_start=16 or learning_rate_final_fraction=0.125",
  ),
  "no start": (
    {"batch_size_start": -1},
    "batch_schedule_type=seesaw needs batch_size_start, the samples per step of its first phase; for "
    "example batch_size_start=8",
  ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused(name):
  keys, expected = REFUSALS[name]
  assert message(**keys) == expected


@pytest.mark.parametrize("name", ["constant", "final", "steps", "a budget of steps"])
def test_what_a_refusal_offers_works(name):
  keys, expected = REFUSALS[name]
  offered = expected.rpartition("for example ")[2]
  for one in offered.split(" or "):
    made(**(keys | dict(pair.split("=") for pair in one.split())))


def test_a_plan_without_the_rate_is_refused():
  config = load_config(["config=base", *(f"{key}={value}" for key, value in SEESAW.items())])
  with pytest.raises(UserError, match="which is not read here"):
    plan_batches(config.batch, config.run, Topology.of(data=8))
