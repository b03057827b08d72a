"""Gemma 2: norms before and after, soft caps, scaled embeddings, a window in every second layer.

Gemma 3, the model of the text: normalized queries and keys instead of soft caps, a window in five of
six layers, and positions of their own in those.
"""

from typing import Any

from maxbatch.hugging_face.families.llama import OUTSIDE, PROJECTIONS, QK_NORMS, SAME
from maxbatch.hugging_face.family import (
  BIASES,
  HEADS,
  Family,
  Ours,
  Part,
  read_layer_types,
  vector,
  written_layer_types,
)
from maxbatch.hugging_face.model_keys import ConfigJson
from maxbatch.hugging_face.positions import ROPE, rope_scaling, written_scaling


def alternating(default_pattern: int) -> Part:
  """Puts windows in all layers but every n-th, n from sliding_window_pattern if given."""

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
  """Maps a soft cap; null is none."""
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


def _read_rope(theirs: ConfigJson) -> dict[str, Any]:
  """Reads the rope parameters of layers with a window, never scaled, and of the others.

  As keys beside each other, or, from transformers 5 on, all in `rope_parameters`.
  """
  base, local = theirs["rope_theta"], theirs["rope_local_base_freq"]
  new, scaling = theirs.mapping("rope_parameters"), theirs.mapping("rope_scaling")
  key = "rope_parameters" if new else "rope_scaling"
  kinds = [new.get(kind) or {} for kind in ("full_attention", "sliding_attention")]
  if not all(isinstance(each, dict) for each in kinds):
    raise theirs.refusal(key, "full_attention and sliding_attention must be objects")
  full = {"rope_theta": base, **(kinds[0] or scaling)}
  sliding = {"rope_theta": local, **kinds[1]}
  if rope_scaling(theirs, key, sliding):
    raise theirs.refusal(key, "the layers of sliding_attention have no scaling here")
  return {
    "rope_max_timescale": full["rope_theta"],
    "local_rope_max_timescale": sliding["rope_theta"],
    **rope_scaling(theirs, key, full),
  }


def _write_rope(ours: Ours) -> dict[str, Any]:
  base, local = ours["rope_max_timescale"], ours["local_rope_max_timescale"]
  return {
    "rope_theta": base,
    "rope_local_base_freq": base if local == -1 else local,
    "rope_scaling": written_scaling(ours) or None,
  }


GEMMA3 = Family(
  model_types=("gemma3_text", "gemma3"),
  architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
  same=SAME,
  constants={**GEMMA, "use_qk_norm": True},
  choices=ACTIVATION,
  # transformers reads attn_logit_softcapping, and then computes without it.
  fixed={
    "attention_dropout": 0.0,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
  },
  parts=(HEADS, Part(_read_rope, _write_rope), BIASES, QUERY_SCALE, alternating(6), FINAL_CAP),
  # transformers writes the latter beside the layer_types that it made of it.
  harmless=HARMLESS | {"_sliding_window_pattern"},
  # The published files leave out most of these.
  defaults={
    **GEMMA_DEFAULTS,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
  },
  text_key="text_config",
  tensors=(*TENSORS, *QK_NORMS),
  # Published with eyes: what they see with is left where it is.
  other_names={
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
  },
  not_parameters=("vision_tower.", "multi_modal_projector."),
)
