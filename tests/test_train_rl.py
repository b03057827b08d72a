"""Runs of reinforcement learning from the command down to the bits of their parameters."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vowels
from initial_states import random_parameters
from processes import REPOSITORY
from several_processes import start, wait

from maxbatch import train_rl
from maxbatch.batch.from_config import topology
from maxbatch.checkpoints.find import completed_steps
from maxbatch.command_line.signals import StopSignals
from maxbatch.config.load import load_config
from maxbatch.data.rows import Rows
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.errors import EXIT_PROCESS_FAILED, UserError
from maxbatch.hardware.sharding import make_mesh
from maxbatch.models.layers import hidden_of
from maxbatch.models.registry import build_model
from maxbatch.rl import method as mode
from maxbatch.rl.grpo import LARGEST_GAP, MODEL_METRICS
from maxbatch.rl.microbatches import MicrobatchMaker
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.rl.prompt_set import prompt_set
from maxbatch.rl.prompts import Prompt
from maxbatch.rl.requirements import check_rl
from maxbatch.rl.rollout import RolloutLoader
from maxbatch.rl.run import run_rl
from maxbatch.rl.sampled import CompletionSampler, completion_sampler, run_vocabulary
from maxbatch.rl.steps import check_gap
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.sampling import sampler as sampling_programs
from maxbatch.sampling.sampler import Prompts
from maxbatch.sampling.text import choice_of
from maxbatch.training.job import DeviceClock

_KEYS = """config=base num_simulated_devices=8 vocab_size=264 base_emb_dim=16 base_num_decoder_layers=1
  base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 base_mlp_dim=32 max_target_length=16
  max_prefill_predict_length=8 num_generations=4 batch_size=4 micro_batch_size=8 accumulation=streamed
  rl_task=format reward_functions=[vowels:count] reward_processes=1 generate_length=0
  eval_samples=1 eval_interval=-1 lr_schedule_type=constant warmup_steps=0 learning_rate=0.01 steps=3
  max_num_checkpoints_to_keep=9 write_report=false metrics_writers=[jsonl]"""
KEYS = _KEYS.split()
TRAIN_RL = [sys.executable, "-m", "maxbatch.train_rl"]


def run(folder: pathlib.Path, *keys: str) -> list[np.ndarray]:
  """The parameters that a run ends with."""
  config = load_config([*KEYS, f"base_output_directory={folder}", *keys])
  state, _ = run_rl(config)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(state.parameters)]


def figures(folder: pathlib.Path, name: str = "run") -> list[dict[str, Any]]:
  """Of all steps, what depends neither on the clock nor on where evaluations are."""
  lines = (folder / name / "metrics.jsonl").read_text().splitlines()
  clocked = ("second", "overlap", "ideal", "eval/", "goodput")
  return [
    {name: x for name, x in json.loads(line).items() if not any(word in name for word in clocked)}
    for line in lines
  ]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
  return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


PROMPTS = "".join(json.dumps({"ask": f"f{n}=", "answer": "e"}) + "\n" for n in range(10))
OF_FILES = """rl_task= dataset_type=grain train_data_columns=[ask,answer] eval_data_columns=[ask,answer]
  eval_fraction=0.1 leftover_prompts=carry"""
WAYS = {
  "plain": ["data_shuffle_seed=1"],
  "all": [
    *OF_FILES.split(),
    *["rollout_staleness=1", "num_iterations=2", "grpo_beta=0.1", "loss_type=grpo", "steps=6"],
  ],
  "lagging": ["rollout_staleness=2", "num_iterations=2", "steps=6"],
}
WAYS["experts"] = [
  *["num_experts=4", "base_moe_mlp_dim=8", "routed_bias=true", "base_num_decoder_layers=2"],
  *["rollout_routing_replay=true", "rollout_staleness=1", "num_iterations=2", "steps=4"],
]
WAYS["apart"] = [*WAYS["all"], "rollout_devices=4"]


def keys(way: str, prompts: str) -> list[str]:
  return [*WAYS[way], *([prompts] if "rl_task=" in WAYS[way] else [])]


def delayed(inner: Callable[..., Any]) -> Callable[..., Any]:
  draws = random.Random(0)

  def function(*arguments: Any) -> Any:
    time.sleep(draws.random() * 0.05)
    return inner(*arguments)

  return function


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
  file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
  file.write_text(PROMPTS)
  return f"grain_train_files={file}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, prompts: str) -> Callable[[str], Any]:
  """Uninterrupted runs, with delays in both threads: parameters, and figures of all steps."""

  @functools.cache
  def of(way: str) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp(way)
    with pytest.MonkeyPatch.context() as patch:
      for name in ("sample", "reward"):
        patch.setattr(MicrobatchMaker, name, delayed(getattr(MicrobatchMaker, name)))
      return run(folder, "run_name=run", *keys(way, prompts)), figures(folder)

  return of


def test_ctrl_c_in_the_middle_of_a_rollout_and_going_on_ends_with_the_same_bits(
  whole, tmp_path, monkeypatch
):
  parameters, expected = whole("plain")
  reward, calls = MicrobatchMaker.reward, itertools.count(1)

  def interrupted(*arguments: Any) -> Any:
    if next(calls) == 3:
      os.kill(os.getpid(), signal.SIGINT)
    return reward(*arguments)

  monkeypatch.setattr(MicrobatchMaker, "reward", interrupted)
  run(tmp_path, "run_name=run", *WAYS["plain"])
  assert 1 <= len(figures(tmp_path)) - 1 < 3
  assert same(run(tmp_path, "run_name=run", *WAYS["plain"]), parameters)
  assert figures(tmp_path) == expected


@pytest.mark.parametrize(
  ("way", "stops"), [("all", [3]), ("lagging", [2, 5]), ("apart", [3]), ("experts", [2])]
)
def test_a_run_that_is_stopped_and_goes_on_ends_with_the_same_bits(
  whole, prompts, tmp_path, way, stops, monkeypatch
):
  """Also between two steps on a batch, sampled again by a policy that is gone, with a reference."""
  parameters, expected = whole(way)
  asked = itertools.count(1)
  monkeypatch.setattr(StopSignals, "agreed", property(lambda self: next(asked) in stops))
  for stop in stops:
    run(tmp_path, "run_name=run", *keys(way, prompts))
    assert (tmp_path / "run" / "checkpoints" / str(stop)).is_dir()
  result = run(tmp_path, "run_name=run", *keys(way, prompts))
  assert same(result, parameters)
  assert figures(tmp_path) == expected


def test_two_processes_train_as_one_and_a_killed_one_costs_nothing(whole, prompts, tmp_path):
  """It is killed in the middle of a rollout; then the run goes on in one."""
  parameters, expected = whole("all")
  own = [*keys("all", prompts), f"base_output_directory={tmp_path}", "run_name=run"]
  killing = ["reward_functions=[vowels:kill_at_last]", "checkpoint_period=1"]
  folders = dict.fromkeys(range(2), REPOSITORY / "tests")  # where the rewards' module is
  # The prompt of the evaluation and two of each batch are its own: the third batch's last.
  variables = {0: {vowels.CALLS: f"{tmp_path}/calls:7"}}
  arguments = [*KEYS, *own, *killing]
  ended = wait(start(2, arguments, command=TRAIN_RL, variables=variables, folders=folders))
  assert [each.exit_code for each in ended] == [-9, EXIT_PROCESS_FAILED], ended
  assert "stopped: process 0 on " in ended[1].errors
  assert completed_steps(tmp_path / "run" / "checkpoints")[-1] in (1, 2)
  # Eight devices' gradients are added in another order, and Adam divides by their size.
  for result, right in zip(run(tmp_path, *own), parameters, strict=True):
    np.testing.assert_allclose(result, right, rtol=0, atol=1e-5)
  for result, right in zip(figures(tmp_path), expected, strict=True):
    assert result == pytest.approx(right, rel=1e-6, abs=1e-6)


def test_devices_that_only_sample_are_those_of_all_processes(whole, prompts, tmp_path):
  """The last two of each; both those that train and those that sample divide the parameters over both
  processes."""
  parameters, expected = whole("apart")
  own = [*keys("apart", prompts), f"base_output_directory={tmp_path}", "run_name=run"]
  own += ["ici_data_parallelism=1", "ici_fsdp_parallelism=4"]
  own += ["rollout_fsdp_parallelism=2", "rollout_tensor_parallelism=2"]
  folders = dict.fromkeys(range(2), REPOSITORY / "tests")  # where the rewards' module is
  ended = wait(start(2, [*KEYS, *own], command=TRAIN_RL, folders=folders))
  assert [each.exit_code for each in ended] == [0, 0], ended
  assert "data 1 × fsdp 4" in ended[0].output
  for result, right in zip(figures(tmp_path), expected, strict=True):
    assert result == pytest.approx(right, rel=1e-5, abs=1e-6)
  for result, right in zip(run(tmp_path, *own), parameters, strict=True):
    np.testing.assert_allclose(result, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["all", "apart"])
def test_at_any_staleness_the_bits_are_those_of_the_synchronous_run(
  whole, prompts, tmp_path, monkeypatch, way
):
  """Hazard: "staleness 0" that samples with an older policy where it overlaps, whatever takes how long."""
  parameters, expected = whole(way)
  monkeypatch.setattr(mode, "RolloutLoader", functools.partial(RolloutLoader, overlaps=False))
  assert same(run(tmp_path, "run_name=run", *keys(way, prompts)), parameters)
  assert figures(tmp_path) == expected


def test_devices_that_only_sample_change_nothing_but_rounding(whole):
  """Four that train and four that sample, beside eight that do both."""
  (parameters, steps), (expected, expected_steps) = whole("apart"), whole("all")
  # Added in another order, as above.
  for ours, theirs in zip(parameters, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
  for ours, theirs in zip(steps[1:], expected_steps[1:], strict=True):
    for name in ("rl/reward", "rl/reward_std", "rl/completion_length", "rl/truncated"):
      assert ours[name] == theirs[name], name


def test_a_pipeline_s_run_is_one_without_it_to_rounding(tmp_path):
  """With repeats: what samples takes the layers in the model's order. It is stopped after two steps, saves
  two policies, and goes on without a pipeline."""
  more = ["base_num_decoder_layers=4", "grpo_beta=0.1", "rollout_staleness=1"]
  more += ["opt_type=sgd", "sgd_momentum=0", "learning_rate=0.1"]
  stages = ["pipeline_schedule=interleaved_1f1b", "ici_pipeline_parallelism=2"]
  stages += ["num_pipeline_repeats=2", "ici_fsdp_parallelism=2", "ici_data_parallelism=2"]
  expected = run(tmp_path, "run_name=whole", *more)
  run(tmp_path, "run_name=run", *more, *stages, "steps=2")
  parameters = run(tmp_path, "run_name=run", *more, "steps=3")
  for ours, theirs in zip(parameters, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
  for ours, theirs in zip(figures(tmp_path)[1:], figures(tmp_path, "whole")[1:], strict=True):
    for name in ("rl/reward", "rl/completion_length", "rl/truncated", "rl/skipped_microbatches"):
      assert ours[name] == theirs[name], name
    for name in ("loss", "grad_norm", "rl/kl", "rl/entropy"):
      assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert ours[LARGEST_GAP] < 1e-4 or ours["step"] > 1


def test_devices_that_only_sample_do_not_wait_for_training(prompts, tmp_path, monkeypatch):
  """Nor does training wait for them: a microbatch is trained on while the next is sampled."""
  sample, take = MicrobatchMaker.sample, RolloutLoader.__next__
  taken, in_time, trains = itertools.count(), [], threading.Event()

  def waiting(self: MicrobatchMaker, params: Any, batch: int, number: int) -> Any:
    if number == 1:
      in_time.append(trains.wait(20))
    return sample(self, params, batch, number)

  def noted(self: RolloutLoader) -> Any:
    if next(taken):
      trains.set()  # The first microbatch is dispatched.
    return take(self)

  monkeypatch.setattr(MicrobatchMaker, "sample", waiting)
  monkeypatch.setattr(RolloutLoader, "__next__", noted)
  run(tmp_path, *keys("apart", prompts))
  assert in_time == [True] * 3


def test_training_on_a_microbatch_is_dispatched_while_the_devices_sample_the_next(
  tmp_path, monkeypatch
):
  """As the devices run one program after the other, they are then never without one."""
  completed, dispatched = CompletionSampler.completed, mode.RolloutHooks.dispatched
  numbers, in_time, trains = itertools.count(), [], threading.Event()

  def waiting(self: CompletionSampler, sampling: Any) -> Any:
    if next(numbers) == 2:  # After the evaluation's, and the first microbatch.
      in_time.append(trains.wait(20))
    return completed(self, sampling)

  def noted(self: mode.RolloutHooks, metrics: Any, since: float) -> None:
    trains.set()
    dispatched(self, metrics, since)

  monkeypatch.setattr(CompletionSampler, "completed", waiting)
  monkeypatch.setattr(mode.RolloutHooks, "dispatched", noted)
  run(tmp_path, "steps=1", "enable_checkpointing=false", "eval_samples=1")
  assert in_time == [True]


def test_sampling_is_dispatched_and_not_awaited(monkeypatch):
  """What is read of its results waits for them, and for all that the devices are at before."""

  class Unread:
    def all(self) -> None:
      raise AssertionError("the host waits for the devices")

    def __getitem__(self, part: Any) -> Any:
      return self

  config = load_config(KEYS)
  model = build_model(config.model, config.batch.max_target_length)
  mesh = make_mesh(topology(config.mesh, 1), jax.devices()[:1])
  write = sampling_programs._write

  def unread(*arguments: Any) -> Any:
    state, *others = write(*arguments)
    return state._replace(ended_B=Unread()), *others

  monkeypatch.setattr(sampling_programs, "_write", unread)
  prompts = [Prompt("f1=", {})] * 2
  sampling = completion_sampler(config, model, mesh).begun(
    random_parameters(model), prompts, "rollout", 0, 0
  )
  assert sampling.samples.tokens_BN.shape == (8, 8)


def test_the_devices_clock_counts_each_program_from_the_end_of_the_one_before(monkeypatch):
  ends, dispatched = iter([1.0, 3.5, 8.0, 9.0]), threading.Event()
  monkeypatch.setattr("maxbatch.training.job.time.perf_counter", lambda: next(ends))
  with DeviceClock() as clock:
    assert clock.timed(jnp.zeros(1), 0.0)() == 1.0
    assert clock.timed(jnp.zeros(1), 3.0)() == 0.5
    until = types.SimpleNamespace(block_until_ready=dispatched.wait)
    sampling, training = clock.timed(until, 6.0), clock.timed(jnp.zeros(1), 7.0)
    dispatched.set()
    assert (sampling(), training()) == (2.0, 1.0)


def test_the_sampler_s_noise_is_repeated_in_no_microbatch(monkeypatch):
  """Hazard: a constant random key, with which all microbatches have the same noise."""
  config, keys = load_config(KEYS), []
  model = build_model(config.model, config.batch.max_target_length)
  sampler = completion_sampler(
    config, model, make_mesh(topology(config.mesh, 1), jax.devices()[:1])
  )

  def taken(sampler: Any, params: Any, given: Prompts, vocabulary: Any) -> None:
    keys.extend(map(bytes, np.asarray(jax.random.key_data(given.keys_B))))
    raise InterruptedError

  monkeypatch.setattr("maxbatch.rl.sampled.sample", taken)
  prompts = [Prompt("f1=", {})] * 2
  for part, batch, first in itertools.product(("rollout", "evaluation"), (0, 1), (0, 2)):
    with pytest.raises(InterruptedError):
      sampler({}, prompts, part, batch, first)
  assert len(keys) == len(set(keys)) == 2 * 2 * 2 * 2 * config.rl.num_generations


def test_a_greedy_evaluation_takes_the_likeliest_token_each_time():
  config = load_config([*KEYS, "decode_sampling_top_k=3"])
  model = build_model(config.model, config.batch.max_target_length)
  mesh = make_mesh(topology(config.mesh, 1), jax.devices()[:1])
  sampler = completion_sampler(config, model, mesh, greedy=True)
  params = random_parameters(model)
  prompts = [Prompt(f"f{number}=", {}) for number in range(8)]
  rollout = sampler(params, prompts, "evaluation", 0, 0).rollout
  tokens_BP, lengths_B = rollout.prompts_BP, rollout.prompt_lengths_B
  assert len(tokens_BP) == 8
  for row_P, length, own_N, count in zip(
    tokens_BP, lengths_B, rollout.completions_BN, rollout.lengths_B, strict=True
  ):
    tokens_1T = jnp.asarray([[*row_P[len(row_P) - length :], *own_N[:count]]])
    rows = Rows(tokens_1T, tokens_1T, jnp.ones(tokens_1T.shape), jnp.zeros(1, int))
    bound = model.bind(params)
    logits_TV = np.array(hidden_of(bound(rows, None))[0] @ bound.output_matrix())
    logits_TV[:, ~np.asarray(sampler.vocabulary.allowed_V)] = -np.inf
    assert logits_TV[length - 1 : -1].argmax(1).tolist() == own_N[:count].tolist()


@pytest.mark.parametrize(("strategy", "ks"), [("greedy", []), ("both", [1, 2, 4])])
def test_eval_sampling_strategy_says_which_completions_pass(tmp_path, capsys, strategy, ks):
  keys = [f"eval_sampling_strategy={strategy}", "eval_interval=1", "steps=1", "eval_samples=3"]
  assert train_rl.main([*KEYS, *keys, f"base_output_directory={tmp_path}", "run_name=run"]) == 0
  last = read_metrics(tmp_path / "run")[-1]
  named = {name.removeprefix("eval/") for name in last if "pass_at" in name}
  assert named == {"greedy_pass_at_1", *(f"pass_at_{k}" for k in ks)}
  assert {"eval/greedy_reward", "eval/greedy_truncated"} <= last.keys()
  assert f"greedy pass@1 {last['eval/greedy_pass_at_1']:.3f}" in capsys.readouterr().out


def test_neither_padding_nor_a_beginning_is_ever_sampled():
  """Hazard: PAD that may be sampled, where which tokens count is inferred from it."""
  vocabulary, tokens = run_vocabulary(load_config(KEYS)), ByteTokenizer()
  allowed_V = np.asarray(vocabulary.allowed_V)
  assert allowed_V[: tokens.bos_id].all()
  assert not allowed_V[[tokens.bos_id, tokens.pad_id]].any()
  assert np.flatnonzero(vocabulary.ends_V).tolist() == [tokens.eos_id]
  assert not allowed_V[tokens.vocab_size :].any()


def test_what_is_sampled_does_not_depend_on_micro_batch_size(whole, tmp_path):
  _, (_, expected, *_) = whole("plain")
  run(tmp_path, "run_name=run", *WAYS["plain"], "micro_batch_size=16", "steps=1")
  _, result = figures(tmp_path)
  assert result["gradient_accumulation_steps"] == 1
  for name in ("rl/reward", "rl/reward_std", "rl/live_groups", "rl/completion_length"):
    assert result[name] == pytest.approx(expected[name], rel=1e-12), name
  for name in ("loss", "grad_norm", "rl/entropy"):
    assert result[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_microbatches_of_which_no_reward_differs_are_skipped_exactly(whole, tmp_path, monkeypatch):
  """Hazard: the model runs on groups that teach it nothing."""
  parameters, expected = whole("plain")
  # Another program would round otherwise: it asks the same, and always runs the model.
  asked = lambda self, completions: (completions.advantages_B > -1e30).any()  # noqa: E731
  monkeypatch.setattr(PolicyLoss, "has_gradient", asked)
  monkeypatch.setattr(PolicyLoss, "__eq__", lambda self, other: self is other)  # Compiled anew.
  assert same(run(tmp_path, "run_name=run", *WAYS["plain"]), parameters)
  assert [record["rl/skipped_microbatches"] for record in expected[1:]] == [0, 0, 1]
  for result, skipping in zip(figures(tmp_path), expected, strict=True):
    # What the model says of the completions is a mean over those on which it was run.
    names = skipping.keys() - set(MODEL_METRICS)
    assert {name: result[name] for name in names} == {name: skipping[name] for name in names}


def test_tokens_chosen_from_some_have_the_same_probabilities_in_training(tmp_path):
  """Hazard: sampled by top-k or top-p, trained on as if from all tokens. Twice on each batch: the
  second time another policy would leave out other tokens."""
  more = ["num_iterations=2", "grpo_beta=0.1", "steps=2"]
  choice = ["decode_sampling_top_k=20", "decode_sampling_nucleus_p=0.9"]
  run(tmp_path, "run_name=run", *more, *choice)
  _, first, second = figures(tmp_path)
  assert first[LARGEST_GAP] < 1e-4 < second[LARGEST_GAP] < 1
  assert first["rl/entropy"] <= np.log(20)


def test_where_sampling_sent_tokens_is_compared_with_training_and_replayed(whole):
  _, (_, first, second, *_) = whole("experts")
  assert first["moe/routing_flips"] == 0
  # The second step on a batch has another policy: it would send tokens elsewhere, and does not.
  assert second["moe/routing_flips"] > 0
  loads = [name for name in first if name.startswith("moe/load/")]
  assert len(loads) == 8
  assert [first[name] for name in loads] == [second[name] for name in loads]
  assert first[LARGEST_GAP] < 1e-5


def test_records_have_what_a_rollout_counts(whole):
  _, (before, *steps) = whole("plain")
  assert before == {"step": 0, "samples": 0, "tokens": 0}
  assert [record["samples"] for record in steps] == [16, 32, 48]
  for record in steps:
    assert record[LARGEST_GAP] < 1e-4
    assert record["rl/importance_weight"] == pytest.approx(1, abs=1e-4)
    assert 0 <= record["rl/live_groups"] <= 1
    assert record["rl/staleness"] == 0
  *_, record = whole("lagging")[1]
  assert (record["rl/live_groups"], record["rl/skipped_microbatches"]) == (0, 2)
  assert (record["loss"], record["grad_norm"]) == (0, 0)
  assert record["rl/completion_length"] > 0
  assert not set(MODEL_METRICS) & record.keys()
  steps = whole("all")[1][1:]
  assert [record["rl/staleness"] for record in steps] == [0, 0, 1, 1, 1, 1]
  assert [record["rl/kl"] > 0 for record in steps] == [False, True, True, True, True, True]
  # Two steps on the same completions have the same rewards; the first has not moved from their policy.
  assert steps[0]["rl/reward"] == steps[1]["rl/reward"] != steps[2]["rl/reward"]
  assert steps[0]["rl/log_prob_gap"] < 1e-5 < steps[1]["rl/log_prob_gap"]


def test_a_difference_between_sampler_and_trainer_stops_the_run(tmp_path, capsys, monkeypatch):
  """As if the sampler forgot the temperature."""
  wrong = dataclasses.replace(choice_of(load_config(KEYS).run), temperature=2.0)
  monkeypatch.setattr("maxbatch.rl.sampled.choice_of", lambda run: wrong)
  assert train_rl.main([*KEYS, f"base_output_directory={tmp_path}"]) == 2
  assert "differs by" in capsys.readouterr().err
  assert not list(tmp_path.rglob("checkpoints/1"))


def test_one_token_that_rounding_sends_to_another_expert_stops_no_run():
  dense, mixture = (load_config([*KEYS, *keys]) for keys in ([], ["num_experts=4"]))
  flipped = {"rl/log_prob_gap": 1e-4, LARGEST_GAP: 0.5}
  check_gap(mixture, 0, flipped)
  with pytest.raises(UserError, match=r"differs by 0\.5 between sampling and training, where"):
    check_gap(dense, 0, flipped)
  replayed = load_config([*KEYS, "num_experts=4", "rollout_routing_replay=true"])
  with pytest.raises(UserError, match=r"differs by 0\.5 between sampling and training, where"):
    check_gap(replayed, 0, flipped)
  with pytest.raises(UserError, match=r"differs by 0\.1 on average between"):
    check_gap(mixture, 0, {**flipped, "rl/log_prob_gap": 0.1})


def test_what_rounding_to_eight_bits_flips_stops_no_run():
  full, eight = (load_config([*KEYS, *keys]) for keys in ([], ["quantization=int8"]))
  check_gap(eight, 0, {LARGEST_GAP: 2e-3})
  with pytest.raises(UserError, match=r"rounding in dtype=float32 makes 0\.00\d+ at"):
    check_gap(full, 0, {LARGEST_GAP: 2e-3})
  with pytest.raises(UserError, match=r"in dtype=float32 quantization=int8 makes 0\.\d+ at"):
    check_gap(eight, 0, {LARGEST_GAP: 2.0})


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (["num_generations=-1"], "num_generations=-1: this command trains by reinforcement"),
    (["accumulation=fused"], "accumulation=fused"),
    (["decode_sampling_temperature=0"], "decode_sampling_temperature=0"),
    (["warm_start_steps=3", "load_parameters_path=x"], "warm_start_steps=3"),
    (["dropout_rate=0.1"], "dropout_rate=0.1"),
    (["gns=all"], "gns=all"),
  ],
)
def test_what_a_run_cannot_do_is_refused_by_name(keys, said):
  with pytest.raises(UserError, match=re.escape(said)):
    check_rl(load_config([*KEYS, *keys]))


def test_every_hazard_has_the_test_that_the_documentation_names():
  text = (REPOSITORY / "docs" / "reinforcement_learning.md").read_text()
  table = text.split("the hazards that our tests are named after")[1].split("\n## ")[0]
  rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
  names = [re.findall(r"`(test_\w+)` \|$", row) for row in rows]
  assert len(names) > 10
  tests = "".join(path.read_text() for path in (REPOSITORY / "tests").glob("test_*.py"))
  for row, (name,) in zip(rows, names, strict=True):
    assert f"def {name}(" in tests, row


def documented(heading: str) -> set[str]:
  """The names in the table below a heading of the documentation."""
  text = (REPOSITORY / "docs" / "reinforcement_learning.md").read_text()
  table = text.split(f"## {heading}\n")[1].split("\n## ")[0]
  cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
  names = re.findall(r"`([^`]+)`", " ".join(cells))
  return {name for name in names if "/" in name}


def test_a_record_has_all_that_is_documented_and_the_times_of_its_own_step(tmp_path):
  """Of two steps on each batch, the first of which measures the noise of the gradient per prompt."""
  keys = ["run_name=run", "gns_from_microbatches=true", "ici_fsdp_parallelism=4", "steps=4"]
  keys += ["ici_data_parallelism=2", "micro_batch_size=16", "num_iterations=2", "grpo_beta=0.1"]
  run(tmp_path, *keys, "eval_interval=2", "eval_samples=3", "eval_sampling_strategy=both")
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  _, *records = map(json.loads, lines)
  named = documented("What is measured?")
  assert len(named) > 20
  assert named - {"eval/pass_at_k"} | {"eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_4"} <= (
    set(records[-1])
  )
  raw = {"gns/total/signal", "gns/total/noise", "gns/sampling/noise"}
  assert raw < documented("More prompts, or more completions of each?")
  assert [raw <= set(record) for record in records] == [True, False, True, False]
  for number, record in enumerate(records):
    R, T = record["rl/rollout_seconds"] + record["rl/reward_seconds"], record["rl/train_seconds"]
    assert R > 0 < T
    # Also after an evaluation, and in the last step.
    assert record["step_seconds"] >= record["data_wait_seconds"]
    R, n = 0 if number % 2 else R, 1
    assert record["rl/ideal_seconds"] == pytest.approx(max(R, T) + min(R, T) / n)
    hidden = 0 if number % 2 else (R + T - record["step_seconds"]) / min(R, T)
    assert record["rl/overlap_fraction"] == pytest.approx(min(max(hidden, 0), 1))
  for name, said in (
    ("micro_batch_size=8", "for example micro_batch_size=16"),
    ("gns=all", "gns=all"),
  ):
    with pytest.raises(UserError, match=said):
      run(tmp_path, *keys, name)


def test_a_warm_start_is_taken_up_and_made_only_once(tmp_path, capsys):
  keys = [*KEYS, f"base_output_directory={tmp_path}", "warm_start_steps=2", "steps=1"]
  keys += ["eval_interval=1", "run_name=mine", "reward_functions=[exact]"]
  assert train_rl.main(keys) == 0
  out = capsys.readouterr().out
  assert "Begins  parameters of" in out
  assert "pass@1" in out
  assert "--- after training" in out
  assert "tensorboard" not in out  # Which metrics_writers does not name.
  assert train_rl.main(keys) == 0
  assert "Warm start" not in capsys.readouterr().out


def test_a_warm_start_trains_all_of_a_model_that_begins_at_random_under_its_adapters(tmp_path):
  given = ["warm_start_steps=30", "steps=1", "lora_rank=2", "lora_targets=[query]", "run_name=mine"]
  run(tmp_path, *given, "reward_functions=[exact]")
  warm, own = (read_metrics(tmp_path / name) for name in ("mine/warm_start", "mine"))
  assert warm[-1]["loss"] < 0.9 * warm[1]["loss"]
  assert "loss" in own[-1]


def test_a_prompt_that_is_too_long_is_named(prompts, tmp_path, capsys):
  """One of a task stops the run; those of files are bad records."""
  keys = [*KEYS, f"base_output_directory={tmp_path}", "max_prefill_predict_length=6"]
  assert train_rl.main(keys) == 2
  assert "rl_task=format: the prompt f" in capsys.readouterr().err
  file = tmp_path / "long.jsonl"
  file.write_text(PROMPTS + '{"ask": "far too long", "answer": ""}\n')
  keys = [*keys[:-1], *OF_FILES.split(), f"grain_train_files={file}"]
  assert train_rl.main(keys) == 2
  assert (
    "1 bad records, and max_bad_records=0; correct them, or raise it to skip more. The first: "
    f"grain_train_files: {file}, line 11: the prompt far too long has 13 tokens, and "
    "max_prefill_predict_length=8; for example max_prefill_predict_length=13"
  ) in capsys.readouterr().err
  result = prompt_set(load_config([*keys, "max_bad_records=1"]))
  assert (result.train.count, len(result.validation), result.num_skipped) == (9, 1, 1)
