"""Llama 2, 3, 3.1, 3.2, SmolLM, and families that differ in a few keys: Mistral, Qwen 2 and 3, OLMo 2."""

from typing import Any

from maxbatch.hugging_face.family import (
  BIASES,
  HEADS,
  Family,
  Ours,
  Part,
  linear,
  matrix,
  read_layer_types,
  vector,
  written_layer_types,
)
from maxbatch.hugging_face.model_keys import ConfigJson
from maxbatch.hugging_face.positions import ROPE

SAME = {
  "vocab_size": "vocab_size",
  "hidden_size": "base_emb_dim",
  "intermediate_size": "base_mlp_dim",
  "num_hidden_layers": "base_num_decoder_layers",
  "num_attention_heads": "base_num_query_heads",
  "rms_norm_eps": "normalization_layer_epsilon",
  "max_position_embeddings": "max_position_embeddings",
  "tie_word_embeddings": "logits_via_embedding",
}

ACTIVATION = {"hidden_act": ("mlp_activation", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"})}

OUTSIDE = (
  matrix("model.embed_tokens.weight", "embedding"),
  vector("model.norm.weight", "final_norm.scale"),
  linear("lm_head.weight", "head"),
)

PROJECTIONS = (
  linear("model.layers.{}.self_attn.q_proj.weight", "layers.attention.query.kernel"),
  linear("model.layers.{}.self_attn.k_proj.weight", "layers.attention.key.kernel"),
  linear("model.layers.{}.self_attn.v_proj.weight", "layers.attention.value.kernel"),
  linear("model.layers.{}.self_attn.o_proj.weight", "layers.attention.out.kernel", in_dims=2),
  vector("model.layers.{}.self_attn.q_proj.bias", "layers.attention.query.bias"),
  vector("model.layers.{}.self_attn.k_proj.bias", "layers.attention.key.bias"),
  vector("model.layers.{}.self_attn.v_proj.bias", "layers.attention.value.bias"),
  vector("model.layers.{}.self_attn.o_proj.bias", "layers.attention.out.bias"),
  linear("model.layers.{}.mlp.gate_proj.weight", "layers.mlp.gate.kernel"),
  linear("model.layers.{}.mlp.up_proj.weight", "layers.mlp.up.kernel"),
  linear("model.layers.{}.mlp.down_proj.weight", "layers.mlp.down.kernel"),
  vector("model.layers.{}.mlp.gate_proj.bias", "layers.mlp.gate.bias"),
  vector("model.layers.{}.mlp.up_proj.bias", "layers.mlp.up.bias"),
  vector("model.layers.{}.mlp.down_proj.bias", "layers.mlp.down.bias"),
)

QK_NORMS = (
  vector("model.layers.{}.self_attn.q_norm.weight", "layers.attention.query_norm.scale"),
  vector("model.layers.{}.self_attn.k_norm.weight", "layers.attention.key_norm.scale"),
)

PRE_NORMS = (
  vector("model.layers.{}.input_layernorm.weight", "layers.attention_norm.scale"),
  vector("model.layers.{}.post_attention_layernorm.weight", "layers.mlp_norm.scale"),
)

TENSORS = (*OUTSIDE, *PRE_NORMS, *PROJECTIONS)

NOT_PARAMETERS = ("rotary_emb.inv_freq",)
"""Files of older versions of transformers hold the frequencies too."""


DEFAULTS = {
  "hidden_act": "silu",
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "rope_theta": 10_000.0,
  "attention_bias": False,
  "attention_dropout": 0.0,
}

LLAMA = Family(
  model_types=("llama",),
  architectures=("LlamaForCausalLM",),
  same={**SAME, "mlp_bias": "mlp_bias"},
  choices=ACTIVATION,
  # SmolLM's files say how their queries and keys are rotated: in halves, as all of Llama's.
  fixed={"attention_dropout": 0.0, "rope_interleaved": False},
  parts=(HEADS, ROPE, BIASES),
  harmless=frozenset({"is_llama_config"}),
  defaults={**DEFAULTS, "mlp_bias": False},
  tensors=TENSORS,
  not_parameters=NOT_PARAMETERS,
)


WINDOW = Part(
  lambda theirs: {"sliding_window_size": theirs["sliding_window"] or 0},
  lambda ours: {"sliding_window": ours["sliding_window_size"] or None},
)

MISTRAL = Family(
  model_types=("mistral",),
  architectures=("MistralForCausalLM",),
  same=SAME,
  choices=ACTIVATION,
  fixed={"attention_dropout": 0.0, "attention_bias": False},
  parts=(HEADS, ROPE, WINDOW),
  defaults={
    **DEFAULTS,
    "max_position_embeddings": 4096 * 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
  },
  tensors=TENSORS,
  not_parameters=NOT_PARAMETERS,
)


def _read_windows(theirs: ConfigJson) -> dict[str, Any]:
  """Reads the windows of the layers from max_window_layers on, if use_sliding_window says so."""
  first, window = theirs.integer("max_window_layers", 0), theirs["sliding_window"]
  if not theirs["use_sliding_window"]:
    window = None
  slides = [window is not None and i >= first for i in range(theirs.num_layers)]
  kinds = ["sliding_attention" if each else "full_attention" for each in slides]
  return read_layer_types(theirs, window, kinds)


def _write_windows(ours: Ours) -> dict[str, Any]:
  kinds = written_layer_types(ours)
  is_used = "sliding_attention" in kinds
  return {
    "use_sliding_window": is_used,
    "sliding_window": ours["sliding_window_size"] if is_used else None,
    "max_window_layers": kinds.index("sliding_attention") if is_used else len(kinds),
    "layer_types": kinds,
  }


WINDOWS = Part(_read_windows, _write_windows)

QWEN_DEFAULTS = {
  **DEFAULTS,
  "max_position_embeddings": 32768,
  "num_key_value_heads": 32,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
}

QWEN2 = Family(
  model_types=("qwen2",),
  architectures=("Qwen2ForCausalLM",),
  same=SAME,
  constants={"attention_qkv_bias": True},
  choices=ACTIVATION,
  # The biases are there whatever attention_bias says.
  fixed={"attention_dropout": 0.0, "attention_bias": False, "use_mrope": False},
  parts=(HEADS, ROPE, WINDOWS),
  defaults=QWEN_DEFAULTS,
  tensors=TENSORS,
  not_parameters=NOT_PARAMETERS,
)


QWEN3 = Family(
  model_types=("qwen3",),
  architectures=("Qwen3ForCausalLM",),
  same=SAME,
  constants={"use_qk_norm": True},
  choices=ACTIVATION,
  fixed={"attention_dropout": 0.0},
  parts=(HEADS, ROPE, WINDOWS, BIASES),
  defaults={**QWEN_DEFAULTS, "head_dim": 128},
  tensors=(*TENSORS, *QK_NORMS),
  not_parameters=NOT_PARAMETERS,
)


OLMO2 = Family(
  model_types=("olmo2",),
  architectures=("Olmo2ForCausalLM",),
  same=SAME,
  constants={
    "use_pre_norm": False,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "use_qk_norm": True,
    "qk_norm_across_heads": True,
  },
  choices=ACTIVATION,
  fixed={"attention_dropout": 0.0},
  parts=(HEADS, ROPE, BIASES),
  defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
  tensors=(
    *OUTSIDE,
    vector("model.layers.{}.post_attention_layernorm.weight", "layers.post_attention_norm.scale"),
    vector("model.layers.{}.post_feedforward_layernorm.weight", "layers.post_mlp_norm.scale"),
    *PROJECTIONS,
    *QK_NORMS,
  ),
)
