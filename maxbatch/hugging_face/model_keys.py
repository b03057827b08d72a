"""The keys of our configuration that say what a model computes, and when two models are the same.

`tests/test_hugging_face.py` holds them together with config/schema.py.

A config.json as a mapping that knows its file, the defaults behind it, and what nobody has read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxbatch.errors import UserError

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
  "mlp_activations_limit": 7.0,
  "swiglu_alpha": 1.702,
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
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "rope_truncate": True,
  "rope_attention_scaling": False,
  "rope_interleave": False,
  "attention_sink": False,
  "attention_type": "global",
  "q_lora_rank": 0,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "mscale": 1.0,
  "first_num_dense_layers": 0,
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
  "num_experts": 1,
  "num_experts_per_tok": 2,
  "base_moe_mlp_dim": -1,
  "shared_experts": 0,
  "routed_score_func": "softmax",
  "norm_topk_prob": True,
  "routed_scaling_factor": 1.0,
  "router_logit_bias": False,
  "routed_bias": False,
  "n_routing_groups": -1,
  "topk_routing_group": 1,
  "dropout_rate": 0.0,
}
"""The other keys, as Llama has them: a family names only those of its own that differ."""

_YARN = ("beta_fast", "beta_slow", "rope_truncate", "rope_attention_scaling")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATER = frozenset(
  {
    *(*_YARN, *_LATENT, "mscale", "attention_type", "first_num_dense_layers", "rope_interleave"),
    *("mlp_activations_limit", "swiglu_alpha", "router_logit_bias", "attention_sink"),
  }
)
"""Those that came after steps had been compiled whose digests are kept."""

_LONGER = ("rope_factor", "original_max_position_embeddings")
_LLAMA = ("rope_low_freq_factor", "rope_high_freq_factor")
_ROPE = sorted({*(key for key in PLAIN if "rope_" in key), *_LONGER, *_YARN})
_OF_EXPERTS = [
  *("num_experts_per_tok", "base_moe_mlp_dim", "shared_experts", "routed_score_func"),
  *("norm_topk_prob", "routed_scaling_factor", "routed_bias", "n_routing_groups"),
  *("topk_routing_group", "router_logit_bias", "first_num_dense_layers"),
]
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


def digested(model: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys by which a model is known again: later ones where they are in force."""
  # Steps that were compiled before there were experts are known again.
  unused = r".*(expert|rout|_moe_|topk).*" if model["num_experts"] == 1 else "-"
  return {
    key: model[key]
    for key in (*SHAPE, *PLAIN)
    if not re.fullmatch(unused, key) and not (key in _LATER and model[key] == PLAIN[key])
  }


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[str, Any] | None:
  """Returns the first key, and its left value, in which two models compute differently; or None."""
  one, other = _computed(left), _computed(right)
  return next(((key, left[key]) for key in one if one[key] != other[key]), None)


def _computed(model: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys that matter, in one spelling; the others as in PLAIN."""
  keys = {key: model[key] for key in (*SHAPE, *PLAIN)}
  kinds = layer_types(keys["layer_types"], keys["base_num_decoder_layers"])
  kinds = shortest_pattern(kinds or ("sliding_attention",))
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
    without += _LONGER
  without += [] if keys["rope_type"] == "llama3.1" else _LLAMA
  without += [] if keys["rope_type"] == "yarn" else _YARN
  if keys["num_experts"] == 1:
    without += _OF_EXPERTS
  else:
    if keys["base_moe_mlp_dim"] == -1:
      keys["base_moe_mlp_dim"] = keys["base_mlp_dim"]
    if not keys["first_num_dense_layers"]:
      # All layers are of experts, and no matrix has the width of the others.
      keys["base_mlp_dim"] = keys["base_moe_mlp_dim"]
  is_latent = keys["attention_type"] == "mla"
  without += [] if is_latent else _LATENT
  if is_latent:
    keys["head_dim"] = 0
  if not is_latent or keys["rope_type"] != "yarn":
    without += ["mscale"]
  if keys["mlp_activation"] != "clamped_swiglu":
    without += ["mlp_activations_limit", "swiglu_alpha"]
  if not keys["use_qk_norm"]:
    without += ["qk_norm_across_heads"]
  if keys["query_pre_attn_scalar"] == keys["head_dim"]:
    without += ["query_pre_attn_scalar"]
  return {**keys, "layer_types": kinds, **{key: PLAIN[key] for key in without}}


_LONGEST_VALUE = 100


def words(*lines: str) -> frozenset[str]:
  """Returns the words of some lines of text."""
  return frozenset(word for line in lines for word in line.split())


HARMLESS = words(
  """_name_or_path name_or_path architectures model_type transformers_version torch_dtype dtype
  use_cache cache_implementation initializer_range bos_token_id eos_token_id pad_token_id
  pretraining_tp id2label label2id num_labels task_specific_params tokenizer_class return_dict
  output_attentions output_hidden_states chunk_size_feed_forward problem_type is_encoder_decoder
  is_decoder torchscript attn_implementation _attn_implementation_autoset _num_labels
  transformers.js_config"""
)
"""Keys that no model computes with: of files, tokens, training and classes. In which precision the
weights are kept (dtype) is read from the weights."""


class ConfigJson:
  """The values of a config.json. Absent keys have the family's default; null reads as None."""

  def __init__(self, where: str, values: Mapping[str, Any], defaults: Mapping[str, Any]):
    self.where = where
    self._given = values
    self._values = {**defaults, **values}
    self._read: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self._read.add(key)
    return self._values.get(key)

  def integer(self, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
    """Returns a whole number; UserError if it is something else, out of its range, or missing."""
    value = self[key]
    is_one = isinstance(value, int) and not isinstance(value, bool)
    if not is_one or not least <= value <= most:
      raise self.refusal(key, f"a whole number is needed, at least {least} and at most {most}")
    return value

  @property
  def num_layers(self) -> int:
    return self.integer("num_hidden_layers", most=10_000)

  def word(self, key: str) -> str | None:
    """Returns a text, or another value as one; None where there is none."""
    value = self[key]
    return None if value is None else str(value)

  def mapping(self, key: str) -> Mapping[str, Any]:
    """Returns a JSON object; empty where there is none. UserError if it is something else."""
    value = self[key]
    if value is not None and not isinstance(value, dict):
      raise self.refusal(key, "an object is needed, such as {}")
    return value or {}

  def refusal(self, key: str, why: str) -> UserError:
    """Returns the error for the value of `key`."""
    return UserError(f"{self.where}: {key}={_shown(self._values.get(key))}: {why}")

  def refuse_unread(self, model_type: str) -> None:
    """Raises UserError for the first key that was not read and is not known to be harmless."""
    for key, value in self._given.items():
      if key not in self._read and key not in HARMLESS and value is not None:
        raise self.refusal(
          key,
          f"maxbatch would ignore this key of a model of type {model_type}. If the model computes "
          "the same without it, remove it from a copy of the file",
        )


def _shown(value: object) -> str:
  text = json.dumps(value)
  return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def read_config_json(folder: Path) -> dict[str, Any]:
  """Reads the config.json of a folder. Raises UserError: it cannot be read, or is no object."""
  path = folder / "config.json"
  try:
    values = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"{path}: cannot be read: {error.strerror}") from error
  except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
    raise UserError(f"{path}: not JSON in UTF-8: {error}") from error
  if not isinstance(values, dict):
    raise UserError(f'{path}: a JSON object is needed, such as {{"model_type": "llama"}}')
  return values
