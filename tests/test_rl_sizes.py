"""Prompts, generations, completions and microbatches, against trying every size, and every offer tried."""

import dataclasses
import itertools
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch import input_analyzer, pipeline, train
from maxbatch.batch.from_config import training_devices
from maxbatch.batch.prompt_epochs import PromptEpochs, prompt_epochs
from maxbatch.batch.rl_plan import RLPlan, plan_rl
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config, fields
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.plan import main as plan_command

RL = f"config={Path(__file__).resolve().parent.parent}/configs/post_train/rl.yml"
BASE = load_config(["config=base"])
EXACT = {"per_device_batch_size", "micro_batch_size"}


def config_of(**keys: Any) -> Config:
  sections = vars(BASE).copy()
  for key, value in ({"num_generations": 4, "max_prefill_predict_length": 64} | keys).items():
    name = fields()[key][0]
    exact = Fraction(value) if key in EXACT and value not in ("none", "auto") else value
    sections[name] = dataclasses.replace(sections[name], **{key: exact})
  return Config(**sections)


def devices(data: int = 1, tensor: int = 1) -> Topology:
  return Topology.of(data=data, tensor=tensor)


def plan_of(topology: Topology = devices(), **keys: Any) -> RLPlan:  # noqa: B008
  return plan_rl(config_of(**keys), topology)


def message(topology: Topology = devices(), **keys: Any) -> str:  # noqa: B008
  with pytest.raises(UserError) as caught:
    plan_of(topology, **keys)
  return str(caught.value)


OFFER = re.compile(r"([a-z_]+)=(-?[\w/]+)")


def apply_offers(text: str, topology: Topology, keys: dict[str, Any]) -> int:
  """Plans with each suggestion of a message; how many there were."""
  _, _, offers = text.rpartition("; ")
  single = re.split(r",? or |: ", offers.replace("for example ", "").replace("nearest: ", ""))
  tried = 0
  for offer in single:
    changes = {key: value for key, value in OFFER.findall(offer) if key in fields()}
    if changes:
      typed = {
        k: v if k in EXACT or not v.lstrip("-").isdigit() else int(v) for k, v in changes.items()
      }
      plan_of(topology, **(keys | typed))
      tried += 1
  return tried


def test_a_step_in_maxtexts_words():
  plan = plan_of(devices(2), batch_size=16, num_generations=8, micro_batch_size=32)
  assert (plan.batch_size, plan.completions_per_step, plan.micro_batch) == (16, 128, 32)
  assert (plan.num_microbatches, plan.prompts_per_microbatch) == (4, 4)
  assert plan.batch_plan.per_device_batch_size == 16
  assert plan.batch_plan.gradient_accumulation_steps == 4


def test_without_micro_batch_size_all_completions_are_one_microbatch():
  plan = plan_of(batch_size=6)
  assert (plan.micro_batch, plan.num_microbatches) == (24, 1)
  assert plan_of(batch_size=6, micro_batch_size="none") == plan


def test_any_sufficient_sizes_are_one_plan():
  wanted = plan_of(devices(2), batch_size=16, micro_batch_size=16)
  batch = ({"batch_size": 16}, {"global_batch_to_train": 64}, {"tokens_per_step": 64 * 128})
  micro = (
    {"micro_batch_size": 16},
    {"per_device_batch_size": 8},
    {"gradient_accumulation_steps": 4},
    {"micro_batch_size": 16, "gradient_accumulation_steps": 4},
  )
  for one, other in itertools.product(batch, micro):
    assert plan_of(devices(2), **one, **other) == wanted


MESSAGES = {
  (): (
    "batch_size=-1 with num_generations=4: a step needs its number of prompts; for example "
    "batch_size=1"
  ),
  (("batch_size", 16), ("micro_batch_size", 24)): (
    "micro_batch_size=24 must divide the 64 completions of batch_size=16, and be a multiple of 4 completions "
    "(whole groups of num_generations=4, and as many for each of the 1 data-parallel group (data 1 × "
    "fsdp 1)); nearest: micro_batch_size=16 or micro_batch_size=32, or batch_size=12, or batch_size=18"
  ),
  (("batch_size", 16), ("micro_batch_size", 6)): (
    "micro_batch_size=6 must divide the 64 completions of batch_size=16, and be a multiple of 4 completions (whole "
    "groups of num_generations=4, and as many for each of the 1 data-parallel group (data 1 × fsdp "
    "1)); nearest: micro_batch_size=4 or micro_batch_size=8"
  ),
  (("batch_size", 16), ("micro_batch_size", 8), ("gradient_accumulation_steps", 2)): (
    "micro_batch_size=8 × gradient_accumulation_steps=2 must be the 64 completions of batch_size=16 with "
    "num_generations=4, and is 16 completions; for example batch_size=4, or micro_batch_size=32, or "
    "gradient_accumulation_steps=8"
  ),
  (("batch_size", 16), ("micro_batch_size", "auto"), ("gradient_accumulation_steps", 2)): (
    "gradient_accumulation_steps=2 already gives the size that micro_batch_size=auto is to choose; keep "
    "one of them, for example with gradient_accumulation_steps=-1"
  ),
  (("batch_size", 16), ("num_prompts", 100), ("leftover_prompts", "error")): (
    "leftover_prompts=error: an epoch of 100 prompts leaves 4 prompts after its last batch of 16; for "
    "example batch_size=10, or batch_size=20, or num_prompts=96, or leftover_prompts=carry, which lets "
    "the next epoch fill up the batch"
  ),
  (("batch_size", 16), ("num_prompts", 10)): (
    "batch_size=16 takes 16 different prompts in a step, and an epoch has 10; for example "
    "batch_size=10 or num_prompts=16, where there are more"
  ),
  (("batch_size", 16), ("num_iterations", 3)): (
    "steps=400 ends inside a batch of 64 completions, each of which is trained on in num_iterations=3 steps; "
    "nearest: steps=399 or steps=402"
  ),
  (("batch_size", 2), ("max_prefill_predict_length", 128)): (
    "max_prefill_predict_length=128 leaves no token of max_target_length=128 to a completion; for "
    "example max_target_length=256"
  ),
  (("batch_size", 2), ("batch_schedule_type", "linear")): (
    "batch_schedule_type=linear: the batch of reinforcement learning is the same in every step; for "
    "example enable_rampup_batch_size=false batch_schedule=[] batch_schedule_type=constant"
  ),
}


@pytest.mark.parametrize("keys", MESSAGES)
def test_errors_name_keys_values_rule_and_what_works(keys: tuple[tuple[str, Any], ...]):
  text = message(**dict(keys))
  assert text == MESSAGES[keys]
  if "batch_schedule" not in text and "-1: all" not in text:
    assert apply_offers(text, devices(), dict(keys))


def works(data: int, completions: int, micro: int, generations: int, rollout: int) -> bool:
  """By brute force: every microbatch has whole groups, and every device equally many completions."""
  if micro <= 0 or completions % micro:
    return False
  for first in range(0, completions, micro):
    rows = range(first, first + micro)
    if first % generations or rows[-1] % generations != generations - 1:
      return False
    for count in (data, rollout or data):
      if len({len(rows[part::count]) for part in range(count)}) > 1:
        return False
  return True


@settings(max_examples=examples(150), deadline=None)
@given(
  data=st.integers(1, 6),
  rollout=st.integers(0, 4),
  generations=st.integers(2, 6),
  batch=st.integers(1, 24),
  micro=st.none() | st.integers(1, 60),
  count=st.none() | st.integers(1, 6),
)
def test_a_plan_is_what_trying_finds_and_every_offer_works(
  data: int, rollout: int, generations: int, batch: int, micro: int | None, count: int | None
):
  completions = batch * generations
  keys: dict[str, Any] = {"batch_size": batch, "num_generations": generations}
  keys |= {"rollout_devices": rollout}
  if micro is not None:
    keys["micro_batch_size"] = micro
  if count is not None:
    keys["gradient_accumulation_steps"] = count
  number = count if count is not None else 1 if micro is None else None
  wanted = [
    size
    for size in range(1, completions + 1)
    if works(data, completions, size, generations, rollout)
    if micro in (None, size) and number in (None, completions // size)
  ]
  if not wanted:
    assert apply_offers(message(devices(data), **keys), devices(data), keys)
    return
  plan = plan_of(devices(data), **keys)
  assert wanted == [plan.micro_batch]
  assert plan.micro_batch * plan.num_microbatches == completions == plan.completions_per_step
  assert plan.prompts_per_microbatch * generations == plan.micro_batch


@settings(max_examples=examples(150), deadline=None)
@given(
  num_prompts=st.integers(1, 40),
  batch=st.integers(1, 40),
  leftovers=st.sampled_from(["carry", "drop", "error"]),
  steps=st.integers(0, 30),
)
def test_no_prompt_is_lost_or_counted_twice(num_prompts, batch, leftovers, steps):
  try:
    epochs = prompt_epochs(num_prompts, batch, leftovers)
  except UserError:
    assert batch > num_prompts or (leftovers == "error" and num_prompts % batch)
    return
  places = [epochs.place(index) for index in range(steps * batch)]
  # By going through the epochs one prompt at a time.
  expected: list[tuple[int, int]] = []
  pending: list[tuple[int, int]] = []
  dropped = mixed = epoch = 0
  while len(expected) < steps * batch:
    for prompt in range(num_prompts):
      pending.append((epoch, prompt))
      if len(pending) == batch:
        mixed += pending[0][0] != pending[-1][0]
        expected += pending
        pending = []
        if len(expected) == steps * batch:
          break
    if leftovers == "drop" and (
      pending or expected[-1][1] + num_prompts % batch + 1 == num_prompts
    ):
      dropped += num_prompts % batch
      pending = []
    epoch += 1
  assert places == expected
  assert epochs.batches_of_two_epochs(steps * batch) == mixed
  assert epochs.dropped(steps * batch) == dropped


def test_trailing_prompts_are_never_dropped_silently():
  """Hazard: MaxText, Tunix, TRL and others end an epoch with its last whole batch, and say nothing."""
  plan = plan_of(batch_size=16, num_prompts=100, leftover_prompts="drop", steps=13)
  assert "4 prompts dropped at the end of each, 8 in all" in str(plan)
  assert plan.as_dict()["dropped_prompts"] == 8 == plan.dropped_prompts(13)
  carried = plan_of(batch_size=16, num_prompts=100, steps=13)
  assert "none dropped, 2 batches with prompts of two epochs" in str(carried)
  assert carried.epochs.place(100) == (1, 0)


def test_a_prompt_has_no_epoch_where_there_is_no_end():
  epochs = PromptEpochs(-1, 16, "carry")
  assert epochs.place(10**9) == (0, 10**9)
  assert (epochs.dropped(10**9), epochs.batches_of_two_epochs(10**9)) == (0, 0)


def test_iterations_use_a_batch_several_times_and_no_prompt_is_skipped():
  plan = plan_of(batch_size=4, num_iterations=3, steps=12, rollout_staleness=1)
  assert (plan.num_batches, plan.total_prompts, plan.total_completions) == (4, 16, 64)
  taken = [plan.first_prompt(plan.batch_of_step(step)) for step in range(12)]
  assert taken == [0, 0, 0, 4, 4, 4, 8, 8, 8, 12, 12, 12]
  assert [plan.policy_of_batch(batch) for batch in range(4)] == [0, 0, 3, 6]
  assert plan.waiting_microbatches == 2


@pytest.mark.parametrize("key", ["total_samples", "total_tokens"])
def test_a_budget_ends_with_a_batch(key: str):
  scale = 128 if key == "total_tokens" else 1
  whole: dict[str, Any] = {"steps": -1, "batch_size": 4, "num_iterations": 2, key: 320 * scale}
  assert plan_of(**whole).batch_plan.steps == 20
  keys = whole | {key: 328 * scale}
  text = message(devices(), **keys)
  assert f"nearest: {key}={320 * scale} or {key}={352 * scale}" in text
  assert apply_offers(text, devices(), keys)


def test_devices_that_only_sample_leave_the_others_to_train():
  rl = config_of(rollout_devices=2).rl
  assert training_devices(rl, 8) == 6
  assert training_devices(rl, 8, num_parts=2) == 6
  with pytest.raises(UserError, match=r"rollout_devices=2 must leave .* rollout_devices=1, or"):
    training_devices(rl, 2)
  with pytest.raises(UserError, match=r"equally many from each of the 4 slices; .*=4, or"):
    training_devices(rl, 8, num_parts=4)
  with pytest.raises(UserError, match="equally many from each of the 4 processes; for example"):
    training_devices(rl, 8, num_parts=4, part="processes")
  with pytest.raises(UserError, match=r"of the 1 devices to train; for example rollout_devices=0:"):
    training_devices(rl, 1)


@pytest.mark.parametrize(
  ("given", "said"),
  [
    (
      {"rollout_tensor_parallelism": 3},
      "the product of the axes, 3, must divide the 4 rollout devices",
    ),
    (
      {"rollout_data_parallelism": 4, "rollout_fsdp_parallelism": 2},
      "the product of the axes, 8, must equal the 4 rollout devices",
    ),
    (
      {"rollout_expert_parallelism": 4, "num_experts": 6},
      "num_experts=6 must be a multiple of rollout_expert_parallelism=4; for example",
    ),
    (
      {"rollout_fsdp_parallelism": -1},
      "rollout_data_parallelism=-1, rollout_fsdp_parallelism=-1, rollout_tensor_parallelism=1: only one",
    ),
  ],
)
def test_the_axes_of_rollout_devices_multiply_to_them(given, said):
  keys = {"batch_size": 8, "num_generations": 4, "rollout_devices": 4, **given}
  text = message(devices(), **keys)
  assert said in text
  assert apply_offers(text, devices(), keys)


def test_devices_that_share_a_policy_share_its_completions():
  """Along tensor; along fsdp each has its own, and data copies the policy."""
  keys: dict[str, Any] = {"batch_size": 6, "num_generations": 4, "micro_batch_size": 24}
  keys |= {"rollout_devices": 8}
  plan = plan_of(devices(2), rollout_tensor_parallelism=4, **keys)
  assert plan.topology.rollout_groups == 2
  assert "= 24 / 2 groups of rollout devices (data 2 × tensor 4)" in str(plan)
  assert plan_of(devices(2), rollout_tensor_parallelism=8, **keys).topology.rollout_groups == 1
  keys["rollout_fsdp_parallelism"] = 8
  assert plan_of(devices(2), **keys).topology.rollout_groups == 8


PRINTED = """\
Reinforcement learning
  num_devices           8 devices     = training 6 + rollout 2
  batch_size           18 prompts     = unique prompts of a step
  completions         144 completions = 18 × num_generations 8, of a step
  micro_batch_size     48 completions = 144 / 3 microbatches
  groups                6 prompts     = 48 / num_generations 8
  sampled at once      24 completions = 48 / 2 rollout devices
  completion           12 tokens      = max_target_length 24 − prompt 12, at most
  batches              60 batches     = steps 120 / num_iterations 2
  total prompts     1,080 prompts     = 60 × 18
  total completions 8,640 completions = 60 × 144
  epochs of 500 prompts: 2.16; none dropped, 2 batches with prompts of two epochs
  rollout_staleness=1: at most 6 microbatches sampled ahead, 2 snapshots of the parameters
  micro_batch_size can be 24, 48, 72 or 144

Training on the completions, each a sample

Batch plan
"""


def test_the_plan_command_answers_for_reinforcement_learning(capsys):
  keys = [RL, "num_devices=8", "rollout_devices=2", "batch_size=18"]
  keys += ["micro_batch_size=48", "num_iterations=2", "num_prompts=500", "rollout_staleness=1"]
  assert plan_command(keys) == 0
  printed = capsys.readouterr().out
  assert PRINTED in printed
  assert "Loading" not in printed
  assert plan_command([*keys, "--json"]) == 0
  facts = json.loads(capsys.readouterr().out)
  assert facts["rl"]["completions_per_step"] == facts["sizes"]["global_batch_to_train"] == 144
  assert facts["rl"]["rollout_devices"] == 2


def test_the_plan_command_derives_no_devices_from_completions(capsys):
  assert plan_command([RL, "num_devices=-1"]) == 2
  assert "for example num_devices=8" in capsys.readouterr().err


@pytest.mark.parametrize("command", [train, pipeline, input_analyzer])
def test_commands_that_train_on_text_refuse_a_batch_of_prompts(command, capsys):
  assert command.main([RL]) == 2
  assert "whose batch_size counts prompts" in capsys.readouterr().err
  assert command.main([RL, "num_generations=-1", "rollout_devices=2"]) == 2
  assert "rollout_devices=2 has no effect with num_generations=-1" in capsys.readouterr().err
