"""Runs with adapters, handed over: merged for transformers, or alone for peft; logits are the same."""

from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from processes import small_run
from test_conversion_transformers import random_model

from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.checkpoints.newest import newest_record
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.convert import main as convert
from maxbatch.data.rows import Rows
from maxbatch.models.registry import build_model
from maxbatch.modes.run import run
from maxbatch.train import main as train

pytestmark = pytest.mark.xdist_group("transformers")

T = 16


def our_logits(config: Config, parameters: Any, tokens_BT: np.ndarray) -> np.ndarray:
  model = build_model(config.model, T, trainable=config.optimizer.trainable)
  rows = Rows(tokens_BT, tokens_BT, np.ones(tokens_BT.shape, np.float32), np.arange(len(tokens_BT)))

  @jax.jit
  def logits(parameters, rows):
    bound = model.bind(parameters)
    return bound(rows, None) @ bound.output_matrix()

  return np.asarray(logits(jax.device_get(parameters), rows))


def their_logits(model: Any, tokens_BT: np.ndarray) -> np.ndarray:
  with torch.no_grad():
    return model.eval()(torch.tensor(tokens_BT).long()).logits.numpy()


# peft asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
  ("model_type", "targets"),
  [("llama", "[query,value,out,gate,down]"), ("gpt2", "[query,value,out,up]")],
)
def test_adapters_of_a_model_that_is_somebodys(tmp_path, model_type, targets):
  """From a folder of transformers, through a run that trains adapters, and back."""
  theirs = tmp_path / "theirs"
  random_model(model_type).save_pretrained(theirs)
  made = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  keys = f"model_name={theirs} run_name=tuned steps=2 learning_rate=0.1 warmup_steps=0 "
  keys += f"vocab_size=264 lora_rank=3 lora_alpha=5 lora_targets={targets} "
  keys += f"load_parameters_path={theirs} block_cross_document_attention=false"
  own = ("base_emb", "base_num", "base_mlp", "head_dim", "vocab_size")
  arguments = [*(each for each in made if not each.startswith(own)), *keys.split()]
  state, _ = run(load_config(arguments))
  # Nothing of the model is saved but the adapters.
  record = newest_record(tmp_path / "tuned" / "checkpoints")
  assert record is not None
  saved = {name.rpartition("/")[2] for name in record["leaves"] if name.startswith("params/")}
  assert saved == {"lora_a", "lora_b"}
  tokens_BT = np.random.default_rng(0).integers(0, 68, (3, T)).astype(np.int32)
  # A resume reads the others where they are.
  resumed, _ = run(load_config([*arguments, "steps=3"]))
  assert fingerprints(resumed.frozen) == fingerprints(state.frozen)
  expected = our_logits(load_config(arguments), resumed.parameters, tokens_BT)

  checkpoint = f"checkpoint={tmp_path / 'tuned'}"
  assert convert([f"to_hf={tmp_path / 'merged'}", checkpoint]) == 0
  merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
  np.testing.assert_allclose(their_logits(merged, tokens_BT), expected, atol=1e-4)

  assert convert([f"to_peft={tmp_path / 'adapter'}", checkpoint]) == 0
  base = transformers.AutoModelForCausalLM.from_pretrained(theirs)
  before = their_logits(base, tokens_BT)
  adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
  found = their_logits(adapted, tokens_BT)
  np.testing.assert_allclose(found, expected[..., :68], atol=1e-4)
  assert np.abs(found - before).max() > 0.01


def test_what_a_peft_adapter_cannot_hold_is_refused(tmp_path, capsys):
  made = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  for name, keys in (("plain", []), ("more", ["lora_rank=2", "trainable=[head]"])):
    assert train([*made, f"run_name={name}", "steps=1", "warmup_steps=0", *keys]) == 0
  capsys.readouterr()
  for name, said in (
    ("plain", "has no adapters (lora_rank=0)"),
    ("more", "but head too (trainable="),
  ):
    assert convert([f"to_peft={tmp_path / 'out'}", f"checkpoint={tmp_path / name}"]) == 2
    assert said in capsys.readouterr().err
  assert not (tmp_path / "out").exists()
  # Merged, what trained beside the adapters is there too.
  assert convert([f"to_hf={tmp_path / 'out'}", f"checkpoint={tmp_path / 'more'}"]) == 0
