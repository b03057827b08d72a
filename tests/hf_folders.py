"""Small Hugging Face folders, written and read by the safetensors library alone."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

D, V, L, F, N, K, H = 16, 40, 2, 24, 4, 2, 4

CONFIG: dict[str, Any] = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": V,
  "hidden_size": D,
  "intermediate_size": F,
  "num_hidden_layers": L,
  "num_attention_heads": N,
  "num_key_value_heads": K,
  "head_dim": H,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "tie_word_embeddings": False,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "torch_dtype": "float32",
}

BESIDE = {
  "generation_config.json": '{"eos_token_id": [2, 3], "temperature": 0.6}',
  "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
  "special_tokens_map.json": "{}",
}


def llama_tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
  """The tensors of a tiny Llama, whose values all differ."""
  shapes = {
    "model.embed_tokens.weight": (V, D),
    "model.norm.weight": (D,),
    "lm_head.weight": (V, D),
  }
  for layer in range(L):
    shapes |= {
      f"model.layers.{layer}.{name}.weight": shape
      for name, shape in {
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
      }.items()
    }
  generator = np.random.default_rng(0)
  return {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_folder(
  folder: pathlib.Path,
  tensors: dict[str, np.ndarray] | None = None,
  *,
  num_files: int = 1,
  **config: Any,
) -> pathlib.Path:
  """A model's folder as it is published, in one file or in several with an index."""
  folder.mkdir()
  tensors = llama_tensors() if tensors is None else tensors
  (folder / "config.json").write_text(json.dumps(CONFIG | config))
  for name, text in BESIDE.items():
    (folder / name).write_text(text)
  names = list(tensors)
  if num_files == 1:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
  weight_map = {}
  for number in range(num_files):
    file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
    inside = names[number::num_files]
    save_file({name: tensors[name] for name in inside}, folder / file, {"format": "pt"})
    weight_map |= dict.fromkeys(inside, file)
  index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return folder


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """All tensors of a folder."""
  results: dict[str, np.ndarray] = {}
  for file in sorted(folder.glob("*.safetensors")):
    with safe_open(file, framework="numpy") as opened:
      assert opened.metadata() == {"format": "pt"}
      results |= opened.get_tensors()
  return results


def assert_same_bits(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
  """Same names, shapes, dtypes and bits."""
  assert results.keys() == expected.keys()
  for name, tensor in expected.items():
    assert (results[name].dtype, results[name].shape) == (tensor.dtype, tensor.shape), name
    assert results[name].tobytes() == tensor.tobytes(), name


BFLOAT16 = ml_dtypes.bfloat16
