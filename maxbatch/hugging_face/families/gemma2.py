"""Gemma 2: norms before and after, soft caps, scaled embeddings, a window in every second layer."""

from typing import Any

from maxbatch.hugging_face.config_json import ConfigJson
from maxbatch.hugging_face.families.llama import OUTSIDE, PROJECTIONS, SAME
from maxbatch.hugging_face.family import Family, Ours, Part
from maxbatch.hugging_face.parts import (
  BIASES,
  HEADS,
  ROPE,
  read_layer_types,
  written_layer_types,
)
from maxbatch.hugging_face.tensors import vector


def alternating(default_pattern: int) -> Part:
  """Windows in all layers but every n-th, n given by sliding_window_pattern where it may be."""

  def read(theirs: ConfigJson) -> dict[str, Any]:
    given = theirs["sliding_window_pattern"]
    pattern = default_pattern if given is None else theirs.integer("sliding_window_pattern")
    layers = range(1, theirs.num_layers + 1)
    kinds = ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]
    return read_layer_types(theirs, theirs["sliding_window"], kinds)

  def write(ours: Ours) -> dict[str, Any]:
    return {
      # transformers wants a window even where no layer has it.
      "sliding_window": ours["sliding_window_size"] or GEMMA_DEFAULTS["sliding_window"],
      "layer_types": written_layer_types(ours),
    }

  return Part(read, write)


def soft_cap(theirs_key: str, ours_key: str) -> Part:
  """A soft cap: null is none."""
  return Part(
    lambda theirs: {ours_key: theirs[theirs_key] or 0.0},
    lambda ours: {theirs_key: ours[ours_key] or None},
  )


QUERY_SCALE = Part(
  lambda theirs: {"query_pre_attn_scalar": theirs["query_pre_attn_scalar"]},
  lambda ours: {"query_pre_attn_scalar": ours["query_pre_attn_scalar"] or ours["head_dim"]},
)

FINAL_CAP = soft_cap("final_logit_softcapping", "final_logits_soft_cap")

GEMMA = {
  "normalization": "zero_centered_rmsnorm",
  "use_post_attn_norm": True,
  "use_post_ffw_norm": True,
  "scale_embedding": True,
}

ACTIVATION = {
  "hidden_activation": ("mlp_activation", {"gelu_pytorch_tanh": "geglu", "silu": "swiglu"})
}

GEMMA_DEFAULTS = {
  "head_dim": 256,
  "num_key_value_heads": 4,
  "hidden_activation": "gelu_pytorch_tanh",
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": True,
  "attention_bias": False,
  "attention_dropout": 0.0,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
}

TENSORS = (
  *OUTSIDE,
  vector("model.layers.{}.input_layernorm.weight", "layers.attention_norm.scale"),
  vector("model.layers.{}.post_attention_layernorm.weight", "layers.post_attention_norm.scale"),
  vector("model.layers.{}.pre_feedforward_layernorm.weight", "layers.mlp_norm.scale"),
  vector("model.layers.{}.post_feedforward_layernorm.weight", "layers.post_mlp_norm.scale"),
  *PROJECTIONS,
)

# hidden_act is what transformers does not look at.
HARMLESS = frozenset({"hidden_act"})

GEMMA2 = Family(
  model_types=("gemma2",),
  architectures=("Gemma2ForCausalLM",),
  same=SAME,
  constants=GEMMA,
  choices=ACTIVATION,
  fixed={
    "attention_dropout": 0.0,
    "use_bidirectional_attention": False,
    "sliding_window_pattern": 2,
  },
  parts=(
    HEADS,
    ROPE,
    BIASES,
    QUERY_SCALE,
    alternating(2),
    FINAL_CAP,
    soft_cap("attn_logit_softcapping", "attn_logits_soft_cap"),
  ),
  harmless=HARMLESS,
  defaults={
    **GEMMA_DEFAULTS,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
  },
  tensors=TENSORS,
)
