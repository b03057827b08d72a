"""validate_only, compile_only, plan and micro_batch_size=auto for reinforcement learning."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from support import counted_plans
from test_train_rl import KEYS, run, same

from maxbatch import train_rl
from maxbatch.batch.from_config import topology
from maxbatch.batch.rl_plan import in_samples, plan_rl
from maxbatch.compile import measured_time
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.compile.measured_time import synthetic
from maxbatch.compile.program import ProgramMemory
from maxbatch.compile.report import CompileReport
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.modes.compile_only import validate
from maxbatch.modes.method import Purpose
from maxbatch.plan import main as plan_command
from maxbatch.rl import rollout_program as rollout_reports
from maxbatch.rl import tuning
from maxbatch.rl.candidates import rl_sizes_of
from maxbatch.rl.method import GRPO
from maxbatch.rl.prompts import Prompt
from maxbatch.rl.rollout_program import (
  RolloutPlace,
  RolloutProgram,
  compile_rollout,
  rollout_report,
)
from maxbatch.rl.rollout_report import PolicyBytes, RolloutTime
from maxbatch.rl.sampled import completion_sampler
from maxbatch.rl.trainer import build_policy_trainer
from maxbatch.rl.tuning import rl_report_or_refusal
from maxbatch.training.build import step_rows
from maxbatch.training.step import Trainer
from maxbatch.tuning.exploration import Exploration
from maxbatch.tuning.search import ProbeResult, Tried

CHECKS = ["configuration", "rollout plan", "batch plan", "mesh", "model", "memory", "learning rate"]
CHECKS += ["prompts", "rewards", "sampler", "step", "folder", "checkpoints", "resume"]


def of(*keys: str) -> Config:
  return load_config([*KEYS, *keys])


def checked(*keys: str) -> list[str]:
  lines: list[str] = []
  validate(of(*keys), lines.append, method=GRPO)
  return lines


def test_everything_is_checked_and_nothing_compiled(tmp_path):
  compiled: list[object] = []

  def listen(event: str, duration_secs: float, **more: object) -> None:
    if "backend_compile" in event:
      compiled.append((more.get("fun_name"), duration_secs))

  keys = ["rollout_devices=4", "micro_batch_size=auto", "rollout_staleness=1", "grpo_beta=0.1"]
  jax.clear_caches()
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    lines = checked(f"base_output_directory={tmp_path}/new", "warm_start_steps=2", *keys)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert compiled == []
  assert list(tmp_path.iterdir()) == []
  names = [line[5:18].strip() for line in lines if line.startswith("ok   ")]
  assert names == [*CHECKS[:5], "initial state", *CHECKS[5:]]
  text = "\n".join(lines)
  assert (
    "micro_batch_size=auto chooses from 4, 8, 16 completions per microbatch; checked with 4 c"
    in text
  )
  assert "a warm start: 2 steps of 64 demonstrations" in text
  # Snapshots of two batches, and the reference.
  assert re.search(r"parameters ([\d,]+) bytes.*policies 132,672 bytes", text)
  assert "sampler        can be traced, for 4 completions at once on 4 × CPU, simulated" in text
  assert "vowels:count can be imported" in text


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (["max_prefill_predict_length=6"], "rl_task=format: the prompt f"),
    (["reward_functions=[vowels:none]"], "reward_functions"),
    (["device_memory_gb=0.0002"], "policies 44,224 bytes"),
    (["gns_from_microbatches=true", "micro_batch_size=16"], "gns_from_microbatches=true with"),
    (
      ["micro_batch_size={explore: {min: 2000}}"],
      "allowed: 8, 16, 32, 64, 128, 256, 512, 1024 com",
    ),
  ],
)
def test_what_would_stop_a_run_is_said_before(tmp_path, keys, said):
  with pytest.raises(UserError, match=re.escape(said)):
    checked(f"base_output_directory={tmp_path}", *keys)


def test_a_start_plans_its_batches_once(tmp_path, monkeypatch):
  plans = counted_plans(monkeypatch)
  checked(f"base_output_directory={tmp_path}", "micro_batch_size=8")
  assert len(plans) == 1
  GRPO.resolve(of("micro_batch_size=8"), find_devices(of()), Purpose.RUN)
  assert len(plans) == 2


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
  ("devices", "divided"),
  [(0, []), (4, ["rollout_fsdp_parallelism=2", "rollout_tensor_parallelism=2"])],
)
def test_step_and_sampler_are_compiled_as_a_run_has_them(
  tmp_path, monkeypatch, capsys, devices, divided
):
  monkeypatch.setattr(measured_time, "SECONDS", 0.05)
  programs: list[RolloutProgram] = []

  def kept(*arguments: Any) -> RolloutProgram:
    programs.append(compile_rollout(*arguments))
    return programs[-1]

  monkeypatch.setattr(rollout_reports, "compile_rollout", kept)
  keys = [f"rollout_devices={devices}", f"base_output_directory={tmp_path}", "micro_batch_size=8"]
  expected = sampled(of(*keys))
  assert len(np.unique(expected)) > 8
  keys += divided
  assert train_rl.main([*KEYS, *keys, "compile_only=true"]) == 0
  out = capsys.readouterr().out
  [result] = json.loads((tmp_path / "first_run" / "compile_report.json").read_text())
  assert out.count(": fits") == 2
  assert "more is needed by " in out
  rollout = result["rollout"]
  assert (rollout["completions"], rollout["rollout_devices"]) == (8, devices)
  R, T, n = rollout["time"]["seconds_per_microbatch"], result["time"]["step_seconds"], 2
  both = max(n * R, T) + min(n * R, T) / n if devices else n * R + T
  assert rollout["step_seconds"] == pytest.approx(both)
  held = rollout["memory_bytes_per_device"]
  # Keys and values of 16 places in 2 heads of 8, and texts beside them.
  shares = 4 if divided else 8
  assert held["keys_values_and_texts"] > 2 * 16 * 2 * 8 * 4 * 8 // shares
  whole = 11_056 * 4
  # All but the scales of normalization and the like is divided.
  assert held["snapshots"] == whole if not divided else 1 < held["snapshots"] / (whole / 4) < 1.1
  if divided:
    assert "goes from training's data 4 to rollout's fsdp 2 × tensor 2 in 4 parts" in out
    transfer = rollout["transfer"]
    assert transfer["parts"] == 4
    assert transfer["bytes_per_rollout_device"] == held["snapshots"]
    in_flight = transfer["bytes_in_flight_per_training_device"]
    assert held["snapshots"] <= in_flight < whole / 2
  seen: list[Any] = []
  for name, own in (("prefill", programs[0].prefill), ("write", programs[0].write)):
    # What is compiled refuses arrays of other shapes, and on other devices.
    function = functools.partial(lambda own, _, *given: (seen.append(own), own(*given))[1], own)
    monkeypatch.setattr(f"maxbatch.sampling.sampler._{name}", function)
  assert np.array_equal(sampled(of(*keys)), expected)
  assert seen == [programs[0].prefill, programs[0].write]


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("axis", ["tensor", "expert"])
def test_a_divided_policy_takes_the_same_likeliest_tokens(axis):
  mixture = ["num_experts=4", "base_moe_mlp_dim=8"] if axis == "expert" else []
  whole, divided = (
    sampled(of("rollout_devices=4", *mixture, *keys), greedy=True)
    for keys in ([], [f"rollout_{axis}_parallelism=2"])
  )
  assert np.array_equal(whole, divided)


@pytest.fixture
def begun(monkeypatch):
  """States begin without a program of their own for each way to divide them."""
  monkeypatch.setattr(
    Trainer, "init", lambda trainer, seed: initial_state(trainer, random_parameters(trainer.model))
  )


def sampled(config: Config, *, greedy: bool = False) -> np.ndarray:
  """The tokens of a microbatch, of a policy where it is in a run."""
  target = find_devices(config)
  sizes = plan_rl(config, target.layout)
  trainer = build_policy_trainer(in_samples(config, sizes), sizes, target.devices)
  place = RolloutPlace(sizes, target.rollout)
  where = jax.tree.map(lambda leaf: leaf.sharding, place.policy(trainer))
  params = jax.device_put(random_parameters(trainer.model), where)
  sampler = completion_sampler(config, trainer.model, place.mesh(trainer), greedy=greedy)
  result = sampler(params, [Prompt(f"f{number}=", {}) for number in range(2)], "rollout", 0, 0)
  return result.rollout.completions_BN


GIB = 2**30
STEP = ProgramMemory(arguments=30, outputs=20, aliased=20, temporaries=50, peak=100)
SAMPLER = ProgramMemory(arguments=40, outputs=10, aliased=10, temporaries=15, peak=60)


@pytest.mark.parametrize(
  ("keys", "training", "rollout"),
  [
    # Beside the step: two policies of 15, 5 that are frozen, and keys and values. Beside the rollout:
    # these policies, 20 of state and 10 of rows.
    (["rollout_staleness=1"], 100 + 2 * 15 + 5 + 12, 2 * 15 + 5 + (60 - 20) + 30),
    (["grpo_beta=1"], 100 + 2 * 15 + 5 + 12, 2 * 15 + 5 + (60 - 20) + 30),
    # Apart, 75 that train on their way to devices that have nothing else.
    (["rollout_devices=4"], 100 + 75, 80 + (60 - 80)),
    (["rollout_devices=4", "rollout_staleness=1"], 100 + 35 + 75, 2 * 75 + 5 + (60 - 80)),
  ],
)
def test_what_lies_beside_a_program_counts(keys, training, rollout):
  config = of(*keys)
  sizes = plan_rl(config, topology(config.mesh, 8 - config.rl.rollout_devices))
  policy = 80 if config.rl.rollout_devices else 20
  program = RolloutProgram(None, None, SAMPLER, 12, ("", ""), (None, None), 1.0)  # pyright: ignore
  held = PolicyBytes(policy - 5, 5), PolicyBytes(15, 5)
  result = rollout_report(program, sizes, *held, 75, RolloutTime(1.0, "measured"))
  assert STEP.peak + result.beside_training == training
  assert result.peak(20, 10) == rollout
  assert result.largest(STEP, 20) == max(training, rollout)


@pytest.fixture(scope="module")
def report() -> Callable[[int], CompileReport]:
  """Of a microbatch of so many completions, compiled and not timed."""

  @functools.cache
  def compiled(completions: int) -> CompileReport:
    config = of(f"micro_batch_size={completions}", "device_memory_gb=1e-9")
    target = find_devices(config)
    sizes = plan_rl(config, target.layout)
    place = RolloutPlace(sizes)
    return rl_report_or_refusal(in_samples(config, sizes), target.devices, place)

  return compiled


def resolved(config: Config, target: Target) -> int:
  """The microbatch of a run."""
  return GRPO.resolve(config, target, Purpose.RUN).plan.micro_batch_to_train


def test_auto_takes_the_largest_microbatch_with_which_both_programs_fit(
  report, tmp_path, monkeypatch, capsys, own_cache
):
  small, large = (report(completions).peak for completions in (8, 16))
  assert small < large
  asked: list[int] = []

  def known(config: Config, devices: Any, place: RolloutPlace) -> CompileReport:
    asked.append(place.plan.micro_batch)
    capacity = int(config.compile.device_memory_gb * 2**30)
    return dataclasses.replace(report(place.plan.micro_batch), capacity_bytes=capacity)

  monkeypatch.setattr(tuning, "rl_report_or_refusal", known)
  monkeypatch.setattr(tuning, "lowered_hash", lambda *_: "one program")
  chosen: list[int] = []
  for needed in (large, large - 1):
    keys = ["micro_batch_size=auto", f"device_memory_gb={(needed + 0.5) / 2**30}"]
    config = of(*keys, f"base_output_directory={tmp_path}")
    target = find_devices(config)
    chosen.append(resolved(config, target))
    before = len(asked)
    assert resolved(config, target) == chosen[-1]
    assert len(asked) == before, "a second start asks nobody"
  assert chosen == [16, 8]
  out = capsys.readouterr().out
  assert "micro_batch_size auto: 8 completions (largest that fits of 8…16: " in out
  with pytest.raises(
    UserError, match="not even micro_batch_size=8, the smallest size allowed, fits"
  ):
    resolved(of("micro_batch_size=auto", "device_memory_gb=0.0000001"), target)


@pytest.mark.parametrize(
  ("given", "smaller"),
  [
    ("micro_batch_size=16", "micro_batch_size=8"),
    ("per_device_batch_size=2", "per_device_batch_size=1"),
    ("gradient_accumulation_steps=1", "gradient_accumulation_steps=2"),
    ("micro_batch_size=none", "micro_batch_size=8"),
  ],
)
def test_a_given_microbatch_is_held_to_device_memory_gb_with_its_rollout(
  report, tmp_path, monkeypatch, capsys, given, smaller
):
  large = report(16)
  limit = large.peak - 2
  assert large.program.memory.peak < limit, "the step alone would fit"
  keys = [f"base_output_directory={tmp_path}", f"device_memory_gb={(limit + 0.5) / 2**30}"]
  size = [] if given.startswith("micro") else ["micro_batch_size=-1"]
  assert train_rl.main([*KEYS, *keys, *size, given, "warm_start_steps=2"]) == 2
  said = capsys.readouterr().err
  assert f"{given.replace('none', '16')}: with microbatches of 16 completions step and" in said
  assert f"need {large.peak:,} bytes a device, and device_memory_gb=" in said
  assert f"; the nearest that fits is {smaller}\n" in said
  assert not list(tmp_path.rglob("checkpoints")), "nothing was trained"
  with pytest.raises(UserError, match="no smaller one fits; what helps"):
    resolved(of("micro_batch_size=8", f"device_memory_gb={1 / 2**30}"), find_devices(of()))


def test_explore_tries_powers_of_two_beside_the_divisors_of_the_step():
  """Each with the prompts that it needs: which size is fast does not depend on the batch."""
  config = of("batch_size=6", "micro_batch_size={explore: {max: 64}}")
  layout = find_devices(config).layout
  sizes = rl_sizes_of(config, layout)
  # Of 24 completions; the nearest that 16 divides are 32.
  assert [(one.micro_batch, one.batch_size, one.batch_is_near) for one in sizes] == [
    *[(8, 6, False), (16, 8, True), (24, 6, False), (32, 8, True), (64, 16, True)]
  ]
  for one in sizes:
    plan = plan_rl(one.applied_to(config), layout)
    assert (plan.micro_batch, plan.batch_size) == (one.micro_batch, one.batch_size)
    assert plan.num_microbatches == one.num_microbatches
  tried = tuple(
    Tried(one, ProbeResult(1, 2, fits=True, seconds_per_microbatch=1.0)) for one in sizes
  )
  said = str(Exploration(len(tried), tried))
  assert "micro_batch_size=64 does not divide the batch that is given; the nearest" in said
  assert "does is batch_size=16. For the one given, 6, the fastest is 24." in said
  error = of("batch_size=6", "micro_batch_size=explore", "num_prompts=6", "leftover_prompts=error")
  assert [one.micro_batch for one in rl_sizes_of(error, layout)] == [8, 24]
  auto = of("batch_size=6", "micro_batch_size=auto")
  assert [one.micro_batch for one in rl_sizes_of(auto, layout)] == [8, 24]


def test_what_is_timed_is_not_skipped():
  """As completions are whose rewards are all alike."""
  config = of("steps=1")
  target = find_devices(config)
  sizes = plan_rl(config, target.layout)
  trained = in_samples(config, sizes)
  trainer = build_policy_trainer(trained, sizes, target.devices)
  shapes = step_rows(sizes.batch_plan, trainer, placeholder_rows(trained), sizes.micro_batch)
  assert (synthetic(trainer, shapes).advantages_B != 0).any(-1).all()


def planned(capsys: Any, *keys: str) -> str:
  assert plan_command([*KEYS, *keys]) == 0
  return capsys.readouterr().out


def test_plan_answers_as_for_text(capsys):
  out = planned(
    capsys, "num_devices=16", "rollout_devices=4", "batch_size=12", "micro_batch_size=auto"
  )
  assert (
    "Open   micro_batch_size=auto chooses from 12, 24, 48 completions per microbatch; below as"
    in out
  )
  assert " 16 devices     = training 12 + rollout 4\n" in out
  out = planned(capsys, "compile_topology=v5e-16", "micro_batch_size=16", "--json")
  assert json.loads(out)["rl"]["training_devices"] == 16
  assert plan_command([*KEYS, "num_hosts=2"]) == 2
  assert "num_hosts=2 says who loads samples" in capsys.readouterr().err


@pytest.mark.usefixtures("traced_anew", "begun")
def test_a_compiled_step_is_saved_and_run(tmp_path):
  keys = [f"base_output_directory={tmp_path}", "steps=1", "enable_checkpointing=false"]
  expected = run(tmp_path, "run_name=one", *keys, f"save_compiled_step={tmp_path}/step")
  assert same(run(tmp_path, "run_name=two", *keys, f"compiled_step={tmp_path}/step"), expected)
  with pytest.raises(UserError, match="micro_batch_to_train"):
    run(tmp_path, "run_name=three", "micro_batch_size=16", f"compiled_step={tmp_path}/step")
