"""Gemma 3, the model of the text: Gemma 2 with normalized queries and keys instead of soft caps, a
window in five of six layers, and positions of their own in those."""

from typing import Any

from maxbatch.hugging_face.config_json import ConfigJson
from maxbatch.hugging_face.families.gemma2 import (
  ACTIVATION,
  FINAL_CAP,
  GEMMA,
  GEMMA_DEFAULTS,
  HARMLESS,
  QUERY_SCALE,
  TENSORS,
  alternating,
)
from maxbatch.hugging_face.families.llama import QK_NORMS, SAME
from maxbatch.hugging_face.family import Family, Ours, Part
from maxbatch.hugging_face.parts import BIASES, HEADS, rope_scaling, written_scaling


def _read_rope(theirs: ConfigJson) -> dict[str, Any]:
  """Those of the layers with a window, which are never scaled, and of the others.

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
