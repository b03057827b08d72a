"""What reinforcement learning begins with: a Hugging Face folder with its chat template, and adapters."""

import itertools
import json
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest
from hf_folders import llama_tensors, write_folder
from processes import REPOSITORY
from test_chat import CHATML, ENDS, SPECIAL
from vocabularies import huggingface

from maxbatch.command_line.signals import StopSignals
from maxbatch.config.load import load_config
from maxbatch.models.lora import merged, without_adapters
from maxbatch.models.registry import build_model
from maxbatch.rl.grpo import LARGEST_GAP
from maxbatch.rl.policies import Policies
from maxbatch.rl.run import run_rl
from maxbatch.rl.sampled import completion_sampler
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.sampling.choice import Choice
from maxbatch.sampling.sampler import Prompts, Sampler, sample

SMALL = """steps=4 batch_size=4 num_generations=4 micro_batch_size=8 max_prefill_predict_length=48
  max_target_length=56 eval_samples=2 learning_rate=0.05 reward_processes=1
  reward_functions=[gsm8k,vowels:count] lora_rank=2 num_iterations=2 rollout_staleness=1
  grpo_beta=0.01 num_simulated_devices=8 max_num_checkpoints_to_keep=9"""
VOCABULARY = 300


def documented() -> list[str]:
  """The keys of the command in the documentation."""
  text = (REPOSITORY / "docs" / "reinforcement_learning.md").read_text()
  (command,) = re.findall(r"maxbatch train_rl (config=base .*?)\n```", text, re.DOTALL)
  return shlex.split(command.replace("\\\n", " "))


def write_inputs(folder: pathlib.Path) -> None:
  """Its files, in GSM8K's layout, and its model's folder."""
  tensors = llama_tensors()
  for name in ("model.embed_tokens.weight", "lm_head.weight"):
    tensors[name] = np.resize(tensors[name], (VOCABULARY, tensors[name].shape[1]))
  write_folder(folder / "my_folder", tensors, vocab_size=VOCABULARY, eos_token_id=0)
  huggingface(folder / "my_folder", SPECIAL, **ENDS, chat_template=CHATML)
  for part, count in (("train", 12), ("test", 3)):
    records = [
      {"question": f"{n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(count)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{part}.jsonl").write_text(text)


def test_the_documented_command_trains_adapters_of_a_hugging_face_folder(tmp_path, monkeypatch):
  """Stopped between two steps on a batch; what samples is what the merged weights are."""
  write_inputs(tmp_path)
  monkeypatch.chdir(tmp_path)
  config = load_config([*documented(), *SMALL.split()])
  asked = itertools.count(1)
  monkeypatch.setattr(StopSignals, "agreed", property(lambda self: next(asked) == 1))
  run_rl(config)
  state, position = run_rl(config)
  assert position.step == 4
  first, *_ = records = read_metrics(tmp_path / "runs" / "gsm8k")[1:]
  assert first[LARGEST_GAP] < 1e-3
  assert [record["rl/staleness"] for record in records] == [0, 0, 1, 1]
  assert records[-1]["rl/kl"] > 0
  assert "eval/pass_at_1" in records[-1]

  params = jax.device_get(state.parameters)
  model = build_model(config.model, config.batch.max_target_length)
  encode = completion_sampler(config, model, jax.sharding.Mesh(jax.devices()[:1], "data")).encode
  ids = np.array(encode("5 + 1?"), np.int32)
  whole = build_model(without_adapters(config.model), config.batch.max_target_length)
  keys = jax.random.split(jax.random.key(0), 8)
  prompts = Prompts(np.tile(ids, (8, 1)), np.full(8, len(ids), np.int32), keys)
  letters = completion_sampler(
    config, model, jax.sharding.Mesh(jax.devices()[:1], "data")
  ).vocabulary
  one, other = (
    sample(Sampler(each, Choice(), 8, 56), weights, prompts, letters)
    for each, weights in ((model, params), (whole, merged(params, config.model)))
  )
  np.testing.assert_array_equal(one.tokens_BN, other.tokens_BN)
  np.testing.assert_allclose(one.log_probs_BN, other.log_probs_BN, atol=1e-4)
  trained, _ = model.split(params)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(trained))
  # Checkpoints have of earlier policies what trains alone.
  record = tmp_path / "runs" / "gsm8k" / "checkpoints" / "1" / "record" / "metadata"
  policies = re.findall(r"policies/\d+/([^\"]*)", record.read_text())
  assert len(policies) == 3 * 4
  assert all("/lora_" in name for name in policies)


def test_policies_share_what_is_frozen():
  sizes = "base_emb_dim=8 base_num_decoder_layers=1 base_mlp_dim=8 lora_rank=2"
  config = load_config(["config=base", *sizes.split()])
  model = build_model(config.model, 8)
  policies = Policies(model, kept=2)
  given = jax.jit(model.init)(jax.random.key(0))
  for step in range(3):
    policies.publish(step, jax.tree.map(lambda x: x + step, given))  # noqa: B023
  _, before = model.split(policies.of(1))
  trained, frozen = model.split(policies.of(2))
  assert frozen
  assert all(a is b for a, b in zip(*map(jax.tree.leaves, (before, frozen)), strict=True))
  expected, _ = model.split(given)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 2), trained, expected)
  with pytest.raises(KeyError):
    policies.of(0)
