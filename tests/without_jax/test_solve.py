"""Sizes from any side, against trying every combination, and every offer tried."""

import dataclasses
import itertools
import re
from fractions import Fraction
from typing import Any

import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maxbatch.batch.from_config import given_sizes, plan_batches
from maxbatch.config.load import load_config
from maxbatch.config.schema import BatchConfig
from maxbatch.core.plan import BatchPlan
from maxbatch.core.solve import solve_num_devices
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

_DEFAULT = load_config(["config=base"])
_EXACT = {"per_device_batch_size", "micro_batch_size", "eval_per_device_batch_size"}
LENGTH = 4


def config_of(**keys: Any) -> BatchConfig:
  exact = {k: Fraction(v) if k in _EXACT and v != "none" else v for k, v in keys.items()}
  return dataclasses.replace(_DEFAULT.batch, max_target_length=LENGTH, **exact)


def devices(data: int = 1, tensor: int = 1) -> Topology:
  return Topology.of(data=data, tensor=tensor)


def plan_of(topology: Topology, **keys: Any) -> BatchPlan:
  return plan_batches(config_of(**keys), _DEFAULT.run, topology)


def message(topology: Topology, **keys: Any) -> str:
  with pytest.raises(UserError) as caught:
    plan_of(topology, **keys)
  return str(caught.value)


def sizes(plan: BatchPlan) -> tuple[int, Fraction, int]:
  return (
    plan.global_batch_to_train,
    plan.per_device_batch_size,
    plan.gradient_accumulation_steps,
  )


def test_both_vocabularies_are_one_plan():
  cerebras = plan_of(devices(2), batch_size=512, micro_batch_size=64)
  maxtext = plan_of(devices(2), per_device_batch_size=64, gradient_accumulation_steps=4)
  assert cerebras == maxtext
  assert sizes(cerebras) == (512, 64, 4)
  assert plan_of(devices(2), global_batch_to_train=512, micro_batch_size=64) == cerebras
  assert plan_of(devices(2), tokens_per_step=512 * LENGTH, micro_batch_size=64) == cerebras


def test_any_two_of_three_give_the_third():
  wanted = (512, Fraction(64), 4)
  keys = {"batch_size": 512, "micro_batch_size": 64, "gradient_accumulation_steps": 4}
  for count in (2, 3):
    for chosen in itertools.combinations(keys, count):
      assert sizes(plan_of(devices(2), **{key: keys[key] for key in chosen})) == wanted


def test_the_number_of_devices_follows_from_the_others():
  def solved(**keys: Any) -> int:
    return solve_num_devices(given_sizes(config_of(**keys)))

  assert solved(batch_size=512, micro_batch_size=64, gradient_accumulation_steps=4) == 2
  assert solved(batch_size=512, micro_batch_size=64) == 8
  assert solved(batch_size=512, micro_batch_size="1/2") == 1024
  with pytest.raises(UserError) as caught:
    solved(batch_size=500, micro_batch_size=64)
  assert str(caught.value) == (
    "batch_size=500 / micro_batch_size=64 is 7.8125 devices, which must be whole; "
    "nearest: batch_size=448 or batch_size=512"
  )
  with pytest.raises(UserError, match="must both be given; for example batch_size=512"):
    solved(batch_size=512)


def test_what_nobody_says_is_one_pass_of_four_samples_per_device():
  assert sizes(plan_of(devices(8))) == (32, 4, 1)
  assert sizes(plan_of(devices(2, tensor=4))) == (32, 4, 1)
  assert sizes(plan_of(devices(8), gradient_accumulation_steps=3)) == (96, 4, 3)
  assert sizes(plan_of(devices(8), batch_size=512)) == (512, 64, 1)


def test_none_is_one_pass_with_the_whole_batch():
  assert sizes(plan_of(devices(2), batch_size=512, micro_batch_size="none")) == (512, 256, 1)
  assert sizes(plan_of(devices(2), per_device_batch_size=3, micro_batch_size="none")) == (6, 3, 1)
  text = message(devices(2), micro_batch_size="none", gradient_accumulation_steps=4)
  assert text == (
    "gradient_accumulation_steps=4 and micro_batch_size=none give the same size two values; "
    "keep one of them, for example with micro_batch_size=-1"
  )


def test_devices_that_share_a_sample_take_a_fraction_of_it():
  assert sizes(plan_of(devices(2, tensor=4), batch_size=6)) == (6, Fraction(3, 4), 1)
  assert sizes(plan_of(devices(2, tensor=4), batch_size=6, micro_batch_size="1/4")) == (
    6,
    Fraction(1, 4),
    3,
  )


_GROUPS = "which must be a positive multiple of the 2 data-parallel groups (data 2 × fsdp 1)"
MESSAGES = {
  (2, ("batch_size", 500), ("micro_batch_size", 64)): (
    "batch_size=500 over 2 devices is 250 per device, not a multiple of micro_batch_size=64; "
    "nearest: batch_size=512, or micro_batch_size=50 "
    "(also: batch_size=384, or micro_batch_size=125)"
  ),
  (2, ("tokens_per_step", 2001), ("micro_batch_size", 64)): (
    "tokens_per_step=2001 (500.25 samples) over 2 devices is 250.125 per device, not a multiple "
    "of micro_batch_size=64; nearest: tokens_per_step=2048 "
    "(also: tokens_per_step=1536)"
  ),
  (8, ("batch_size", 500)): (
    "batch_size=500 in 1 microbatch (one unless given) is 500 samples per microbatch, which must "
    "be a multiple of the 8 data-parallel groups (data 8 × fsdp 1); nearest: batch_size=496 (also: "
    "batch_size=504)"
  ),
  (8, ("batch_size", 512), ("gradient_accumulation_steps", 3)): (
    "batch_size=512 in 3 microbatches (gradient_accumulation_steps=3) is 512/3 samples per "
    "microbatch, which must be a multiple of the 8 data-parallel groups (data 8 × fsdp 1); "
    "nearest: batch_size=504, or gradient_accumulation_steps=2 (also: "
    "batch_size=528, or gradient_accumulation_steps=4)"
  ),
  (2, ("batch_size", 512), ("micro_batch_size", 64), ("gradient_accumulation_steps", 2)): (
    "batch_size=512, but micro_batch_size=64 on 2 devices with gradient_accumulation_steps=2 is "
    "256 samples per step; change one of them: batch_size=256, or gradient_accumulation_steps=4, "
    "or micro_batch_size=128"
  ),
  (2, ("batch_size", 64), ("micro_batch_size", "2.5")): (
    f"micro_batch_size=2.5 on 2 devices is 5 samples, {_GROUPS}; "
    "nearest: micro_batch_size=2 or micro_batch_size=4"
  ),
  (2, ("batch_size", 64), ("micro_batch_size", "2.5"), ("gradient_accumulation_steps", 4)): (
    f"micro_batch_size=2.5 on 2 devices is 5 samples, {_GROUPS}; nearest: micro_batch_size=8"
  ),
  (2, ("batch_size", 63), ("micro_batch_size", "2.5")): (
    f"micro_batch_size=2.5 on 2 devices is 5 samples, {_GROUPS}; "
    "nearest: micro_batch_size=2 with batch_size=64 or micro_batch_size=3 with batch_size=66"
  ),
  (2, ("batch_size", 512), ("tokens_per_step", 4)): (
    "batch_size=512 and tokens_per_step=4 (1 sample) give the same size two values; "
    "keep one of them, for example with tokens_per_step=-1"
  ),
  (2, ("per_device_batch_size", 8), ("micro_batch_size", 4)): (
    "per_device_batch_size=8 and micro_batch_size=4 give the same size two values; "
    "keep one of them, for example with micro_batch_size=-1"
  ),
}


@pytest.mark.parametrize("case", MESSAGES, ids=range(len(MESSAGES)))
def test_messages(case: tuple[Any, ...]):
  assert message(devices(case[0]), **dict(case[1:])) == MESSAGES[case]


KEYS = {
  "batch_size": st.integers(1, 80),
  "tokens_per_step": st.integers(1, 40).map(lambda n: n * LENGTH) | st.integers(1, 160),
  "per_device_batch_size": st.fractions(Fraction(1, 6), 12, max_denominator=6),
  "gradient_accumulation_steps": st.integers(1, 8),
}
some_keys = st.fixed_dictionaries({}, optional=KEYS)
keys_once = some_keys.map(lambda keys: without_second(keys, "batch_size", "tokens_per_step"))


def without_second(keys: dict[str, Any], first: str, second: str) -> dict[str, Any]:
  """The keys, of two that mean one size only the first."""
  return {key: value for key, value in keys.items() if key != second or first not in keys}


PAIRS = [(rows, k) for rows in range(1, 81) for k in range(1, 81) if rows * k <= 288]


def brute_force(topology: Topology, keys: dict[str, Any]) -> set[tuple[int, Fraction, int]]:
  """Every (batch, per device, passes) that agrees with all the keys, by trying them all."""
  groups = topology.num_batch_groups
  share = Fraction(groups, topology.num_devices)
  batch, tokens = keys.get("batch_size"), keys.get("tokens_per_step")
  per_device, steps = keys.get("per_device_batch_size"), keys.get("gradient_accumulation_steps")
  return {
    (groups * rows * passes, rows * share, passes)
    for rows, passes in PAIRS
    if steps in (None, passes)
    and batch in (None, groups * rows * passes)
    and tokens in (None, groups * rows * passes * LENGTH)
    and per_device in (None, rows * share)
  }


@settings(max_examples=examples(1500))
@given(st.integers(1, 4), st.integers(1, 3), some_keys)
def test_the_solution_is_the_one_that_agrees_with_every_key(data, tensor, keys):
  topology = devices(data, tensor)
  has_batch = bool({"batch_size", "tokens_per_step"} & keys.keys())
  known = dict(keys)
  # The documented rule for what is left open.
  if "gradient_accumulation_steps" not in keys and not (
    has_batch and "per_device_batch_size" in keys
  ):
    known["gradient_accumulation_steps"] = 1
  if "per_device_batch_size" not in keys and not has_batch:
    known["per_device_batch_size"] = Fraction(4)
  result = brute_force(topology, known)
  assert len(result) <= 1
  try:
    plan = plan_of(topology, **keys)
  except UserError:
    assert not result
  else:
    assert result == {sizes(plan)}


@settings(max_examples=examples(1000))
@given(st.integers(1, 6), st.integers(1, 3), keys_once)
def test_every_value_that_a_message_offers_works(data, tensor, keys):
  topology = devices(data, tensor)
  refusal = refused(topology, keys)
  if not refusal:
    return
  offers = re.split(r"nearest: |change one of them: ", refusal)[-1]
  assert offers != refusal
  for offer in re.split(r", or | or | \(also: ", offers.rstrip(")")):
    changed = dict(keys)
    for key, value in re.findall(r"(\w+)=(\S+)", offer):
      changed[key] = Fraction(value) if key in _EXACT else int(value)
    assert changed != keys
    assert refused(topology, changed) == "", refusal


def refused(topology: Topology, keys: dict[str, Any]) -> str:
  """What the plan says against the keys; nothing if they work."""
  try:
    plan_of(topology, **keys)
  except UserError as error:
    return str(error)
  return ""


@settings(max_examples=examples(300))
@given(st.integers(1, 4), st.integers(1, 80), st.integers(1, 12))
def test_the_offers_are_the_nearest_there_are(data, batch, per_device):
  topology, micro = devices(data), data * per_device
  assume(batch % micro)
  text = message(topology, batch_size=batch, micro_batch_size=per_device)
  offered = {
    key: sorted(int(value) for name, value in re.findall(r"(\w+)=(\d+)", text.split("nearest")[1])
                if name == key)
    for key in ("batch_size", "micro_batch_size")
  }  # fmt: skip
  working = list(range(micro, 2 * batch + 2 * micro, micro))
  assert offered["batch_size"] == around(batch, working)
  splits = [size for size in range(1, batch + 1) if batch % (data * size) == 0]
  assert offered["micro_batch_size"] == around(per_device, splits)


def around(value: int, working: list[int]) -> list[int]:
  below = [size for size in working if size < value]
  return below[-1:] + [size for size in working if size > value][:1]


@given(
  st.integers(1, 8),
  st.integers(1, 2),
  st.integers(1, 40),
  st.sampled_from([{}, {"gradient_accumulation_steps": 2}, {"per_device_batch_size": "2"}]),
)
def test_a_padded_batch_has_the_fewest_rows_that_hold_it(data, tensor, batch, division):
  topology, keys = devices(data, tensor), division | {"batch_size": batch}
  try:
    plan = plan_of(topology, pad_batch=True, **keys)
  except UserError:
    assume(batch % data == 0 or division)
    with pytest.raises(UserError):
      plan_of(topology, **keys)
    return
  rows = plan.micro_batch_to_train * plan.num_microbatches
  assert plan.global_batch_to_train == plan.batch_at(0) == batch
  assert rows - plan.padding_rows == batch
  # No microbatch is all padding, and every group has as many rows of it.
  assert plan.padding_rows < plan.micro_batch_to_train
  assert plan.micro_batch_to_train % data == 0
  assert plan.phases[0].num_microbatches == plan.num_microbatches
  if batch % data == 0:
    assert plan.phases == plan_of(topology, **keys).phases
  elif not division:
    assert rows - batch < data


def test_the_derivation_says_what_is_padding():
  plan = plan_of(devices(61), batch_size=1024, pad_batch=True)
  assert sizes(plan) == (1024, 17, 1)
  assert plan.as_dict()["padding_rows"] == plan.padding_rows == 13
  how = "1,037 × gradient_accumulation_steps 1 − 13 rows of padding without weight"
  assert f"1,024 samples = {how}\n" in str(plan)
  assert "padding" not in str(plan_of(devices(64), batch_size=1024, pad_batch=True))


def test_a_padded_ramp_and_a_padded_last_step():
  keys = {"batch_schedule": ((0, 6), (12, 10), (22, 8)), "pad_batch": True}
  run = dataclasses.replace(_DEFAULT.run, steps=-1, total_samples=43)
  plan = plan_batches(config_of(**keys), run, devices(4))
  assert [(one.batch, one.num_microbatches, one.micro_batch) for one in plan] == [
    *[(6, 1, 8)] * 2,
    *[(10, 2, 8)] * 1,
    *[(8, 1, 8)] * 2,
    (5, 1, 8),
  ]
  keys = {"batch_size": 9, "batch_size_start": 3, "pad_batch": True, "batch_schedule_length": 6}
  plan = plan_batches(config_of(batch_schedule_type="linear", **keys), run, devices(4))
  assert [(one.batch, one.num_microbatches, one.micro_batch) for one in plan][:3] == [
    (3, 1, 4),
    (6, 1, 8),
    (9, 1, 12),
  ]


def test_evaluation_is_planned_by_the_same_code():
  plan = plan_of(devices(2), batch_size=512, micro_batch_size=64)
  assert plan.eval_batch == plan.micro_batch_to_train == 128
  assert plan_of(devices(2), batch_size=512, eval_per_device_batch_size="3").eval_batch == 6
  text = message(devices(2), batch_size=512, eval_per_device_batch_size="0.3")
  assert text.startswith("eval_per_device_batch_size=0.3 on 2 devices is 0.6 samples")


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_fixed_batch_is_kept_when_devices_change(count):
  plan = plan_of(devices(count), batch_size=64, micro_batch_size=4)
  assert sizes(plan) == (64, 4, 16 // count)


def test_a_batch_that_cannot_be_kept_says_what_can():
  assert message(devices(5), batch_size=64, micro_batch_size=4) == (
    "batch_size=64 over 5 devices is 12.8 per device, not a multiple of micro_batch_size=4; "
    "nearest: batch_size=60 (also: batch_size=80)"
  )
