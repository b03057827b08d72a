"""Writes tests/golden_logits.json: logits of tiny GPT-2, Llama, Mistral and Qwen 3 models.

The models are those of Hugging Face transformers, built from their configuration alone; nothing is
downloaded. tests/test_model_golden.py holds maxbatch's transformer to what they compute.

    pip install torch==2.13.0 transformers==5.23.0
    PYTHONPATH=tests python scripts/make_golden_logits.py
"""

# Torch and transformers are not installed where maxbatch is.
# pyright: reportMissingImports=false

import json

import numpy as np
import torch
import transformers
from golden_models import ENTRIES, GOLDEN_FILE, POSITIONS, SIZES, TOKENS_T, weight

# Where the parameters of a layer lie in maxbatch, by their name in transformers.
LLAMA_LAYER = {
  "input_layernorm.weight": "attention_norm.scale",
  "self_attn.q_proj.weight": "attention.query.kernel",
  "self_attn.k_proj.weight": "attention.key.kernel",
  "self_attn.v_proj.weight": "attention.value.kernel",
  "self_attn.o_proj.weight": "attention.out.kernel",
  "self_attn.q_norm.weight": "attention.query_norm.scale",
  "self_attn.k_norm.weight": "attention.key_norm.scale",
  "post_attention_layernorm.weight": "mlp_norm.scale",
  "mlp.gate_proj.weight": "mlp.gate.kernel",
  "mlp.up_proj.weight": "mlp.up.kernel",
  "mlp.down_proj.weight": "mlp.down.kernel",
}
GPT2_LAYER = {"ln_1": "attention_norm", "attn.c_proj": "attention.out", "ln_2": "mlp_norm"}
GPT2_LAYER |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
OUTSIDE = {
  "model.embed_tokens.weight": "embedding",
  "model.norm.weight": "final_norm.scale",
  "lm_head.weight": "head",
  "transformer.wte.weight": "embedding",
  "transformer.wpe.weight": "position_embedding",
  "transformer.ln_f.weight": "final_norm.scale",
  "transformer.ln_f.bias": "final_norm.bias",
}


def llama_like(sizes: dict[str, int], theta: float, epsilon: float, **more) -> dict:
  """Arguments of the configurations of the Llama family, with published values where not a size."""
  return {
    "vocab_size": sizes["vocab_size"],
    "hidden_size": sizes["base_emb_dim"],
    "intermediate_size": sizes["base_mlp_dim"],
    "num_hidden_layers": sizes["base_num_decoder_layers"],
    "num_attention_heads": sizes["base_num_query_heads"],
    "num_key_value_heads": sizes["base_num_kv_heads"],
    "head_dim": sizes["head_dim"],
    "max_position_embeddings": sizes["max_target_length"],
    "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    "rms_norm_eps": epsilon,
  } | more


def configuration(name: str):
  """The shrunk model's configuration in transformers."""
  sizes = SIZES[name]
  if name == "gpt2-small":
    return transformers.GPT2Config(
      vocab_size=sizes["vocab_size"],
      n_positions=sizes["max_target_length"],
      n_embd=sizes["base_emb_dim"],
      n_layer=sizes["base_num_decoder_layers"],
      n_head=sizes["base_num_query_heads"],
      n_inner=sizes["base_mlp_dim"],
    )
  if name == "mistral-7b":
    window = sizes["sliding_window_size"]
    return transformers.MistralConfig(**llama_like(sizes, 1e4, 1e-5, sliding_window=window))
  if name == "qwen3-0.6b":
    return transformers.Qwen3Config(**llama_like(sizes, 1e6, 1e-6, tie_word_embeddings=True))
  theta = {"llama2-7b": 1e4, "llama3-8b": 5e5}[name]
  return transformers.LlamaConfig(**llama_like(sizes, theta, 1e-5))


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """The parameter called `name` in transformers, from the formula of maxbatch's parameters."""
  if name in OUTSIDE:
    return drawn(OUTSIDE[name], 0, shape, turned=name == "lm_head.weight")
  _, _, layer, rest = name.split(".", 3)
  if name.startswith("model."):
    return drawn(f"layers.{LLAMA_LAYER[rest]}", int(layer), shape, turned=True)
  module, _, kind = rest.rpartition(".")
  if kind == "weight":
    kind = "scale" if module.startswith("ln") else "kernel"
  if module != "attn.c_attn":
    return drawn(f"layers.{GPT2_LAYER[module]}.{kind}", int(layer), shape)
  # GPT-2 keeps the matrices of query, key and value side by side.
  third = (*shape[:-1], shape[-1] // 3)
  paths = [f"layers.attention.{part}.{kind}" for part in ("query", "key", "value")]
  return np.concatenate([drawn(path, int(layer), third) for path in paths], axis=-1)


def drawn(path: str, layer: int, shape: tuple[int, ...], turned: bool = False) -> np.ndarray:
  """The formula's values in `shape`; turned: a matrix kept as (out, in), unlike in maxbatch."""
  flat = weight(path, layer, int(np.prod(shape)))
  return flat.reshape(shape[::-1]).T if turned else flat.reshape(shape)


def golden(name: str) -> dict[str, list]:
  """Some logits of the model called `name`, and log Z of the same positions."""
  model = transformers.AutoModelForCausalLM.from_config(
    configuration(name), attn_implementation="eager", dtype=torch.float64
  ).eval()
  with torch.no_grad():
    for parameter_name, parameter in model.named_parameters():
      parameter.copy_(torch.from_numpy(value(parameter_name, tuple(parameter.shape)).copy()))
    logits_TV = model(torch.from_numpy(TOKENS_T)[None]).logits[0, POSITIONS]
  parts = {"logits": logits_TV[:, ENTRIES], "log_z": torch.logsumexp(logits_TV, -1)}
  return {key: np.round(part.numpy(), 8).tolist() for key, part in parts.items()}


if __name__ == "__main__":
  lines = [f"{json.dumps(name)}: {json.dumps(golden(name))}" for name in SIZES]
  GOLDEN_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
