"""Families of Hugging Face models: their options in both directions, and what they compute.

Tiny random models of transformers, their weights taken through the family's own table, against ours:
logits, loss and gradients in float32. B rows, T tokens, V vocabulary.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from late_imports import WhenUsed

from maxbatch.config.load import load_config
from maxbatch.config.schema import Config, to_flat
from maxbatch.data.rows import Rows
from maxbatch.hugging_face import registry
from maxbatch.hugging_face.family import Family
from maxbatch.hugging_face.registry import read_folder
from maxbatch.models.layers import hidden_of
from maxbatch.models.registry import Model, Parameters, build_model
from maxbatch.training.loss import loss_sum

torch = WhenUsed("torch")
transformers = WhenUsed("transformers")

B, T = 2, 24
USED_TOKENS = 61
SIZES = {
  # More than there are tokens, as in models whose vocabulary is padded.
  "vocab_size": 67,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 16,
  "rms_norm_eps": 1e-3,
}
# torch gives the embedding of padding no gradient.
TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0} | {
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0, "truncate": False} | {
  "beta_fast": 2.0,
  "beta_slow": 0.5,
  "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}

DEEPSEEK = {
  **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
  **{"first_k_dense_replace": 1, "num_hidden_layers": 3, "num_key_value_heads": 4},
  **{"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5},
  **{"rms_norm_eps": 1e-6, "routed_scaling_factor": 2.0},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
  "llama, biases": ("llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
  "mistral": ("mistral", {"sliding_window": 5, "head_dim": 10}),
  "qwen 2.5": (
    "qwen2",
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
  ),
  "qwen 3": ("qwen3", {"head_dim": 10, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
  "gemma 2": (
    "gemma2",
    {"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 14}
    # Small, so that they matter.
    | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "num_hidden_layers": 3},
  ),
  "gemma 3": (
    "gemma3_text",
    {"head_dim": 10, "sliding_window": 5, "sliding_window_pattern": 2, "num_hidden_layers": 3}
    | {
      "rope_parameters": {
        "full_attention": LINEAR,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
      }
    },
  ),
  "olmo 2": ("olmo2", {}),
  "mixtral": ("mixtral", {"num_local_experts": 5, "head_dim": 10, "sliding_window": 5}),
  "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "attention_bias": True}),
  "qwen 3 moe": (
    "qwen3_moe",
    {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
    | {"head_dim": 10, "norm_topk_prob": True},
  ),
  "gpt-oss": (
    "gpt_oss",
    {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 10, "sliding_window": 5}
    # Small, so that they matter.
    | {"swiglu_limit": 0.5, "swiglu_alpha": 2.0, "num_hidden_layers": 3, "rope_parameters": YARN},
  ),
  "deepseek v2": (
    "deepseek_v2",
    {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2, "attention_bias": True}
    | {"rope_parameters": YARN | {"truncate": True, "mscale": 0.7, "mscale_all_dim": 0.7}},
  ),
  "deepseek v3": (
    "deepseek_v3",
    {**DEEPSEEK, "q_lora_rank": 14, "n_shared_experts": 1, "n_group": 3, "topk_group": 2},
  ),
  "gpt2": ("gpt2", {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 32}),
}
"""Every family, and every option of ours, of which transformers makes a random model."""

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
EXAMPLE, ITS_MODELS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
exec(ITS_MODELS, page := {})
MODELS |= page["MODELS"]


class Pair(NamedTuple):
  """A model of transformers and what it is here."""

  theirs: Any
  family: Family
  config: Config
  model: Model


@pytest.fixture(scope="module", autouse=True)
def the_pages_family():
  """The family that the page adds, registered."""
  exec(EXAMPLE, written := {})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(registry, "FAMILIES", (*registry.FAMILIES, written["PHI3"]))
    yield


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory) -> Pair:
  kind, options = MODELS[request.param]
  sizes = SIZES if kind != "gpt2" else {"vocab_size": 67}
  theirs = random_model(transformers.AutoConfig.for_model(kind, **sizes | TOKENS | options))
  folder = tmp_path_factory.mktemp(kind)
  theirs.config.save_pretrained(folder)
  config = load_config(["config=base", f"model_name={folder}", f"max_target_length={T}"])
  return Pair(theirs, read_folder(folder)[0], config, build_model(config.model, T))


def random_model(config: Any) -> Any:
  """No weight is zero or one, and none so small that its part of the model does not show."""
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
  with torch.no_grad():
    biases = [each for name, each in model.named_buffers() if "correction_bias" in name]
    for weight in [*model.parameters(), *biases]:
      weight += 0.3 * torch.randn_like(weight)
  return model.eval()


def taken(pair: Pair, tensors: dict[str, np.ndarray]) -> Parameters:
  """Our parameters, of tensors by their names, through the family's table; all of them are used."""
  shapes = flat(pair.model.shapes())
  result = {}
  tensors = as_in_files(tensors, pair.family)
  given = {pair.family.table_name(name): tensor for name, tensor in tensors.items()}
  for tensor in pair.family.table(shapes, pair.config.model.first_num_dense_layers):
    stacked = shapes[tensor.parameters[0]].shape[: tensor.stacked_dims]
    ours = [shapes[path].shape[tensor.stacked_dims :] for path in tensor.parameters]
    each = [given.pop(name) for name, _ in tensor.names(stacked)]
    assert {theirs.shape for theirs in each} == {tensor.shape(ours)}
    parts = [tensor.ours(theirs, ours) for theirs in each]
    for theirs, split in zip(each, parts, strict=True):
      np.testing.assert_array_equal(tensor.theirs(split), theirs)
    for path, values in zip(tensor.parameters, zip(*parts, strict=True), strict=True):
      result[path] = np.stack(values).reshape(shapes[path].shape)
  tied = {"lm_head.weight"} if pair.config.model.logits_via_embedding else set()
  assert set(given) - {None} <= tied
  return unflatten_dict(result, sep=".")


def as_in_files(tensors: dict[str, np.ndarray], family: Family) -> dict[str, np.ndarray]:
  """transformers has one array for the matrices of all experts, and files one for each."""
  names = ("w1", "w3", "w2") if family.name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
  result = {}
  for name, tensor in tensors.items():
    if family.name == "mixtral":
      name = name.replace(".mlp.", ".block_sparse_moe.")
    prefix, is_expert, fused = name.partition(".experts.")
    if not is_expert or family.name == "gpt_oss":
      result[name] = tensor
      continue
    for expert, matrix in enumerate(tensor):
      parts = np.split(matrix, 2) if fused == "gate_up_proj" else [matrix]
      for part, own in zip(parts, names[:2] if len(parts) == 2 else names[2:], strict=True):
        result[f"{prefix}.experts.{expert}.{own}.weight"] = part
  return result


def flat(tree: Parameters) -> dict[str, Any]:
  return flatten_dict(tree, sep=".")


def tokens(length: int = T) -> np.ndarray:
  return np.random.default_rng(0).integers(0, USED_TOKENS, (B, length + 1)).astype(np.int32)


def computed(pair: Pair, parameters: Parameters) -> tuple[np.ndarray, float, Parameters]:
  """Our logits, mean loss, and its gradients."""
  ids = jnp.asarray(tokens())
  rows = Rows(ids[:, :-1], ids[:, 1:], jnp.full((B, T), 1 / (B * T)), jnp.arange(B))

  @jax.jit
  def run(parameters: Parameters) -> Any:
    bound = pair.model.bind(parameters)
    logits_BTV = hidden_of(bound(rows, None)) @ bound.output_matrix()
    return logits_BTV, jax.value_and_grad(
      lambda parameters: loss_sum(pair.model, parameters, rows, None)
    )(parameters)

  logits_BTV, (loss, gradients) = run(parameters)
  cap = pair.config.model.final_logits_soft_cap
  logits_BTV = cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV
  return np.asarray(logits_BTV), float(loss), gradients


def test_a_family_computes_what_transformers_computes(pair):
  given = {name: tensor.numpy() for name, tensor in pair.theirs.state_dict().items()}
  logits_BTV, loss, gradients = computed(pair, taken(pair, given))
  ids = torch.asarray(tokens(), dtype=torch.long)
  result = pair.theirs(ids[:, :-1]).logits
  np.testing.assert_allclose(logits_BTV, result.detach().numpy(), rtol=0, atol=1e-4)
  expected = torch.nn.functional.cross_entropy(result.flatten(0, 1), ids[:, 1:].flatten())
  expected.backward()
  assert loss == pytest.approx(expected.item(), abs=1e-5)
  slopes = {name: np.zeros_like(buffer) for name, buffer in given.items()}  # Not of buffers.
  slopes |= {name: weight.grad.numpy() for name, weight in pair.theirs.named_parameters()}
  for path, theirs in flat(taken(pair, slopes)).items():
    np.testing.assert_allclose(flat(gradients)[path], theirs, rtol=0, atol=1e-4, err_msg=path)


def test_transformers_reads_what_is_written(pair, tmp_path: Path):
  values = pair.family.config_json(to_flat(pair.config), T)
  (tmp_path / "config.json").write_text(json.dumps(values | TOKENS))
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  again = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
  again.load_state_dict(pair.theirs.state_dict())
  ids = torch.asarray(tokens(), dtype=torch.long)
  with torch.no_grad():
    assert torch.equal(again(ids).logits, pair.theirs(ids).logits)
