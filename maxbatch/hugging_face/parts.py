"""The parts of a config.json that several families share: heads, positions, biases, windows."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.hugging_face.config_json import ConfigJson
from maxbatch.hugging_face.family import Ours, Part
from maxbatch.hugging_face.model_keys import layer_types, shortest_pattern

_LLAMA3 = {
  "factor": "rope_factor",
  "low_freq_factor": "rope_low_freq_factor",
  "high_freq_factor": "rope_high_freq_factor",
  "original_max_position_embeddings": "original_max_position_embeddings",
}


def _read_heads(theirs: ConfigJson) -> dict[str, Any]:
  heads, kv_heads, width = (
    theirs[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
  )
  if width is None:
    width = theirs.integer("hidden_size") // theirs.integer("num_attention_heads")
  return {"base_num_kv_heads": heads if kv_heads is None else kv_heads, "head_dim": width}


HEADS = Part(
  _read_heads,
  lambda ours: {"num_key_value_heads": ours["base_num_kv_heads"], "head_dim": ours["head_dim"]},
)
"""Key/value heads, as many as the others if not said, and the width of a head."""


def _read_rope(theirs: ConfigJson) -> dict[str, Any]:
  """`rope_theta` and `rope_scaling`, or, from transformers 5 on, both in `rope_parameters`."""
  base, new = theirs["rope_theta"], theirs.mapping("rope_parameters")
  key = "rope_parameters" if new else "rope_scaling"
  parameters = new or theirs.mapping("rope_scaling")
  return {
    "rope_max_timescale": parameters.get("rope_theta", base),
    **rope_scaling(theirs, key, parameters),
  }


def rope_scaling(theirs: ConfigJson, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Our keys for one object of rope parameters; UserError for a type that is not computed here."""
  kind = str(values.get("rope_type", values.get("type", "default")))
  given = set(values) - {"rope_type", "type", "rope_theta"}
  if values.get("partial_rotary_factor") == 1:  # All of a head, as transformers 5 spells out.
    given -= {"partial_rotary_factor"}
  taken = {"linear": {"factor"}, "llama3": set(_LLAMA3)}.get(kind, set())
  if kind not in ("default", "linear", "llama3"):
    raise theirs.refusal(
      key, f"rope_type {kind} not supported; what works: default, linear, llama3"
    )
  if given != taken:
    raise theirs.refusal(key, f"rope_type {kind} needs {sorted(taken)} and nothing else")
  if kind == "linear":
    return {"rope_linear_scaling_factor": values["factor"]}
  if kind == "llama3":
    return {"rope_type": "llama3.1"} | {ours: values[name] for name, ours in _LLAMA3.items()}
  return {}


def _write_rope(ours: Ours) -> dict[str, Any]:
  """As in all published files, which transformers 5 reads as well."""
  scaling = written_scaling(ours)
  return {"rope_theta": ours["rope_max_timescale"]} | ({"rope_scaling": scaling} if scaling else {})


def written_scaling(ours: Ours) -> dict[str, Any]:
  """The object rope_scaling; empty where nothing is scaled."""
  if ours["rope_type"] == "llama3.1":
    return {"rope_type": "llama3"} | {name: ours[key] for name, key in _LLAMA3.items()}
  factor = ours["rope_linear_scaling_factor"]
  return {} if factor == 1 else {"rope_type": "linear", "factor": factor}


ROPE = Part(_read_rope, _write_rope)
"""Rotary positions, the same in all layers."""


def _read_biases(theirs: ConfigJson) -> dict[str, Any]:
  return dict.fromkeys(("attention_qkv_bias", "attention_out_bias"), theirs["attention_bias"])


BIASES = Part(_read_biases, lambda ours: {"attention_bias": ours["attention_qkv_bias"]})
"""Biases in all projections of the attention, or in none."""


_KINDS = ("sliding_attention", "full_attention")


def read_layer_types(
  theirs: ConfigJson, window: int | None, kinds: Sequence[str]
) -> dict[str, Any]:
  """Our keys for a window that the layers of sliding attention have; `kinds` is each layer's.

  Raises:
    UserError: a layer is of another kind, or there are not as many kinds as layers.
  """
  given = theirs["layer_types"]
  if given is not None:
    kinds = given if isinstance(given, list) else ()
  if len(kinds) != theirs.num_layers or any(kind not in _KINDS for kind in kinds):
    raise theirs.refusal("layer_types", f"a list is needed, of one of {_KINDS} for each layer")
  if window is None or "sliding_attention" not in kinds:
    return {"sliding_window_size": 0, "layer_types": ()}
  pattern = shortest_pattern(kinds)
  return {
    "sliding_window_size": window,
    "layer_types": () if pattern == ("sliding_attention",) else pattern,
  }


def written_layer_types(ours: Ours) -> list[str]:
  """The kind of each layer."""
  num_layers = ours["base_num_decoder_layers"]
  if not ours["sliding_window_size"]:
    return ["full_attention"] * num_layers
  return list(layer_types(ours["layer_types"] or _KINDS[:1], num_layers))
