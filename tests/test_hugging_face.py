"""What a config.json may say, and what is refused; what a table of tensors does. Without torch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import tiny_config

from maxbatch.config.declare import declared
from maxbatch.config.find import model_names
from maxbatch.config.load import load_config
from maxbatch.config.schema import ModelConfig, to_flat
from maxbatch.errors import UserError
from maxbatch.hugging_face.families.gemma import GEMMA3
from maxbatch.hugging_face.families.gpt2 import GPT2
from maxbatch.hugging_face.families.llama import LLAMA
from maxbatch.hugging_face.model_keys import HARMLESS, PLAIN, SHAPE, differing
from maxbatch.hugging_face.registry import FAMILIES, family_for, family_of, read_folder
from maxbatch.models.registry import build_model
from maxbatch.models.remat import NAMED

SMOLLM = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 0,
  "eos_token_id": 0,
  "hidden_act": "silu",
  "hidden_size": 576,
  "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536,
  "is_llama_config": True,
  "max_position_embeddings": 2048,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 9,
  "num_hidden_layers": 30,
  "num_key_value_heads": 3,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_interleaved": False,
  "rope_scaling": None,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "vocab_size": 49152,
}
"""As older versions of transformers write it, rotary positions in keys of their own."""


def folder(path: Path, **changes: Any) -> Path:
  values = {key: value for key, value in (SMOLLM | changes).items() if value != "absent"}
  (path / "config.json").write_text(json.dumps(values))
  return path


def keys_of(path: Path) -> dict[str, Any]:
  return to_flat(load_config(["config=base", f"model_name={path}"]))


def test_a_published_file_says_what_the_packaged_model_does(tmp_path):
  packaged = to_flat(load_config(["config=base", "model_name=smollm-135m"]))
  assert differing(keys_of(folder(tmp_path)), packaged) is None


def test_the_users_own_keys_beat_the_folders(tmp_path):
  given = [f"model_name={folder(tmp_path)}", "base_num_decoder_layers=2", "max_target_length=64"]
  config = load_config(["config=base", *given])
  assert (config.model.base_num_decoder_layers, config.model.base_emb_dim) == (2, 576)


def test_a_folder_is_found_beside_the_file_that_names_it(tmp_path):
  (tmp_path / "smol").mkdir()
  folder(tmp_path / "smol")
  own = tmp_path / "own.yml"
  own.write_text("base_config: base\nmodel_name: smol\n")
  assert load_config([f"config={own}"]).model.base_emb_dim == 576


def test_positions_are_read_as_transformers_5_writes_them(tmp_path):
  llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
  parameters = llama3 | {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
  given = keys_of(folder(tmp_path, rope_parameters=parameters, rope_theta="absent"))
  names = ("rope_type", "rope_factor", "rope_max_timescale", "original_max_position_embeddings")
  assert [given[name] for name in names] == ["llama3.1", 32, 5e5, 8192]


IGNORED = (
  "maxbatch would ignore this key of a model of type llama. If the model computes the same without "
  "it, remove it from a copy of the file"
)
REFUSALS = {
  "an activation": (
    {"hidden_act": "relu"},
    'hidden_act="relu": not supported; what works: hidden_act="silu" or '
    'hidden_act="gelu_pytorch_tanh"',
  ),
  "a rope type": (
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    'rope_scaling={"type": "dynamic", "factor": 2.0}: rope_type dynamic not supported; what works: '
    "default, linear, llama3, yarn",
  ),
  "half a rope scaling": (
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}},
    'rope_scaling={"rope_type": "linear", "factor": 2.0, "beta": 1}: rope_type linear needs '
    "['factor'] and nothing else",
  ),
  "a quantization": (
    {"quantization_config": {"bits": 4}},
    'quantization_config={"bits": 4}: take the folder with the weights as trained',
  ),
  "dropout of attention": (
    {"attention_dropout": 0.1},
    "attention_dropout=0.1: not supported; what works: attention_dropout=0.0",
  ),
  "a window that Llama has not": ({"sliding_window": 4096}, f"sliding_window=4096: {IGNORED}"),
  "an unknown key": ({"embedding_multiplier": 12.0}, f"embedding_multiplier=12.0: {IGNORED}"),
  "no number": (
    {"num_attention_heads": "9"},
    'num_attention_heads="9": a whole number is needed, at least 1 and at most 2147483647',
  ),
  "a size that is missing": ({"vocab_size": "absent"}, "vocab_size=null: a value is needed"),
  "a model that is no language model": (
    {"architectures": ["LlamaForSequenceClassification"]},
    "architectures=['LlamaForSequenceClassification'] is not a language model of type llama; what "
    "works: LlamaForCausalLM",
  ),
  "another family": (
    {"model_type": "mamba"},
    "model_type=mamba is not supported; what works: llama, mistral, qwen2, qwen3, gemma2, "
    "gemma3_text, gemma3, olmo2, gpt2, mixtral, olmoe, qwen3_moe, gpt_oss, "
    "deepseek_v2, deepseek_v3",
  ),
}


@pytest.mark.parametrize("mistake", REFUSALS)
def test_what_would_be_ignored_is_refused_by_name(mistake, tmp_path):
  changes, message = REFUSALS[mistake]
  with pytest.raises(UserError) as caught:
    keys_of(folder(tmp_path, **changes))
  assert str(caught.value) == f"{tmp_path}/config.json: {message}"


ODD = [None, True, 0, -3, 2.5, 10**30, "9", "", [], ["a"], [[]], {}, {"rope_type": []}, {"a": {}}]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_whatever_a_value_is_it_is_taken_or_refused_in_a_sentence(family):
  sizes = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
  usual = (sizes | {"num_attention_heads": 4}) if family.name != "gpt2" else {}
  keys = {*family.same, *family.choices, *family.fixed, *family.defaults, *HARMLESS} | {
    *("rope_scaling", "rope_parameters", "layer_types", "text_config", "quantization_config"),
    *("sliding_window", "sliding_window_pattern", "n_inner", "num_key_value_heads"),
  }
  taken, messages = 0, []
  for key in sorted(keys):
    for value in ODD:
      values = usual | {"model_type": family.name, key: value}
      try:
        family_of(values, "here").options(values, "here")
        taken += 1
      except UserError as error:
        messages.append(str(error))
  assert all(message.startswith("here: ") for message in messages)
  assert min(taken, len(messages)) > 100


def test_a_value_out_of_range_names_both_keys(tmp_path):
  with pytest.raises(UserError) as caught:
    keys_of(folder(tmp_path, vocab_size=0))
  assert str(caught.value) == (
    f"{tmp_path}/config.json, vocab_size: vocab_size: 0: vocab_size must be at least 1. "
    "The nearest value that works: vocab_size: 1"
  )


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON in UTF-8"), ("[]", "a JSON object")])
def test_a_file_that_is_none_is_named(tmp_path, text, words):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(UserError, match=f"config.json.*{words}"):
    read_folder(tmp_path)


def test_the_text_of_gemma_3_is_read_out_of_the_whole():
  values = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    # All that the published file of the 4B model says of the text.
    "text_config": {
      "hidden_size": 2560,
      "intermediate_size": 10240,
      "model_type": "gemma3_text",
      "num_hidden_layers": 34,
      "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
      "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
  }
  packaged = to_flat(load_config(["config=base", "model_name=gemma3-4b"]))
  assert differing(family_of(values, "here").options(values, "here"), packaged) is None


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_every_packaged_model_can_be_written(name):
  config = load_config(["config=base", f"model_name={name}"])
  family, values = family_for(to_flat(config), config.batch.max_target_length)
  assert differing(family.options(json.loads(json.dumps(values)), name), to_flat(config)) is None
  parameters = build_model(config.model, config.batch.max_target_length).axes()
  dense = config.model.first_num_dense_layers
  assert family.table([".".join(path) for path in parameters], dense)


def test_a_model_of_no_family_says_what_stands_in_the_way():
  strange = dataclasses.asdict(tiny_config("final_logits_soft_cap=3", "use_qk_norm=true"))
  with pytest.raises(UserError) as caught:
    family_for(strange, 128)
  lines = str(caught.value).splitlines()
  assert len(lines) == 1 + len(FAMILIES)
  assert lines[4] == (
    "final_logits_soft_cap=3.0 cannot be expressed in the config.json of a model of type qwen3, "
    "which "
    "computes as final_logits_soft_cap=0.0 does"
  )


GEMMA3_4B = {"rope_linear_scaling_factor": 8.0, "local_rope_max_timescale": 10_000}


@pytest.mark.parametrize(
  ("change", "key"),
  [
    ({"sliding_window_size": 0}, None),
    ({"sliding_window_size": 0, "local_rope_max_timescale": -1}, None),
    ({"layer_types": ()}, None),
    ({"layer_types": ("full_attention",)}, None),
    ({"local_rope_max_timescale": -1, "rope_linear_scaling_factor": 1.0}, None),
    # Then the layers of the window would be scaled too.
    ({"local_rope_max_timescale": -1}, "local_rope_max_timescale"),
    ({"rope_type": "llama3.1"}, "rope_linear_scaling_factor"),
    ({"use_qk_norm": False}, "use_qk_norm"),
  ],
)
def test_what_gemma_3_can_say(change, key):
  packaged = to_flat(load_config(["config=base", "model_name=gemma3-4b"]))
  assert packaged | GEMMA3_4B == packaged
  if key is None:
    values = GEMMA3.config_json(packaged | change, 128)
    assert differing(GEMMA3.options(values, "here"), packaged | change) is None
  else:
    with pytest.raises(UserError, match=f"^{key}=.* cannot be expressed"):
      GEMMA3.config_json(packaged | change, 128)


def test_a_parameter_without_a_tensor_is_named():
  with pytest.raises(UserError, match=r"type llama has no tensor for layers.mlp.up.lora_a, which"):
    LLAMA.table(["embedding", "layers.mlp.up.lora_a"])


# --- tensors --------------------------------------------------------------------------------------


def test_names_of_older_and_larger_files_are_those_of_the_table():
  assert GPT2.table_name("h.3.attn.c_attn.weight") == "transformer.h.3.attn.c_attn.weight"
  assert GPT2.table_name("h.3.attn.bias") is None
  assert GPT2.table_name("transformer.h.3.attn.masked_bias") is None
  assert LLAMA.table_name("model.layers.3.self_attn.rotary_emb.inv_freq") is None
  assert GEMMA3.table_name("language_model.model.norm.weight") == "model.norm.weight"
  assert GEMMA3.table_name("vision_tower.vision_model.head.weight") is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tables_name_nothing_twice(family):
  # First layers without experts have the names of others, and numbers of their own.
  names = [(each.name, each.parameters[0].startswith("dense_")) for each in family.tensors]
  paths = [path for tensor in family.tensors for path in tensor.parameters]
  assert len(set(names)) == len(names)
  assert len(set(paths)) == len(paths)


def test_a_fused_matrix_comes_apart_and_together_again():
  tensor = next(each for each in GPT2.tensors if len(each.parameters) == 3 and each.in_dims)
  shapes = [(8, 2, 4)] * 3
  theirs = np.arange(8 * 24.0).reshape(tensor.shape(shapes))
  query, key, value = tensor.ours(theirs, shapes)
  assert (query[1, 1, 2], key[1, 1, 2], value[1, 1, 2]) == (24 + 6, 24 + 8 + 6, 24 + 16 + 6)
  np.testing.assert_array_equal(tensor.theirs([query, key, value]), theirs)


# --- keys -----------------------------------------------------------------------------------------

HOW_COMPUTED = {"model_name", "init_weights_seed", "attention"} | {
  *("scan_layers", "remat_policy", "context_parallel_strategy", "context_parallel_load_balance"),
  *("num_vocab_tiling", "z_loss_multiplier"),
  *("lora_rank", "lora_alpha", "lora_targets"),
  *(
    "routed_bias_update_rate",
    "load_balance_loss_weight",
    "load_balance_loss_type",
    "router_z_loss_weight",
  ),
  *NAMED,
}
"""Keys of the model section that no config.json has: of how a model is trained and computed."""


def test_every_key_of_the_model_is_known_here():
  assert set(declared(ModelConfig)) == {*SHAPE, *PLAIN} | HOW_COMPUTED


def test_without_a_model_the_options_are_off():
  base = to_flat(load_config(["config=base"]))
  assert {key: base[key] for key in PLAIN} == PLAIN
