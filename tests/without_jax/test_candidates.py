"""The sizes to choose from: against trying every size, and what is said when there is none."""

import dataclasses
import re
from fractions import Fraction
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.batch.from_config import given_sizes, plan_batches
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.tuning.candidates import (
  Candidate,
  batch_follows,
  candidates,
  is_open,
  offered,
  with_size,
)

LENGTH = 1024


def config_of(**keys: Any) -> Config:
  values = {"max_target_length": LENGTH, "micro_batch_size": "auto"} | keys
  return load_config(["config=base", *(f"{key}={value}" for key, value in values.items())])


def devices(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Topology:
  return Topology.of(data=data, fsdp=fsdp, tensor=tensor)


def found(layout: Topology, **keys: Any) -> tuple[Candidate, ...]:
  config = config_of(**keys)
  return candidates(config.batch, config.run, layout)


def sizes(layout: Topology, **keys: Any) -> list[Fraction]:
  return [one.per_device for one in found(layout, **keys)]


def message(layout: Topology, **keys: Any) -> str:
  with pytest.raises(UserError) as caught:
    found(layout, **keys)
  return str(caught.value)


def test_the_divisors_of_a_given_batch_ascending():
  assert sizes(devices(8), batch_size=96) == [1, 2, 3, 4, 6, 12]
  assert sizes(devices(2, fsdp=4), global_batch_to_train=96) == [1, 2, 3, 4, 6, 12]
  assert sizes(devices(8), tokens_per_step=96 * LENGTH) == [1, 2, 3, 4, 6, 12]


def test_each_size_comes_with_its_plan():
  last = found(devices(8), batch_size=96)[-2]
  assert last == Candidate(Fraction(6), 2, 48, 96, LENGTH)
  assert last.device_tokens == 6 * LENGTH
  assert last.suggested_batches() == (48, 96, 144)
  assert found(devices(8), batch_size=96)[-1].suggested_batches() == (96, 192)


def test_devices_that_share_a_sample_take_fractions_of_it():
  fractions = [Fraction(1, 4), Fraction(1, 2), Fraction(1)]
  assert sizes(devices(2, tensor=4), batch_size=8) == fractions
  # explore's bounds are whole, so that its smallest bound, 1, is open below.
  explored = sizes(devices(2, tensor=4), batch_size=8, micro_batch_size="explore")
  assert explored[:4] == [*fractions, 2]
  assert sizes(devices(2, tensor=4))[:4] == [*fractions, 2]


def test_an_open_batch_follows_from_powers_of_two():
  open_batch = found(devices(4), gradient_accumulation_steps=3)
  assert [one.per_device for one in open_batch] == [1, 2, 4, 8, 16, 32, 64, 128]
  assert [one.batch for one in open_batch][:3] == [12, 24, 48]
  assert {one.num_microbatches for one in open_batch} == {3}
  assert sizes(devices(4), max_target_length=1 << 20) == [1, 2]


def test_explore_keeps_to_its_range():
  ranges = {"{explore: {min: 2, max: 6}}": [2, 3, 4, 6], "{explore: {max: 2}}": [1, 2]}
  # Powers of two beside the divisors, up to 4 times the batch's 12 samples per device.
  ranges |= {"{explore: {min: 4}}": [4, 6, 8, 12, 16, 32]}
  ranges |= {"explore": [1, 2, 3, 4, 6, 8, 12, 16, 32]}
  for value, expected in ranges.items():
    assert sizes(devices(8), batch_size=96, micro_batch_size=value) == expected
  # Without a batch, powers of two, beyond the cap too where a maximum asks for them.
  assert sizes(devices(2), micro_batch_size="{explore: {min: 3, max: 20}}") == [4, 8, 16]
  assert sizes(devices(2), micro_batch_size="{explore: {min: 200, max: 600}}") == [256, 512]
  assert sizes(devices(2), micro_batch_size="{explore: {max: 1}}") == [1]


def test_a_schedule_leaves_the_sizes_that_work_in_every_stage():
  ramp = {"enable_rampup_batch_size": True, "global_rampup_samples": 1000}
  # The ramp begins at one sample per device and pass and must begin below the run's size.
  assert sizes(devices(8), batch_size=96, **ramp) == [2, 3, 4, 6, 12]
  linear = {"batch_schedule_type": "linear", "batch_schedule_length": 1000, "batch_size_start": 8}
  assert sizes(devices(8), batch_size=96, **linear) == [1, 2, 3, 4, 6, 12]
  listed = {"batch_schedule": "[[0, 32], [100, 96]]"}
  assert sizes(devices(8), **listed) == [1, 2, 3, 4, 6, 12]


def test_a_budget_leaves_the_sizes_whose_microbatches_end_with_it():
  budget = {"steps": -1, "total_samples": 96 * 10 + 16}
  assert sizes(devices(8), batch_size=96, **budget) == [1, 2]


def test_open_is_what_auto_and_explore_are():
  for value, expected in {"auto": True, "explore": True, "none": False, "4": False}.items():
    assert is_open(config_of(micro_batch_size=value).batch) is expected
  assert batch_follows(config_of().batch)
  assert not batch_follows(config_of(batch_size=96).batch)


@pytest.mark.parametrize("value", ["auto", "explore"])
def test_the_solver_takes_an_open_size_as_not_given(value):
  plan = given_sizes(config_of(micro_batch_size=value, batch_size=96).batch)
  assert plan == given_sizes(config_of(micro_batch_size=-1, batch_size=96).batch)


@settings(max_examples=examples(60))
@given(
  batch=st.integers(1, 120),
  data=st.sampled_from([1, 2, 3, 4]),
  tensor=st.sampled_from([1, 2, 3]),
  budget=st.integers(1, 300),
)
def test_exactly_the_sizes_with_a_plan(batch, data, tensor, budget):
  layout = devices(data, tensor=tensor)
  config = config_of(batch_size=batch, steps=-1, total_samples=budget)
  expected = []
  for rows in range(1, batch + 1):
    size = Fraction(rows, tensor)
    try:
      plan_batches(with_size(config.batch, size), config.run, layout)
    except UserError:
      continue
    expected.append(size)
  try:
    assert [one.per_device for one in candidates(config.batch, config.run, layout)] == expected
  except UserError:
    assert expected == []


MESSAGES = {
  ("batch_size=96", "gradient_accumulation_steps=4"): (
    "batch_size=96 with gradient_accumulation_steps=4 already gives the size that "
    "micro_batch_size=auto is to choose; keep two of the three, for example with "
    "gradient_accumulation_steps=-1"
  ),
  ("per_device_batch_size=4",): (
    "per_device_batch_size=4 already gives the size that micro_batch_size=auto is to choose; keep "
    "one of them, for example with per_device_batch_size=-1"
  ),
  ("batch_size=100",): (
    "batch_size=100 in 1 microbatch (one unless given) is 100 samples per microbatch, which must "
    "be a multiple of the 8 data-parallel groups (data 8 × fsdp 1); nearest: batch_size=96 (also: "
    "batch_size=104)"
  ),
  ("batch_size=96", "micro_batch_size={explore: {min: 17, max: 20}}"): (
    "micro_batch_size={explore: {min: 17, max: 20}}: none of the 8 sizes that the plan allows lies "
    "in this range; allowed: 1, 2, 3, 4, 6, 8, 12, 16 samples per device; for example "
    "micro_batch_size={explore: {min: 1, max: 16}}"
  ),
  ("batch_size=96", "steps=-1", "total_samples=961"): (
    "micro_batch_size=auto: no size gives a valid plan; the smallest, micro_batch_size=1: "
    "total_samples=961 is 10 steps of 96 samples and a rest of 1 samples, which must be a "
    "multiple of the microbatch (8 samples); nearest: total_samples=960 or total_samples=968"
  ),
}


@pytest.mark.parametrize("arguments", MESSAGES)
def test_messages_name_keys_values_rule_and_what_works(arguments):
  keys = dict(argument.split("=", 1) for argument in arguments)
  assert message(devices(8), **keys) == MESSAGES[arguments]
  # The last value offered works.
  key, value = re.findall(r"(\w+)=(-?\d+|\{[^}]*\}\})", MESSAGES[arguments])[-1]
  assert sizes(devices(8), **keys | {key: value})


def test_what_is_chosen_from_in_a_sentence():
  batch = config_of(batch_size=96).batch
  assert offered(batch, found(devices(8), batch_size=96)) == (
    "micro_batch_size=auto chooses from 1, 2, 3, 4, 6, 12 samples per device and microbatch"
  )
  assert offered(config_of().batch, found(devices(8))[:2]) == (
    "micro_batch_size=auto chooses from 1, 2 samples per device and microbatch, and batch_size follows"
  )
  many = found(devices(1), batch_size=5040)
  assert "1, 2, 3, 4, 5, …, 1008, 1260, 1680, 2520, 5040 samples" in offered(batch, many)


def test_a_choice_made_is_a_plan_as_by_hand():
  config = config_of(batch_size=96)
  by_hand = config_of(batch_size=96, micro_batch_size=6)
  assert with_size(config.batch, Fraction(6)) == by_hand.batch
  assert dataclasses.replace(config, batch=with_size(config.batch, Fraction(6))) == by_hand
