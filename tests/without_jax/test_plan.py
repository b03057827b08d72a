"""Every size against counting by hand, and every error's offer against trying it."""

import dataclasses
import itertools
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.batch.from_config import plan_batches
from maxbatch.config.load import load_config
from maxbatch.config.schema import BatchConfig, RunConfig
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

_DEFAULT = load_config(["config=base"])
PRINTED = """\
Batch plan
  num_devices                   1,024 devices = data 256 × fsdp 2 × tensor 2 × stage 1
  micro_batch_to_train            512 samples = 1,024 × per_device_batch_size 0.5
  global_batch_to_train         4,096 samples = 512 × gradient_accumulation_steps 8
  global_batch_to_load         16,384 samples = 4,096 × expansion_factor_real_data 4
  eval_batch                    1,024 samples = 1,024 × eval_per_device_batch_size 1
  tokens_per_step           8,388,608 tokens  = 4,096 × max_target_length 2,048
  total_samples             2,048,000 samples = 4,096 × steps 500
  total_tokens          4,194,304,000 tokens  = 2,048,000 × 2,048
"""
small = st.integers(1, 6)
sizes = st.fractions(min_value=0, max_value=9, max_denominator=12)


def run_of(**budget: int) -> RunConfig:
  keys: dict[str, Any] = {"steps": -1, **(budget or {"steps": 10})}
  return dataclasses.replace(_DEFAULT.run, **keys)


def batch_of(**keys: Any) -> BatchConfig:
  exact = {"per_device_batch_size", "expansion_factor_real_data", "eval_per_device_batch_size"}
  keys = {key: Fraction(value) if key in exact else value for key, value in keys.items()}
  return dataclasses.replace(_DEFAULT.batch, **keys)


def devices(data: int = 1, fsdp: int = 1, tensor: int = 1, stage: int = 1) -> Topology:
  return Topology.of(data=data, fsdp=fsdp, tensor=tensor, stage=stage)


def plan_of(topology: Topology, run: RunConfig | None = None, **keys: Any) -> BatchPlan:
  return plan_batches(batch_of(**keys), run or run_of(), topology)


def message(topology: Topology, run: RunConfig | None = None, **keys: Any) -> str:
  with pytest.raises(UserError) as caught:
    plan_of(topology, run, **keys)
  return str(caught.value)


def offers(text: str) -> list[Fraction]:
  """The values that a message offers after `nearest:`."""
  return [Fraction(value) for value in re.findall(r"=(\S+)", text.partition("nearest: ")[2])]


def test_the_derivation_is_printed_line_by_line():
  plan = plan_of(
    devices(data=256, fsdp=2, tensor=2),
    run_of(total_tokens=4096 * 2048 * 500),
    per_device_batch_size="0.5",
    gradient_accumulation_steps=8,
    expansion_factor_real_data=4,
    eval_per_device_batch_size=1,
    max_target_length=2048,
  )
  assert f"{plan}\n" == PRINTED


def test_sizes_are_exact_where_floating_point_is_not():
  assert int(0.29 * 100) == 28  # What binary floating point would train on.
  assert (
    plan_of(devices(data=1, tensor=100), per_device_batch_size="0.29").micro_batch_to_train == 29
  )
  plan = plan_of(devices(tensor=3), per_device_batch_size="1/3")
  assert plan.micro_batch_to_train == 1


def test_devices_that_share_a_sample_may_have_half_of_one():
  plan = plan_of(devices(data=4, tensor=2), per_device_batch_size="0.5")
  assert plan.micro_batch_to_train == 4
  assert plan_of(devices(data=2, stage=4), per_device_batch_size="1/4").micro_batch_to_train == 2


def test_a_load_is_exact_or_refused():
  loaded = plan_of(devices(), per_device_batch_size=10, expansion_factor_real_data="1.1")
  assert loaded.global_batch_to_load == 11
  assert message(devices(), per_device_batch_size=256, expansion_factor_real_data="1.1") == (
    "expansion_factor_real_data=1.1 × global_batch_to_train=256 is 281.6, but "
    "global_batch_to_load must be a whole number of samples; nearest: "
    "expansion_factor_real_data=1.09765625 or expansion_factor_real_data=1.1015625"
  )


@pytest.mark.parametrize("factor", ["-1", "0", "-0.5"])
def test_a_factor_that_is_not_positive_means_one(factor):
  plan = plan_of(devices(data=2), expansion_factor_real_data=factor)
  assert plan.global_batch_to_load == plan.global_batch_to_train


def test_per_device_batch_size_is_refused_with_both_neighbours():
  assert message(devices(data=2, fsdp=2, tensor=2), per_device_batch_size="1.3") == (
    "per_device_batch_size=1.3 on 8 devices is 10.4 samples, which must be a positive multiple of "
    "the 4 data-parallel groups (data 2 × fsdp 2); "
    "nearest: per_device_batch_size=1 or per_device_batch_size=1.5"
  )


def test_a_batch_of_nothing_is_refused_with_the_smallest_that_works():
  assert message(devices(data=2, tensor=3), per_device_batch_size=0) == (
    "per_device_batch_size=0 on 6 devices is 0 samples, which must be a positive multiple of the "
    "2 data-parallel groups (data 2 × fsdp 1); "
    "nearest: per_device_batch_size=1/3"
  )


def test_the_evaluation_batch_has_its_own_key_in_the_message():
  text = message(devices(data=8), eval_per_device_batch_size="0.3")
  assert text.startswith("eval_per_device_batch_size=0.3 on 8 devices is 2.4 samples")
  assert text.endswith("nearest: eval_per_device_batch_size=1")
  assert plan_of(devices(data=8), eval_per_device_batch_size=0).eval_batch == 32


def test_the_budget_is_given_exactly_once():
  assert message(devices(), run_of(steps=-1)) == (
    "steps=-1, total_samples=-1, total_tokens=-1: exactly one must be set, the others -1; "
    "for example steps=1000"
  )
  assert message(devices(), run_of(steps=400, total_tokens=4096)) == (
    "steps=400, total_samples=-1, total_tokens=4096: exactly one must be set, the others -1; "
    "for example steps=-1"
  )


def test_a_budget_ends_with_a_whole_step():
  assert message(devices(data=8), run_of(total_samples=1000)) == (
    "total_samples=1000 is 31 steps of 32 samples and a rest of 8 samples, which must be a "
    "multiple of the microbatch (32 samples); nearest: total_samples=992 or total_samples=1024"
  )
  assert message(devices(data=8), run_of(total_tokens=100)) == (
    "total_tokens=100 is 0 steps of 4096 tokens and a rest of 100 tokens, which must be a "
    "multiple of the microbatch (4096 tokens); nearest: total_tokens=4096"
  )


@given(st.sets(st.sampled_from(["steps", "total_samples", "total_tokens"])))
def test_the_example_for_a_wrong_number_of_budgets_works(keys):
  budget = {"steps": -1} | dict.fromkeys(keys, 4 * 128)
  if len(keys) != 1:
    text = message(devices(), run_of(**budget))
    changes = re.findall(r"(\w+)=(\S+)", text.partition("for example ")[2])
    budget |= {key: int(value) for key, value in changes}
  assert plan_of(devices(), run_of(**budget)).steps > 0


@given(small, small, small, small, st.integers(1, 4), st.integers(1, 40), st.integers(1, 7))
def test_sizes_equal_counting(data, fsdp, tensor, stage, per_group, steps, accumulation):
  topology = devices(data, fsdp, tensor, stage)
  per_device = Fraction(per_group, tensor * stage)
  run, length = run_of(steps=steps), 3
  plan = plan_of(
    topology,
    run,
    per_device_batch_size=per_device,
    gradient_accumulation_steps=accumulation,
    max_target_length=length,
  )
  every_device = itertools.product(range(data), range(fsdp), range(tensor), range(stage))
  assert plan.micro_batch_to_train == sum(per_device for _ in every_device)
  assert plan.micro_batch_to_train % topology.num_batch_groups == 0
  assert plan.global_batch_to_train == sum(plan.micro_batch_to_train for _ in range(accumulation))
  position = Position(0, 0)
  for step in range(steps):
    assert plan.samples_at(step) == position.samples
    position = plan.advance(position)
  assert position == plan.end()
  assert plan.total_samples == sum(plan.global_batch_to_train for _ in range(steps))
  assert plan.total_tokens == steps * plan.tokens_per_step == plan.measure(position, "tokens")
  assert (plan.measure(position, "steps"), plan.measure(position, "samples")) == (
    steps,
    plan.total_samples,
  )


@given(small, small, small, sizes)
def test_offers_for_per_device_batch_size_work_and_are_nearest(data, fsdp, tensor, per_device):
  topology = devices(data, fsdp, tensor)
  working = [Fraction(rows, tensor) for rows in range(1, 9 * tensor + 2)]
  if per_device in working:
    assert plan_of(topology, per_device_batch_size=per_device).per_device_batch_size == per_device
    return
  offered = offers(message(topology, per_device_batch_size=per_device))
  below = [value for value in working if value < per_device][-1:]
  above = [value for value in working if value > per_device][:1]
  assert offered == [*below, *above]
  for value in offered:
    assert plan_of(topology, per_device_batch_size=value).micro_batch_to_train > 0


@given(
  st.integers(1, 300), st.fractions(min_value=Fraction(1, 99), max_value=5, max_denominator=99)
)
def test_offers_for_the_factor_work_and_are_nearest(batch, factor):
  keys = {"per_device_batch_size": batch}
  if (batch * factor).denominator == 1:
    plan = plan_of(devices(), **keys, expansion_factor_real_data=factor)
    assert plan.global_batch_to_load == batch * factor
    return
  offered = offers(message(devices(), **keys, expansion_factor_real_data=factor))
  working = [Fraction(load, batch) for load in range(1, 5 * batch + 2)]
  below = [value for value in working if value < factor][-1:]
  above = [value for value in working if value > factor][:1]
  assert offered == [*below, *above]
  for value in offered:
    plan = plan_of(devices(), **keys, expansion_factor_real_data=value)
    assert plan.global_batch_to_load == batch * value


@given(
  st.sampled_from(["total_samples", "total_tokens"]), small, st.integers(1, 3), st.integers(1, 99)
)
def test_offers_for_the_budget_work_and_are_nearest(key, batch, length, budget):
  keys = {"per_device_batch_size": batch, "max_target_length": length}
  per_step = batch * (length if key == "total_tokens" else 1)
  working = range(per_step, 200, per_step)
  if budget in working:
    assert plan_of(devices(), run_of(**{key: budget}), **keys).steps == budget // per_step
    return
  offered = offers(message(devices(), run_of(**{key: budget}), **keys))
  below = [value for value in working if value < budget][-1:]
  above = [value for value in working if value > budget][:1]
  assert offered == [*below, *above]
  for value in offered:
    assert plan_of(devices(), run_of(**{key: int(value)}), **keys).steps == value / per_step


@given(st.fractions(min_value=Fraction(1, 10**9), max_value=9, max_denominator=2**40))
def test_an_exact_size_is_shown_as_what_reads_back_exactly(factor):
  batch = factor.denominator
  plan = plan_of(devices(), per_device_batch_size=batch, expansion_factor_real_data=factor)
  shown = re.search(r"expansion_factor_real_data (\S+)", str(plan))
  assert shown is not None
  loaded = load_config(["config=base", f"expansion_factor_real_data={shown[1]}"])
  assert loaded.batch.expansion_factor_real_data == factor


def test_the_fused_step_has_room_to_grow():
  def capacity(k: int) -> int:
    return plan_of(devices(), gradient_accumulation_steps=k).microbatch_capacity

  assert [capacity(k) for k in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


def test_the_derived_sizes_are_plain_values():
  plan = plan_of(devices(data=2, tensor=3), per_device_batch_size="1/3")
  assert plan.as_dict() == {
    "micro_batch_to_train": 2,
    "global_batch_to_train": 2,
    "global_batch_to_load": 2,
    "eval_batch": 2,
    "num_devices": 6,
    "per_device_batch_size": "1/3",
    "gradient_accumulation_steps": 1,
    "tokens_per_step": 256,
    "steps": 10,
    "total_samples": 20,
    "total_tokens": 2560,
    "batch_schedule": [["0", 2]],
  }
