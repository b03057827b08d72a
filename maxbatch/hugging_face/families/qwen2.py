"""Qwen 2 and 2.5: Llama with biases in the projections of queries, keys and values."""

from typing import Any

from maxbatch.hugging_face.config_json import ConfigJson
from maxbatch.hugging_face.families.llama import ACTIVATION, DEFAULTS, NOT_PARAMETERS, SAME, TENSORS
from maxbatch.hugging_face.family import Family, Ours, Part
from maxbatch.hugging_face.parts import HEADS, ROPE, read_layer_types, written_layer_types


def _read_windows(theirs: ConfigJson) -> dict[str, Any]:
  """The layers from max_window_layers on have a window, if use_sliding_window says so."""
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
