"""Mistral: Llama with a sliding window in all layers."""

from typing import Any

from maxbatch.hugging_face.config_json import ConfigJson
from maxbatch.hugging_face.families.llama import ACTIVATION, DEFAULTS, NOT_PARAMETERS, SAME, TENSORS
from maxbatch.hugging_face.family import Family, Ours, Part
from maxbatch.hugging_face.parts import HEADS, ROPE


def _read_window(theirs: ConfigJson) -> dict[str, Any]:
  return {"sliding_window_size": theirs["sliding_window"] or 0}


def _write_window(ours: Ours) -> dict[str, Any]:
  return {"sliding_window": ours["sliding_window_size"] or None}


WINDOW = Part(_read_window, _write_window)

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
