"""How rotary positions stand in a config.json: their base and what makes trained models read longer rows."""

from collections.abc import Collection, Mapping
from typing import Any

from maxbatch.hugging_face.family import Ours, Part
from maxbatch.hugging_face.model_keys import ConfigJson

_LLAMA3 = {
  "factor": "rope_factor",
  "low_freq_factor": "rope_low_freq_factor",
  "high_freq_factor": "rope_high_freq_factor",
  "original_max_position_embeddings": "original_max_position_embeddings",
}


_YARN = {
  "factor": "rope_factor",
  "beta_fast": "beta_fast",
  "beta_slow": "beta_slow",
  "original_max_position_embeddings": "original_max_position_embeddings",
}


def _read_rope(theirs: ConfigJson) -> dict[str, Any]:
  """Reads `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
  base, new = theirs["rope_theta"], theirs.mapping("rope_parameters")
  key = "rope_parameters" if new else "rope_scaling"
  parameters = new or theirs.mapping("rope_scaling")
  base = parameters.get("rope_theta", base)
  return {"rope_max_timescale": base, **rope_scaling(theirs, key, parameters)}


def rope_scaling(theirs: ConfigJson, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns our keys for an object of rope parameters; UserError for a type not computed here."""
  kind = str(values.get("rope_type", values.get("type", "default")))
  given = {name for name in values if values[name] is not None} - {
    "rope_type",
    "type",
    "rope_theta",
  }
  if values.get("partial_rotary_factor") == 1:  # All of a head, as transformers 5 spells out.
    given -= {"partial_rotary_factor"}
  taken = {"linear": {"factor"}, "llama3": set(_LLAMA3)}.get(kind, set())
  if kind == "yarn":
    return _read_yarn(theirs, key, values, given)
  if kind not in ("default", "linear", "llama3"):
    raise theirs.refusal(
      key, f"rope_type {kind} not supported; what works: default, linear, llama3, yarn"
    )
  if given != taken:
    raise theirs.refusal(key, f"rope_type {kind} needs {sorted(taken)} and nothing else")
  if kind == "linear":
    return {"rope_linear_scaling_factor": values["factor"]}
  if kind == "llama3":
    return {"rope_type": "llama3.1"} | {ours: values[name] for name, ours in _LLAMA3.items()}
  return {}


def _read_yarn(
  theirs: ConfigJson, key: str, values: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
  """Returns our keys for yarn; `mscale_all_dim` scales the logits of MLA alone."""
  unknown = set(given) - {*_YARN, "truncate", "mscale", "mscale_all_dim"}
  missing = {"factor", "original_max_position_embeddings"} - set(given)
  if unknown or missing:
    raise theirs.refusal(
      key, f"rope_type yarn without {sorted(missing)}" if missing else f"no {sorted(unknown)} here"
    )
  of_rotation, of_logits = (values.get(name) for name in ("mscale", "mscale_all_dim"))
  if of_rotation and of_logits and of_rotation != of_logits:
    raise theirs.refusal(key, "mscale and mscale_all_dim must be equal")
  is_scaled = not (of_rotation and of_logits)
  keys = {ours: values[name] for name, ours in _YARN.items() if name in given}
  truncate = values.get("truncate")
  is_truncated = True if truncate is None else truncate
  others = {"rope_truncate": is_truncated, "rope_attention_scaling": is_scaled}
  if theirs["kv_lora_rank"] is not None:
    others["mscale"] = of_logits or 0.0
  return {"rope_type": "yarn", **keys, **others}


def _write_yarn(ours: Ours) -> dict[str, Any]:
  scale = {}
  if ours["attention_type"] == "mla" and ours["mscale"]:
    scale["mscale_all_dim"] = ours["mscale"]
  if not ours["rope_attention_scaling"]:
    scale = {"mscale_all_dim": 1.0} | scale
    scale["mscale"] = scale["mscale_all_dim"]
  keys = {name: ours[key] for name, key in _YARN.items()}
  return {"rope_type": "yarn", **keys, "truncate": ours["rope_truncate"], **scale}


def _write_rope(ours: Ours) -> dict[str, Any]:
  """Writes the rope parameters as in all published files, which transformers 5 reads as well."""
  scaling = written_scaling(ours)
  return {"rope_theta": ours["rope_max_timescale"]} | ({"rope_scaling": scaling} if scaling else {})


def written_scaling(ours: Ours) -> dict[str, Any]:
  """Returns the object rope_scaling; empty where nothing is scaled."""
  if ours["rope_type"] == "llama3.1":
    return {"rope_type": "llama3"} | {name: ours[key] for name, key in _LLAMA3.items()}
  if ours["rope_type"] == "yarn":
    return _write_yarn(ours)
  factor = ours["rope_linear_scaling_factor"]
  return {} if factor == 1 else {"rope_type": "linear", "factor": factor}


ROPE = Part(_read_rope, _write_rope)
"""Rotary positions, the same in all layers."""
