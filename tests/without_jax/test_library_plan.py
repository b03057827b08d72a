"""`import maxbatch as mb`: plans from plain numbers, for loops of one's own, without jax."""

import doctest
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import maxbatch as mb
from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.load import load_config
from maxbatch.config.schema import fields
from maxbatch.core import make_plan

ROOT = Path(mb.__file__).parent


def in_a_fresh_process(program: str) -> str:
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT.parent
  )
  assert done.stderr == ""
  return done.stdout


# --- what the package exports --------------------------------------------------------------------


def test_nothing_is_imported_before_it_is_used_and_a_plan_needs_no_jax():
  program = """
import sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "numpy", "yaml", "flax", "optax")))
import maxbatch as mb
print([name for name in sys.modules if name.startswith("maxbatch.")])
print(mb.plan(batch_size=512, micro_batch_size=4, num_devices=8).gradient_accumulation_steps)
print(mb.RampupBatchManager(8, 8, 64, 1000).num_increments, mb.BatchPlan.__name__)
print([name for name in sys.modules if name.startswith("maxbatch.") and ".core" not in name])
"""
  assert in_a_fresh_process(program) == "[]\n16\n7 BatchPlan\n['maxbatch.errors']\n"


def test_the_function_stays_when_the_command_of_its_name_is_imported():
  program = """
import maxbatch.plan
from maxbatch.plan import main
import maxbatch
print(maxbatch.plan(batch_size=8).batch_at(0), callable(main), maxbatch.errors.__name__)
"""
  assert in_a_fresh_process(program) == "8 True maxbatch.errors\n"


def test_a_name_that_is_not_there():
  name = "plann"
  with pytest.raises(AttributeError, match="module maxbatch has no attribute plann"):
    getattr(mb, name)


def test_type_checkers_are_told_that_there_are_types():
  assert (ROOT / "py.typed").is_file()


# --- plans ---------------------------------------------------------------------------------------


def test_the_example_in_the_docstring():
  assert doctest.testmod(make_plan).attempted > 3
  assert not doctest.testmod(make_plan).failed


def test_the_example_in_the_docs():
  page = ROOT.parent / "docs" / "batch_size.md"
  done = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
  assert done.attempted > 4
  assert not done.failed


def test_arguments_are_keys_of_the_configuration():
  names = set(inspect.signature(mb.plan).parameters) - {"mesh", "num_devices"}
  assert names <= set(fields())


MESHES: Mapping[str, tuple[dict[str, Any], int, int]] = {
  "one device": ({}, 1, 1),
  "a number": ({"num_devices": 8}, 8, 8),
  "data and fsdp": ({"mesh": {"data": 2, "fsdp": 4}}, 8, 8),
  "in any order": ({"mesh": {"tensor": 2, "data": 4}, "num_devices": 8}, 8, 4),
  "the rest": ({"mesh": {"data": -1, "stage": 2}, "num_devices": 8}, 8, 4),
  "a topology": ({"mesh": mb.Topology({"fsdp": 4}, {"data": 2})}, 8, 8),
}


@pytest.mark.parametrize("name", MESHES)
def test_meshes(name):
  given, num_devices, groups = MESHES[name]
  plan = mb.plan(batch_size=64, micro_batch_size=2, **given)
  assert (plan.topology.num_devices, plan.topology.num_batch_groups) == (num_devices, groups)
  assert plan.micro_batch_to_train == 2 * num_devices
  assert plan.gradient_accumulation_steps == 64 // (2 * num_devices)


@pytest.mark.parametrize("half", [0.5, "0.5", "1/2", Fraction(1, 2)])
def test_numbers_are_exact(half):
  plan = mb.plan(micro_batch_size=half, mesh={"tensor": 2}, gradient_accumulation_steps="3")
  assert (plan.per_device_batch_size, plan.global_batch_to_train) == (Fraction(1, 2), 3)
  assert mb.plan(per_device_batch_size=0.29, mesh={"tensor": 100}).micro_batch_to_train == 29


@given(
  st.sampled_from([1, 2, 4, 8]),
  st.integers(1, 4),
  st.integers(1, 4),
  st.sampled_from([{"steps": 7}, {"total_samples": 96}, {"total_tokens": 96 * 128}]),
  st.sampled_from([1, "1/2", 2]),
)
def test_a_plan_is_that_of_the_same_keys_in_a_configuration(devices, micro, count, budget, factor):
  sizes = {
    "batch_size": devices * micro * count,
    "gradient_accumulation_steps": count,
    "expansion_factor_real_data": factor,
    "max_target_length": 128,
  }
  keys = {"steps": -1, **budget, **sizes}
  config = load_config(["config=base", *(f"{key}={value}" for key, value in keys.items())])
  layout = topology(config.mesh, devices)

  def outcome(make: Callable[[], mb.BatchPlan]) -> str:
    try:
      return str(make())
    except mb.UserError as error:
      return f"refused: {error}"

  expected = outcome(lambda: plan_batches(config.batch, config.run, layout))
  assert outcome(lambda: mb.plan(num_devices=devices, **sizes, **budget)) == expected


# --- ramps ---------------------------------------------------------------------------------------


def test_a_ramp_up_as_pairs_as_a_type_as_a_manager_and_as_a_function():
  pairs = [(0, 16), (100, 32), (200, 48), (300, 64)]

  def in_equal_parts(inputs: mb.ScheduleInputs) -> list[tuple[Fraction, Fraction]]:
    return [(Fraction(i * 100), Fraction(inputs.sizes.batch * (i + 1), 4)) for i in range(4)]

  more: dict[str, Any] = {"micro_batch_size": 2, "num_devices": 8, "steps": 20}
  linear = mb.plan(
    batch_size=64,
    batch_schedule_type="linear",
    batch_size_start=16,
    batch_schedule_length=300,
    **more,
  )
  manager = mb.RampupBatchManager(16, 16, 64, 300)
  assert [(point.at, point.batch) for point in linear.schedule.points] == pairs
  for schedule in (pairs, manager):
    assert mb.plan(batch_schedule=schedule, **more).schedule == linear.schedule
  assert mb.plan(batch_schedule=in_equal_parts, batch_size=64, **more).phases == linear.phases


def test_a_ramp_up_has_exact_thresholds_whatever_its_numbers_are():
  manager = mb.RampupBatchManager(1, "1", 4.0, 100, samples_per_size=8)
  assert manager.samples_per_increment == Fraction(100, 3)
  plan = mb.plan(batch_schedule=manager, micro_batch_size=1, num_devices=8, steps=40)
  assert [phase.first.samples for phase in plan.phases] == [0, 40, 72, 120]


def test_the_steps_of_a_plan_are_its_items():
  plan = mb.plan(
    batch_schedule=[[0, 16], [64, 32]], micro_batch_size=2, num_devices=4, total_samples=168
  )
  position, samples = mb.Position(0, 0), 0
  for step in plan:
    assert step.position == position
    assert step.samples == range(samples, samples + step.batch)
    assert step.batch == step.num_microbatches * step.micro_batch == plan.batch_at(samples)
    position, samples = plan.advance(position), samples + step.batch
  assert position == plan.end() == mb.Position(8, 168)
  assert list(plan.starting_at(mb.Position(5, 96))) == list(plan)[5:]
  assert not list(plan.starting_at(plan.end()))


def test_a_plan_without_a_budget_goes_on():
  plan = mb.plan(batch_schedule=[[0, 8], [16, 16]], num_devices=8)
  taken = [step.batch for step, _ in zip(plan, range(1000), strict=False)]
  assert taken == [8, 8, *[16] * 998]
  later = plan.starting_at(mb.Position(10**9, plan.samples_at(10**9)))
  assert next(iter(later)).position == mb.Position(10**9, 16 * 10**9 - 16)
  assert str(plan).endswith("16 samples per step, 1 × 16, without end")
  assert "steps" not in plan.as_dict()
  with pytest.raises(mb.UserError, match=r"this plan has no end: .* for example steps=1000"):
    _ = plan.steps


# --- errors --------------------------------------------------------------------------------------

REFUSALS: Mapping[str, tuple[dict[str, Any], str]] = {
  "sizes": (
    {"batch_size": 500, "micro_batch_size": 64, "num_devices": 2},
    "batch_size=500 over 2 devices is 250 per device, not a multiple of micro_batch_size=64; "
    "nearest: batch_size=512, or micro_batch_size=50 (also: batch_size=384, or "
    "micro_batch_size=125)",
  ),
  "no whole number": (
    {"batch_size": 2.5},
    "batch_size=2.5 must be a whole number, 1 or more; nearest: batch_size=2 or batch_size=3",
  ),
  "no number": (
    {"batch_size": "many"},
    "batch_size='many' is not a number; for example batch_size=4, batch_size=0.25 or "
    "batch_size='1/3'",
  ),
  "a bool": (
    {"batch_size": True},
    "batch_size=True is not a number; for example batch_size=4, batch_size=0.25 or "
    "batch_size='1/3'",
  ),
  "a number that nobody means": (
    {"total_samples": "1e999999999"},
    "total_samples='1e999999999' is not a number; for example total_samples=4, total_samples=0.25 "
    "or "
    "total_samples='1/3'",
  ),
  "two budgets": (
    {"steps": 3, "total_samples": 9},
    "steps=3, total_samples=9, total_tokens=-1: exactly one must be set, the others -1; for "
    "example "
    "steps=-1",
  ),
  "tokens of what": (
    {"tokens_per_step": 4096},
    "tokens_per_step=4096 counts tokens and needs max_target_length, the tokens of a sample; for "
    "example max_target_length=2048",
  ),
  "an axis": (
    {"mesh": {"model": 2}},
    "there is no mesh axis model; the axes are data, fsdp, expert, context, tensor, stage",
  ),
  "a mesh of other devices": (
    {"mesh": {"data": 3}, "num_devices": 8},
    "data=3: the product of the axes, 3, must equal the 8 devices; for example data=8",
  ),
  "the rest of nothing": (
    {"mesh": {"data": -1, "fsdp": 4}},
    "mesh={'data': -1, 'fsdp': 4}: an axis of -1 takes the remaining devices and needs "
    "num_devices; "
    "for example num_devices=4",
  ),
  "no devices": (
    {"mesh": {"data": 0}},
    "mesh['data']=0 must be a whole number, 1 or more; nearest: mesh['data']=1",
  ),
  "no schedule": (
    {"batch_schedule": 8},
    "batch_schedule=8 must be pairs [at, batch], a RampupBatchManager or a function; for example "
    "batch_schedule=[[0, 32], [10000, 64]]",
  ),
  "a schedule that it has not": (
    {"batch_schedule_type": "rampup"},
    "batch_schedule_type=rampup must be one of constant, linear, doubling; for example "
    "batch_schedule_type=constant",
  ),
  "two schedules": (
    {"batch_schedule": list, "batch_schedule_type": "linear"},
    "batch_schedule_type=linear and a function as batch_schedule are different schedules; keep one "
    "of them, for example batch_schedule_type=constant",
  ),
  "a phase": (
    {"batch_schedule": [[0, 12], [5, 16]], "num_devices": 8},
    "batch_schedule: phase 1, [0, 12], has 12 samples, which must be a positive multiple of the 8 "
    "data-parallel groups (data 8 × fsdp 1); nearest: [0, 8] or [0, 16]",
  ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_arguments_and_values_that_work(name):
  given, message = REFUSALS[name]
  assert issubclass(mb.UserError, ValueError)
  with pytest.raises(mb.UserError) as caught:
    mb.plan(**given)
  assert str(caught.value) == message


@pytest.mark.parametrize(
  ("numbers", "message"),
  [
    ((4, 3, 12, 100), r"increment=3 must lead from .*start=4 .*; for example .*size=13"),
    ((4, 0, 12, 100), r"must all be above 0; for example 1"),
    ((12, 4, 4, 100), r"must lead from .*start=12 to per_device_batch_size=4"),
  ],
)
def test_a_ramp_up_of_nothing_is_refused(numbers, message):
  with pytest.raises(mb.UserError, match=message):
    mb.RampupBatchManager(*numbers)
