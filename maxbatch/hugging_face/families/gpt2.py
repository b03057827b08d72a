"""GPT-2: learned positions, LayerNorm, and query, key and value in one matrix."""

from typing import Any

from maxbatch.hugging_face.family import Family, Part, linear, matrix, vector
from maxbatch.hugging_face.model_keys import ConfigJson, words


def _read_sizes(theirs: ConfigJson) -> dict[str, Any]:
  width, heads = theirs.integer("n_embd"), theirs.integer("n_head")
  sizes = {"base_num_kv_heads": heads, "head_dim": width // heads}
  return sizes | {"base_mlp_dim": theirs["n_inner"] or 4 * width}


def _read_dropout(theirs: ConfigJson) -> dict[str, Any]:
  """Reads training's dropout; that of the attention weights has no counterpart here."""
  theirs["attn_pdrop"]
  if theirs["embd_pdrop"] != theirs["resid_pdrop"]:
    raise theirs.refusal("embd_pdrop", "must be the same as resid_pdrop, as in dropout_rate")
  return {"dropout_rate": theirs["resid_pdrop"]}


_QKV = tuple(f"layers.attention.{name}" for name in ("query", "key", "value"))

GPT2 = Family(
  model_types=("gpt2",),
  architectures=("GPT2LMHeadModel",),
  same={
    "vocab_size": "vocab_size",
    "n_embd": "base_emb_dim",
    "n_layer": "base_num_decoder_layers",
    "n_head": "base_num_query_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "normalization_layer_epsilon",
    "tie_word_embeddings": "logits_via_embedding",
  },
  constants={
    "normalization": "layernorm",
    "position_embedding": "learned",
    "attention_qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
  },
  choices={
    "activation_function": ("mlp_activation", {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"})
  },
  fixed={
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
  },
  parts=(
    Part(_read_sizes, lambda ours: {"n_inner": ours["base_mlp_dim"]}),
    Part(
      _read_dropout,
      lambda ours: (
        dict.fromkeys(("resid_pdrop", "embd_pdrop"), ours["dropout_rate"]) | {"attn_pdrop": 0.0}
      ),
    ),
  ),
  harmless=words(
    """n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout reorder_and_upcast_attn"""
  ),
  defaults={
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "tie_word_embeddings": True,
  },
  tensors=(
    matrix("transformer.wte.weight", "embedding"),
    matrix("transformer.wpe.weight", "position_embedding"),
    vector("transformer.ln_f.weight", "final_norm.scale"),
    vector("transformer.ln_f.bias", "final_norm.bias"),
    linear("lm_head.weight", "head"),
    vector("transformer.h.{}.ln_1.weight", "layers.attention_norm.scale"),
    vector("transformer.h.{}.ln_1.bias", "layers.attention_norm.bias"),
    matrix("transformer.h.{}.attn.c_attn.weight", *(f"{path}.kernel" for path in _QKV)),
    vector("transformer.h.{}.attn.c_attn.bias", *(f"{path}.bias" for path in _QKV)),
    matrix("transformer.h.{}.attn.c_proj.weight", "layers.attention.out.kernel", in_dims=2),
    vector("transformer.h.{}.attn.c_proj.bias", "layers.attention.out.bias"),
    vector("transformer.h.{}.ln_2.weight", "layers.mlp_norm.scale"),
    vector("transformer.h.{}.ln_2.bias", "layers.mlp_norm.bias"),
    matrix("transformer.h.{}.mlp.c_fc.weight", "layers.mlp.up.kernel"),
    vector("transformer.h.{}.mlp.c_fc.bias", "layers.mlp.up.bias"),
    matrix("transformer.h.{}.mlp.c_proj.weight", "layers.mlp.down.kernel"),
    vector("transformer.h.{}.mlp.c_proj.bias", "layers.mlp.down.bias"),
  ),
  # The published files hold the model without its head, and the causal masks of the attention.
  other_names={name: f"transformer.{name}" for name in ("wte.", "wpe.", "ln_f.", "h.")},
  not_parameters=(".attn.bias", ".attn.masked_bias"),
)
