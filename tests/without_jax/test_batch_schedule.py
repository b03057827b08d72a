"""Schedules against a simulation step by step, the defects of other ramps, and every refusal."""

import dataclasses
import itertools
import math
import re
from fractions import Fraction
from typing import Any

import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maxbatch.batch.from_config import plan_batches
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.row_plan import StepRows, dispatches
from maxbatch.config.load import load_config
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.schedule import SCHEDULES, RampupBatchManager
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

_DEFAULT = load_config(["config=base"])
_EXACT = {"per_device_batch_size", "micro_batch_size", "per_device_batch_size_start"}
_EXACT |= {"per_device_batch_size_increment", "expansion_factor_real_data"}
_RUN = {"steps", "total_samples", "total_tokens"}
START = Position(0, 0)


def devices(data: int = 1, tensor: int = 1) -> Topology:
  return Topology.of(data=data, tensor=tensor)


def plan_of(topology: Topology, **keys: Any) -> BatchPlan:
  budget = {key: value for key, value in keys.items() if key in _RUN} or {"steps": 100}
  exact = {k: Fraction(v) if k in _EXACT else v for k, v in keys.items() if k not in _RUN}
  run = dataclasses.replace(_DEFAULT.run, **({"steps": -1} | budget))
  return plan_batches(dataclasses.replace(_DEFAULT.batch, **exact), run, topology)


def ramp(topology: Topology, start: Any, increment: Any, samples: int, **keys: Any) -> BatchPlan:
  return plan_of(
    topology,
    enable_rampup_batch_size=True,
    per_device_batch_size_start=start,
    per_device_batch_size_increment=increment,
    global_rampup_samples=samples,
    **keys,
  )


def message(topology: Topology, **keys: Any) -> str:
  with pytest.raises(UserError) as caught:
    plan_of(topology, **keys)
  return str(caught.value)


def walk(plan: BatchPlan, start: Position = START) -> list[Position]:
  """Every position from `start` to the end, one step at a time."""
  positions = [start]
  while positions[-1].step < plan.steps:
    positions.append(plan.advance(positions[-1]))
  return positions


def sent(plan: BatchPlan, start: Position = START) -> list[StepRows]:
  """What goes to the devices, step by step."""
  return [step for segment in dispatches(plan, start, streamed=False) for step in segment.steps]


def batches(plan: BatchPlan) -> list[int]:
  return [after.samples - before.samples for before, after in itertools.pairwise(walk(plan))]


# --- what goes wrong elsewhere -------------------------------------------------------------------


def test_the_ramp_counts_accumulation():
  # MaxText's defect 1: with accumulation 4 rows of the buffer were never trained on.
  plan = ramp(devices(8), 1, 1, 1152, per_device_batch_size=4, gradient_accumulation_steps=4)
  assert [phase.batch for phase in plan.phases] == [32, 64, 96, 128]
  assert [phase.first.samples for phase in plan.phases] == [0, 384, 768, 1152]
  taken = [
    sample
    for one in sent(plan)
    for sample in range(one.first_sample, one.first_sample + one.num_microbatches * 32)
  ]
  assert taken == list(range(plan.total_samples))


def test_a_resume_goes_on_at_the_next_step_also_after_the_first():
  # Defect 2: resuming was off by one step, and step 0 counted as "no checkpoint".
  plan = ramp(devices(8), 1, 1, 100)
  whole = walk(plan)
  for position in whole:
    assert walk(plan.starting_at(position), position) == whole[position.step :]


def test_a_resume_loses_no_rows():
  # Defect 3: a resume after 2 steps lost 16 of 32 rows, the end of the ramp 24.
  plan = ramp(devices(8), 1, 1, 100)
  for position in walk(plan):
    assert sent(plan, position) == sent(plan)[position.step :]


def test_overshoot_is_carried_into_the_next_phase():
  # Defect 4: a counter reset to 0 made a ramp of 100 samples use 136.
  plan = ramp(devices(8), 1, 1, 100)
  assert [phase.first.samples for phase in plan.phases] == [0, 40, 72, 120]
  thresholds = [Fraction(100 * n, 3) for n in range(4)]
  for phase, threshold in zip(plan.phases, thresholds, strict=True):
    assert phase.first.samples >= threshold
    # Later by less than the step that was under way, whatever the phases before took too much.
    assert phase.first.samples - threshold < phase.batch


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_batch_depends_on_the_samples_and_not_on_the_devices(count):
  # Defect 5: replaying with today's devices gave 36 instead of 112 samples.
  keys = {"batch_schedule": ((0, 16), (100, 32), (200, 64)), "micro_batch_size": 2}
  before, after = plan_of(devices(8), **keys), plan_of(devices(count), **keys)
  position = Position(7, before.samples_at(7))
  assert position.samples == 112
  resumed = after.starting_at(position)
  assert walk(resumed, position) == walk(before)[7:]


def test_fractional_sizes_are_exact():
  # Defect 6: 0.1 to 1.0 by 0.1 was refused, and sizes were cut by int().
  plan = ramp(devices(1, tensor=10), "0.1", "0.1", 900, per_device_batch_size=1, steps=400)
  assert [phase.batch for phase in plan.phases] == list(range(1, 11))
  assert plan.phases[-1].first.samples >= 900
  assert int(100 * 0.29) == 28
  assert plan_of(devices(1, tensor=100), per_device_batch_size="0.29").micro_batch_to_train == 29
  assert int(256 * 1.1) == 281
  text = message(devices(), per_device_batch_size=256, expansion_factor_real_data="1.1")
  assert "is 281.6, but global_batch_to_load must be a whole number of samples" in text


def test_a_ramp_at_one_microbatch_is_one_shape():
  # Defect 7: every phase compiled the step anew.
  plan = ramp(devices(8), 1, 1, 9000, per_device_batch_size=10, gradient_accumulation_steps=10)
  assert len(plan.phases) == 10
  assert plan.micro_batches == (plan.micro_batch_to_train,)
  assert [phase.num_microbatches for phase in plan.phases] == list(range(1, 11))
  assert plan.microbatch_capacity == 16


def test_bad_settings_are_refused_and_not_a_ramp_of_nothing():
  # Defect 7: bad settings silently gave rampup_end_step=0.
  with pytest.raises(UserError, match=r"per_device_batch_size_start=4 must be .* below"):
    ramp(devices(8), 4, 1, 100)
  with pytest.raises(UserError, match="per_device_batch_size_increment=0 must lead"):
    ramp(devices(8), 1, 0, 100)


# --- MaxText's ramp ------------------------------------------------------------------------------


def test_the_manager_is_the_formula():
  manager = RampupBatchManager(Fraction(4), Fraction(2), Fraction(12), Fraction(500), 8)
  assert manager.num_increments == (12 - 4) / 2
  assert manager.samples_per_increment == 500 / 4
  assert [manager.batch_at(samples) for samples in (0, 124, 125, 374, 375, 499, 500, 10**9)] == [
    32, 32, 48, 64, 80, 80, 96, 96,
  ]  # fmt: skip


fractions = st.fractions(Fraction(1, 8), 3, max_denominator=8)


@given(fractions, fractions, st.integers(1, 12), st.integers(1, 5000), st.integers(1, 9))
def test_the_manager_agrees_with_adding_increments_up(start, increment, count, samples, scale):
  manager = RampupBatchManager(
    start, increment, start + count * increment, Fraction(samples), scale
  )
  assert manager.num_increments == count
  assert manager.samples_per_increment * count == samples
  size, threshold = start, Fraction(samples, count)
  for consumed in range(samples + 10):
    while consumed >= threshold and size < manager.per_device_batch_size:
      size, threshold = size + increment, threshold + Fraction(samples, count)
    assert manager.batch_at(consumed) == size * scale


# --- every schedule ------------------------------------------------------------------------------

TYPES = {
  "constant": ({}, [(0, 64)]),
  "rampup": ({"enable_rampup_batch_size": True}, None),
  "list": ({"batch_schedule": ((0, 32), (99, 64))}, [(0, 32), (99, 64)]),
  "linear": (
    {"batch_schedule_type": "linear", "batch_schedule_length": 300, "batch_size_start": 16},
    [(0, 16), (100, 32), (200, 48), (300, 64)],
  ),
  "doubling": (
    {"batch_schedule_type": "doubling", "batch_schedule_length": 300, "batch_size_start": 8},
    [(0, 8), (100, 16), (200, 32), (300, 64)],
  ),
}


def test_every_schedule_is_tried():
  assert TYPES.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", [name for name in TYPES if TYPES[name][1]])
def test_schedules(name):
  keys, expected = TYPES[name]
  plan = plan_of(devices(8), batch_size=64, micro_batch_size=2, **keys)
  assert [(point.at, point.batch) for point in plan.schedule.points] == expected


def test_the_last_batch_of_a_list_is_the_batch():
  plan = plan_of(devices(2), batch_schedule=((0, 32), (10_000, 64)), micro_batch_size=16)
  assert (plan.global_batch_to_train, plan.gradient_accumulation_steps) == (64, 2)


@pytest.mark.parametrize("name", ["list", "linear", "doubling"])
def test_schedules_do_not_depend_on_devices_or_microbatches(name):
  # A microbatch may be chosen by memory; samples per update must not follow it.
  results = {
    plan_of(devices(count), batch_size=64, micro_batch_size=micro, **TYPES[name][0]).schedule.points
    for count, micro in [(8, 2), (4, 2), (8, 1), (2, 4)]
  }
  assert len({tuple((point.at, point.batch) for point in points) for points in results}) == 1


@pytest.mark.parametrize("scale", [1, 128])
def test_samples_and_tokens_are_one_schedule(scale):
  pairs = ((0, 8), (100 * scale, 16), (333 * scale, 64))
  unit = "samples" if scale == 1 else "tokens"
  plan = plan_of(devices(8), batch_schedule=pairs, batch_schedule_unit=unit)
  assert [phase.first.samples for phase in plan.phases] == [0, 104, 344]


def test_there_is_room_for_the_phase_with_the_most_passes():
  plan = plan_of(devices(8), batch_schedule=((0, 800), (9999, 8)), micro_batch_size=1)
  assert (plan.gradient_accumulation_steps, plan.microbatch_capacity) == (1, 128)


def test_a_schedule_in_steps_changes_at_its_steps():
  plan = plan_of(
    devices(8), batch_schedule=((0, 8), (5, 16), (7, 24)), batch_schedule_unit="steps", steps=9
  )
  assert batches(plan) == [8] * 5 + [16] * 2 + [24] * 2


def test_the_shape_of_every_phase_is_known():
  plan = plan_of(
    devices(8), batch_schedule=((0, 8), (64, 32), (128, 40), (300, 64)), micro_batch_size=4
  )
  shapes = [(phase.batch, phase.micro_batch, phase.num_microbatches) for phase in plan.phases]
  # 40 samples are not whole microbatches of 32: the largest smaller one that fits is 8.
  assert shapes == [(8, 8, 1), (32, 32, 1), (40, 8, 5), (64, 32, 2)]
  assert plan.micro_batches == (8, 32)


# --- the plan against a simulation ---------------------------------------------------------------


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Topology, dict[str, Any], list[tuple[int, int]]]:
  """Devices, keys of a list schedule, and its pairs."""
  groups = draw(st.integers(1, 4))
  count = draw(st.integers(1, 5))
  ats = [0, *sorted(draw(st.sets(st.integers(1, 60), min_size=count - 1, max_size=count - 1)))]
  sizes = [groups * draw(st.integers(1, 12)) for _ in ats]
  unit = draw(st.sampled_from(["samples", "steps", "tokens"]))
  pairs = tuple(zip(ats, sizes, strict=True))
  keys = {"batch_schedule": pairs, "batch_schedule_unit": unit, "max_target_length": 3}
  return devices(groups), keys, list(pairs)


def simulate(keys: dict[str, Any], pairs: list[tuple[int, int]], end: int, unit: str) -> list[int]:
  """Batch after batch, looking up the schedule before each, until `end` (steps or samples)."""
  taken: list[int] = []
  while (len(taken) if unit == "steps" else sum(taken)) < end:
    at = {"steps": len(taken), "samples": sum(taken), "tokens": 3 * sum(taken)}
    batch = [size for start, size in pairs if start <= at[keys["batch_schedule_unit"]]][-1]
    taken.append(batch if unit == "steps" else min(batch, end - sum(taken)))
  return taken


@settings(max_examples=examples(500))
@given(scheduled(), st.integers(1, 60))
def test_the_plan_is_what_a_loop_would_take(drawn, steps):
  topology, keys, pairs = drawn
  plan = plan_of(topology, steps=steps, **keys)
  taken = simulate(keys, pairs, steps, "steps")
  assert batches(plan) == taken
  assert plan.end() == Position(steps, sum(taken))
  totals = list(itertools.accumulate(taken, initial=0))
  assert [plan.samples_at(step) for step in range(steps + 1)] == totals
  positions = [Position(step, samples) for step, samples in enumerate(totals[:-1])]
  phases = [plan.phase_at(at.samples) for at in positions]
  assert [phase.num_microbatches * phase.micro_batch for phase in phases] == taken
  assert [one.first_sample for one in sent(plan)] == totals[:-1]


@settings(max_examples=examples(300))
@given(scheduled(), st.integers(1, 400), st.sampled_from(["total_samples", "total_tokens"]))
def test_a_budget_is_met_exactly_or_refused_with_the_nearest_that_are(drawn, total, key):
  topology, keys, pairs = drawn
  scale = 3 if key == "total_tokens" else 1
  points = plan_of(topology, **keys).schedule.points

  def works(total: int) -> bool:
    if total % scale:
      return False
    taken = simulate(keys, pairs, total // scale, "samples")
    before = {"steps": len(taken) - 1, "samples": sum(taken[:-1]), "tokens": 3 * sum(taken[:-1])}
    at = before[keys["batch_schedule_unit"]]
    number = sum(start <= at for start, _ in pairs) - 1
    return taken[-1] % points[number].micro_batch == 0

  if works(total):
    plan = plan_of(topology, **{key: total}, **keys)
    assert batches(plan) == simulate(keys, pairs, total // scale, "samples")
    assert plan.total_samples * scale == total
    return
  text = message(topology, **{key: total}, **keys)
  offers = [int(value) for value in re.findall(r"=(\d+)", text.partition("nearest: ")[2])]
  below = next((other for other in range(total - 1, 0, -1) if works(other)), None)
  above = next(other for other in itertools.count(total + 1) if works(other))
  assert offers == [other for other in (below, above) if other]


@settings(max_examples=examples(300))
@given(scheduled(), st.integers(1, 40), st.data())
def test_a_plan_continued_anywhere_on_its_way_is_itself(drawn, steps, data):
  topology, keys, _ = drawn
  plan = plan_of(topology, steps=steps, **keys)
  position = data.draw(st.sampled_from(walk(plan)))
  later = plan.starting_at(position)
  assert later.end() == plan.end()
  assert walk(later, position) == walk(plan)[position.step :]


@settings(max_examples=examples(300))
@given(scheduled(), st.integers(0, 400))
def test_a_schedule_edited_at_a_restart_takes_effect_from_the_exact_sample(drawn, samples):
  topology, keys, pairs = drawn
  assume(keys["batch_schedule_unit"] == "samples")
  at = Position(7, samples)
  plan = plan_of(topology, steps=30, **keys).starting_at(at)
  for position in walk(plan, at)[:-1]:
    assert plan.batch_at(position.samples) == [b for s, b in pairs if s <= position.samples][-1]
  assert plan.steps == 30


@settings(max_examples=examples(300))
@given(scheduled(), st.integers(1, 60))
def test_phases_follow_each_other_without_gaps(drawn, steps):
  topology, keys, _ = drawn
  plan = plan_of(topology, steps=steps, **keys)
  numbers = [phase.number for phase in plan.phases]
  assert numbers == sorted(set(numbers))
  assert plan.phases[0].first == Position(0, 0)
  for before, after in itertools.pairwise(plan.phases):
    assert after.first == before.end
  assert all(phase.num_steps > 0 for phase in plan.phases)
  most = max(math.ceil(point.batch / point.micro_batch) for point in plan.schedule.points)
  assert most <= plan.microbatch_capacity


def test_the_last_step_is_cut_to_whole_microbatches():
  keys = {"batch_size": 64, "micro_batch_size": 2}
  plan = plan_of(devices(8), total_samples=160, **keys)
  assert batches(plan) == [64, 64, 32]
  assert [plan.phase_at(at.samples).num_microbatches for at in walk(plan)[:-1]] == [4, 4, 2]
  assert plan.phases[-1].is_cut
  assert message(devices(8), total_samples=150, **keys) == (
    "total_samples=150 is 2 steps of 64 samples and a rest of 22 samples, which must be a "
    "multiple of the microbatch (16 samples); nearest: total_samples=144 or total_samples=160"
  )


def test_a_ramp_leaves_a_budget_in_samples_where_it_was():
  keys = {"batch_size": 64, "micro_batch_size": 1, "total_samples": 6400}
  constant = plan_of(devices(8), **keys)
  plan = ramp(devices(8), "1/8", "1/8", 1000, **keys)
  assert plan.total_samples == constant.total_samples == 6400
  assert plan.steps > constant.steps


def test_a_million_steps_on_100_000_devices_are_64_phases():
  plan = ramp(
    devices(100_000),
    "1/64",
    "1/64",
    10**9,
    batch_size=6_400_000,
    micro_batch_size=1,
    steps=1_000_000,
  )
  assert plan.samples_at(999_999) + 6_400_000 == plan.total_samples
  assert len(plan.phases) == 64


# --- refusals ------------------------------------------------------------------------------------

_SEVEN = ((0, 8), (10, 16), (20, 24), (30, 32), (40, 40), (50, 48), (60, 50), (70, 64))
REFUSALS = {
  "a later phase": (
    {"batch_schedule": _SEVEN, "steps": 1},
    "batch_schedule: phase 7, [60, 50], has 50 samples, which must be a positive multiple of the 8 "
    "data-parallel groups (data 8 × fsdp 1); nearest: [60, 48] or [60, 56]",
  ),
  "a load of a phase": (
    {"batch_schedule": ((0, 8), (9, 16)), "expansion_factor_real_data": "1.0625"},
    "expansion_factor_real_data=1.0625 × global_batch_to_train=8 of phase 1 is 8.5, but "
    "global_batch_to_load must be a whole number of samples; nearest: "
    "expansion_factor_real_data=1 or expansion_factor_real_data=1.125",
  ),
  "two schedules": (
    {"batch_schedule": ((0, 8),), "enable_rampup_batch_size": True},
    "enable_rampup_batch_size=true and batch_schedule=[[0, 8]] are different schedules; keep one "
    "of them, for example enable_rampup_batch_size=false batch_schedule=[]",
  ),
  "a list and another batch": (
    {"batch_schedule": ((0, 8), (9, 16)), "batch_size": 64},
    "the last batch of batch_schedule=16 and batch_size=64 give the same size two values; "
    "keep one of them, for example with batch_size=-1",
  ),
  "a list that does not begin": (
    {"batch_schedule": ((5, 8),)},
    "batch_schedule=[[5, 8]] must begin with a pair at 0; for example batch_schedule=[[0, 32], "
    "[10000, 64]]",
  ),
  "a list out of order": (
    {"batch_schedule": ((0, 8), (9, 16), (9, 24))},
    "batch_schedule: phase 3, [9, 24], must begin after 9, where the phase before it begins; "
    "for example [10, 24]",
  ),
  "pairs that are none": (
    {"batch_schedule": ((0, 8), (9,))},
    "batch_schedule=[[0, 8], [9]] must be pairs [at, batch]; for example batch_schedule=[[0, 32], "
    "[10000, 64]]",
  ),
  "no length": (
    {"batch_schedule_type": "linear", "batch_size": 64, "micro_batch_size": 1},
    "batch_schedule_type=linear needs the length of its ramp in samples; for example "
    "batch_schedule_length=10000",
  ),
  "no start": (
    {"batch_schedule_type": "linear", "batch_size": 64, "batch_schedule_length": 9},
    "batch_schedule_type=linear needs batch_size_start, the samples per step of its first phase; "
    "for example batch_size_start=8",
  ),
  "no start of an odd batch": (
    {"batch_schedule_type": "doubling", "batch_size": 24, "batch_schedule_length": 9},
    "batch_schedule_type=doubling needs batch_size_start, the samples per step of its first "
    "phase; but half of batch_size=24 is no multiple of the 8 data-parallel groups (data 8 × "
    "fsdp 1); use batch_schedule_type=linear",
  ),
  "no room for a start": (
    {"batch_schedule_type": "linear", "batch_size": 8, "batch_schedule_length": 9},
    "batch_schedule_type=linear needs batch_size_start, the samples per step of its first phase; "
    "but batch_size=8 is the smallest batch on the 8 data-parallel groups (data 8 × fsdp 1); "
    "raise batch_size",
  ),
  "no doubling": (
    {"batch_schedule_type": "doubling", "batch_size": 96, "batch_size_start": 32,
     "batch_schedule_length": 9},
    "batch_size_start=32 does not reach batch_size=96 by doubling; nearest: batch_size_start=24 or "
    "batch_size_start=48",
  ),
  "no whole increments": (
    {"batch_schedule_type": "linear", "batch_size": 64, "batch_size_start": 8,
     "batch_size_increment": 20, "batch_schedule_length": 9},
    "batch_size_increment=20 must lead from batch_size_start=8 to batch_size=64 in whole "
    "increments, each a multiple of 8; nearest: batch_size_increment=8 or batch_size_increment=56",
  ),
  "an unknown schedule": (
    {"batch_schedule_type": "dubling"},
    "batch_schedule_type=dubling: there is no such batch_schedule_type. Did you mean doubling? "
    "Known: constant, rampup, list, linear, doubling, seesaw.",
  ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
  keys, text = REFUSALS[case]
  assert message(devices(8), **keys) == text


sizes = st.fractions(Fraction(1, 4), 9, max_denominator=4)


@settings(max_examples=examples(500))
@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), sizes, sizes, sizes)
def test_every_offer_for_a_ramp_works(data, tensor, passes, start, increment, target):
  topology = devices(data, tensor)
  keys = {
    "per_device_batch_size": target,
    "gradient_accumulation_steps": passes,
    "per_device_batch_size_start": start,
    "per_device_batch_size_increment": increment,
    "enable_rampup_batch_size": True,
  }
  for _ in range(4):  # Target, start and increment may each be wrong: one message each.
    text = refused(topology, keys)
    if "there is none" in text:
      return
    offers = re.findall(r"(\w+)=([\d./]+)", text.partition("nearest: ")[2])
    assert bool(offers) == bool(text)
    keys |= {key: Fraction(value) for key, value in offers[-1:]}
  plan = plan_of(topology, **keys)
  rise = plan.per_device_batch_size - keys["per_device_batch_size_start"]
  assert len(plan.schedule.points) == rise / keys["per_device_batch_size_increment"] + 1


def refused(topology: Topology, keys: dict[str, Any]) -> str:
  """What the plan says against the keys; nothing if they work."""
  try:
    plan_of(topology, **keys)
  except UserError as error:
    return str(error)
  return ""


# --- the learning rate ---------------------------------------------------------------------------


@pytest.mark.parametrize(("coupling", "power"), [("none", 0), ("linear", 1), ("sqrt", 0.5)])
def test_the_learning_rate_follows_the_batch(coupling, power):
  plan = plan_of(devices(8), batch_schedule=((0, 16), (160, 32), (320, 64)), micro_batch_size=2)
  config = dataclasses.replace(
    _DEFAULT.optimizer,
    lr_schedule_type="constant",
    warmup_steps=0,
    learning_rate=0.5,
    learning_rate_batch_coupling=coupling,
  )
  rate = learning_rate(config, plan, "samples")
  for at in walk(plan)[:-1]:
    share = plan.batch_at(at.samples) / 64
    assert rate(at) == pytest.approx(0.5 * share**power)


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_ramp_does_not_move_the_learning_rate(unit):
  keys = {"batch_size": 64, "micro_batch_size": 1, "total_samples": 6400}
  constant = plan_of(devices(8), **keys)
  plan = ramp(devices(8), "1/8", "1/8", 1000, **keys)
  rates = [learning_rate(_DEFAULT.optimizer, one, unit) for one in (constant, plan)]
  after_warmup = [at for at in walk(plan) if at.samples > 640]
  assert [rates[0](at) for at in after_warmup] == [rates[1](at) for at in after_warmup]
  assert (rates[0].length, rates[0].warmup) == (rates[1].length, rates[1].warmup)
