"""The keys of our configuration that say what a model computes, and when two models are the same.

`tests/test_hugging_face.py` holds them together with config/schema.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SHAPE = (
  "vocab_size",
  "base_emb_dim",
  "base_num_decoder_layers",
  "base_num_query_heads",
  "base_num_kv_heads",
  "head_dim",
  "base_mlp_dim",
)
"""The sizes: every family gives them."""

PLAIN: Mapping[str, Any] = {
  "decoder_block": "transformer",
  "mlp_activation": "swiglu",
  "normalization": "rmsnorm",
  "normalization_layer_epsilon": 1e-5,
  "use_pre_norm": True,
  "use_post_attn_norm": False,
  "use_post_ffw_norm": False,
  "position_embedding": "rope",
  "max_position_embeddings": -1,
  "rope_type": "default",
  "rope_max_timescale": 10_000,
  "local_rope_max_timescale": -1,
  "rope_linear_scaling_factor": 1.0,
  "rope_factor": 1.0,
  "rope_low_freq_factor": 1.0,
  "rope_high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
  "sliding_window_size": 0,
  "layer_types": (),
  "query_pre_attn_scalar": 0,
  "attn_logits_soft_cap": 0.0,
  "final_logits_soft_cap": 0.0,
  "scale_embedding": False,
  "logits_via_embedding": False,
  "use_qk_norm": False,
  "qk_norm_across_heads": False,
  "attention_qkv_bias": False,
  "attention_out_bias": False,
  "mlp_bias": False,
  "dropout_rate": 0.0,
}
"""The other keys, as Llama has them: a family names only those of its own that differ."""

_ROPE = [*(key for key in PLAIN if "rope_" in key), "original_max_position_embeddings"]
_SCALING = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor")
_TRAINING_ONLY = ("dropout_rate",)


def layer_types(pattern: Sequence[str], num_layers: int) -> tuple[str, ...]:
  """Returns the kind of every layer: the pattern repeated; without one all are alike."""
  return tuple(pattern[layer % len(pattern)] for layer in range(num_layers)) if pattern else ()


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
  """Returns the shortest pattern whose repetition gives these layers."""
  return next(
    tuple(kinds[:length])
    for length in range(1, len(kinds) + 1)
    if all(kind == kinds[layer % length] for layer, kind in enumerate(kinds))
  )


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[str, Any] | None:
  """Returns the first key, and its value on the left, in which two models compute differently; or
  None."""
  one, other = _computed(left), _computed(right)
  return next(((key, left[key]) for key in one if one[key] != other[key]), None)


def _computed(model: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys that matter, in one spelling; the others as in PLAIN."""
  keys = {key: model[key] for key in (*SHAPE, *PLAIN)}
  kinds = shortest_pattern(
    layer_types(keys["layer_types"], keys["base_num_decoder_layers"]) or ("sliding_attention",)
  )
  if not keys["sliding_window_size"] or kinds == ("full_attention",):
    kinds, keys["sliding_window_size"] = ("full_attention",), 0
  without = list(_TRAINING_ONLY)
  # With a scaling, which those of the window never have, the same timescale is not the same.
  is_scaled = (keys["rope_type"], keys["rope_linear_scaling_factor"]) != ("default", 1)
  is_same = keys["local_rope_max_timescale"] == keys["rope_max_timescale"] and not is_scaled
  if kinds == ("full_attention",) or is_same:
    without += ["local_rope_max_timescale"]
  if keys["position_embedding"] != "rope":
    without += _ROPE
  else:
    # How far the model was made to see changes nothing that it computes.
    without += ["max_position_embeddings"]
  if keys["rope_type"] == "default":
    without += [*_SCALING, "original_max_position_embeddings"]
  if not keys["use_qk_norm"]:
    without += ["qk_norm_across_heads"]
  if keys["query_pre_attn_scalar"] == keys["head_dim"]:
    without += ["query_pre_attn_scalar"]
  return {**keys, "layer_types": kinds, **{key: PLAIN[key] for key in without}}
