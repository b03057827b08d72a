"""Folders that transformers writes and reads: the same tensors, the same loss.

B rows, T tokens, V vocabulary.
"""

import pathlib
from typing import Any

import numpy as np
import pytest
from hf_folders import assert_same_bits, read_tensors
from late_imports import WhenUsed
from processes import small_run
from vocabularies import END, huggingface

from maxbatch.config.load import load_config
from maxbatch.convert import main as convert
from maxbatch.data.registry import build_dataset
from maxbatch.hugging_face.registry import FAMILIES
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import main as train

torch = WhenUsed("torch")
transformers = WhenUsed("transformers")

SIZES = {
  "vocab_size": 68,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 6,
  "max_position_embeddings": 32,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": None,
}
GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 68}


DEEPSEEK = {
  **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
  **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 10},
  **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5},
}
EXPERTS = {
  "mixtral": {"num_local_experts": 3},
  "deepseek_v2": DEEPSEEK | {"q_lora_rank": None},
  "deepseek_v3": DEEPSEEK | {"q_lora_rank": 14, "n_group": 2, "topk_group": 1},
  "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
  "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
  "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}


def random_model(model_type: str) -> Any:
  torch.manual_seed(0)
  sizes = GPT2 | {"bos_token_id": 1, "eos_token_id": 2} if model_type == "gpt2" else SIZES
  config = transformers.AutoConfig.for_model(model_type, **sizes | EXPERTS.get(model_type, {}))
  model = transformers.AutoModelForCausalLM.from_config(config)
  with torch.no_grad():
    for weight in model.parameters():
      weight += 0.1 * torch.randn_like(weight)
  return model


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_every_family_comes_back_bit_for_bit(tmp_path, family):
  theirs, back = tmp_path / "theirs", tmp_path / "back"
  random_model(family.model_types[0]).save_pretrained(theirs, max_shard_size="20KB")
  place = [f"base_output_directory={tmp_path}", "run_name=run", "max_target_length=32"]
  assert convert([f"from_hf={theirs}", *place]) == 0
  assert convert([f"to_hf={back}", f"checkpoint={tmp_path / 'run'}"]) == 0
  assert_same_bits(read_tensors(back), read_tensors(theirs))
  assert (back / "config.json").read_text() == (theirs / "config.json").read_text()


def their_loss(folder: pathlib.Path, rows: dict[str, np.ndarray]) -> float:
  """What transformers makes of rows, each of which is one document."""
  model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  weights_BT = torch.tensor(rows["weights"])
  with torch.no_grad():
    logits_BTV = model(torch.tensor(rows["inputs"]).long()).logits
    targets_BT = torch.tensor(rows["targets"]).long()
    losses_BT = torch.nn.functional.cross_entropy(
      logits_BTV.transpose(1, 2), targets_BT, reduction="none"
    )
  return float((losses_BT * weights_BT).sum() / weights_BT.sum())


def test_a_trained_run_has_the_same_loss_in_transformers(tmp_path):
  vocabulary = huggingface(tmp_path / "vocabulary", bos_token=END, eos_token=END)
  run = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  keys = "steps=4 vocab_size=300 learning_rate=0.01 warmup_steps=0"
  keys += " block_cross_document_attention=false base_num_kv_heads=1 base_num_decoder_layers=2"
  keys += f" tokenizer_type=huggingface tokenizer_path={vocabulary}"
  arguments = [*run, *keys.split()]
  assert train(arguments) == 0
  ours = read_metrics(tmp_path / "first_run")
  assert ours[0]["eval/loss"] - ours[-1]["eval/loss"] > 0.1

  out = tmp_path / "model"
  assert convert([f"to_hf={out}", f"checkpoint={tmp_path / 'first_run'}"]) == 0
  config = load_config(arguments)
  dataset = build_dataset(config.data, config.batch.max_target_length)
  assert dataset.validation is not None
  rows = dataset.validation.rows(np.arange(config.run.eval_samples))
  np.testing.assert_allclose(their_loss(out, rows), ours[-1]["eval/loss"], atol=1e-5)

  text = "the number 7 follows 6"
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  kept = transformers.PreTrainedTokenizerFast.from_pretrained(vocabulary)
  assert theirs(text)["input_ids"] == kept(text)["input_ids"]
  generation = transformers.GenerationConfig.from_pretrained(out)
  assert generation.eos_token_id == theirs.eos_token_id == 0
