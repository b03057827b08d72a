"""Mixtures of experts: Mixtral, OLMoE, Qwen 3's and gpt-oss.

Files have a tensor for each matrix of each expert, but those of gpt-oss, one for all experts.
"""

from typing import Any

from maxbatch.hugging_face.families.gemma import alternating
from maxbatch.hugging_face.families.llama import (
  ACTIVATION,
  DEFAULTS,
  NOT_PARAMETERS,
  OUTSIDE,
  PRE_NORMS,
  PROJECTIONS,
  QK_NORMS,
  SAME,
  WINDOW,
)
from maxbatch.hugging_face.family import (
  BIASES,
  HEADS,
  Family,
  Ours,
  Part,
  Tensor,
  interleaved,
  linear,
  vector,
)
from maxbatch.hugging_face.model_keys import ConfigJson
from maxbatch.hugging_face.positions import ROPE

_ATTENTION = tuple(each for each in PROJECTIONS if ".mlp." not in each.name)
_SAME = {name: key for name, key in SAME.items() if name != "intermediate_size"} | {
  "num_experts_per_tok": "num_experts_per_tok"
}
SHARED_HARMLESS = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""Of the training of the router, which keys of a run say."""


def _experts(prefix: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
  name = f"model.layers.{{}}.{prefix}.experts.{{}}."
  return (
    linear(f"model.layers.{{}}.{prefix}.gate.weight", "layers.mlp.router.kernel"),
    linear(f"{name}{gate}.weight", "layers.mlp.experts.gate.kernel"),
    linear(f"{name}{up}.weight", "layers.mlp.experts.up.kernel"),
    linear(f"{name}{down}.weight", "layers.mlp.experts.down.kernel"),
  )


def _number(theirs: ConfigJson) -> dict[str, Any]:
  """Reads num_experts, as files name it, or num_local_experts, as transformers 5 may write it."""
  keys = "num_local_experts", "num_experts"
  given = next((key for key in keys if theirs[key] is not None), keys[-1])
  return {"num_experts": theirs.integer(given, least=2, most=4096)}


def _width(ours: Ours) -> int:
  width = ours["base_moe_mlp_dim"]
  return ours["base_mlp_dim"] if width == -1 else width


_NUMBER = Part(_number, lambda ours: {"num_experts": ours["num_experts"]})
_LOCAL_NUMBER = Part(_number, lambda ours: {"num_local_experts": ours["num_experts"]})
_WIDTH = Part(
  lambda theirs: {"base_mlp_dim": theirs["intermediate_size"]},
  lambda ours: {"intermediate_size": _width(ours)},
)


def own_width() -> Part:
  """Maps experts that have a width of their own beside that of a layer without."""
  return Part(
    lambda theirs: {
      "base_mlp_dim": theirs["intermediate_size"],
      "base_moe_mlp_dim": theirs["moe_intermediate_size"],
    },
    lambda ours: {"intermediate_size": ours["base_mlp_dim"], "moe_intermediate_size": _width(ours)},
  )


_BY_MLP = _experts("mlp", "gate_proj", "up_proj", "down_proj")

MIXTRAL = Family(
  model_types=("mixtral",),
  architectures=("MixtralForCausalLM",),
  same=_SAME,
  choices=ACTIVATION,
  fixed={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
  parts=(HEADS, ROPE, WINDOW, _LOCAL_NUMBER, _WIDTH),
  harmless=SHARED_HARMLESS,
  defaults={
    **{key: value for key, value in DEFAULTS.items() if key != "attention_bias"},
    **{"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "rope_theta": 1e6},
    **{"rms_norm_eps": 1e-5, "intermediate_size": 14336, "num_experts_per_tok": 2},
    "num_local_experts": 8,
  },
  tensors=(*OUTSIDE, *PRE_NORMS, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
  not_parameters=NOT_PARAMETERS,
)

OLMOE = Family(
  model_types=("olmoe",),
  architectures=("OlmoeForCausalLM",),
  same={**_SAME, "norm_topk_prob": "norm_topk_prob"},
  constants={"use_qk_norm": True, "qk_norm_across_heads": True},
  choices=ACTIVATION,
  fixed={"attention_dropout": 0.0, "clip_qkv": None},
  parts=(HEADS, ROPE, BIASES, _NUMBER, _WIDTH),
  harmless=SHARED_HARMLESS,
  defaults={
    **DEFAULTS,
    **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "intermediate_size": 2048},
    **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
  },
  tensors=(*OUTSIDE, *PRE_NORMS, *_ATTENTION, *QK_NORMS, *_BY_MLP),
  not_parameters=NOT_PARAMETERS,
)

QWEN3_MOE = Family(
  model_types=("qwen3_moe",),
  architectures=("Qwen3MoeForCausalLM",),
  same={**_SAME, "norm_topk_prob": "norm_topk_prob"},
  constants={"use_qk_norm": True},
  choices=ACTIVATION,
  fixed={
    **{"attention_dropout": 0.0, "use_sliding_window": False},
    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
  },
  parts=(HEADS, ROPE, BIASES, _NUMBER, own_width()),
  # Without use_sliding_window there is no window.
  harmless=SHARED_HARMLESS | {"sliding_window", "max_window_layers"},
  defaults={
    **DEFAULTS,
    **{"max_position_embeddings": 32768, "num_key_value_heads": 4, "norm_topk_prob": False},
    **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
    "num_experts": 128,
  },
  tensors=(*OUTSIDE, *PRE_NORMS, *_ATTENTION, *QK_NORMS, *_BY_MLP),
  not_parameters=NOT_PARAMETERS,
)

_OSS_EXPERTS = "model.layers.{}.mlp.experts."

GPT_OSS = Family(
  model_types=("gpt_oss",),
  architectures=("GptOssForCausalLM",),
  same={**_SAME, "swiglu_limit": "mlp_activations_limit", "swiglu_alpha": "swiglu_alpha"},
  constants={
    **{"attention_sink": True, "mlp_activation": "clamped_swiglu", "mlp_bias": True},
    "router_logit_bias": True,
  },
  fixed={"attention_dropout": 0.0, "hidden_act": "silu"},
  parts=(HEADS, ROPE, BIASES, alternating(2), _LOCAL_NUMBER, _WIDTH),
  # The published files name some twice.
  harmless=SHARED_HARMLESS | {"experts_per_token", "initial_context_length"},
  defaults={
    **DEFAULTS,
    **{"max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 150_000.0},
    **{"rms_norm_eps": 1e-5, "intermediate_size": 2880, "num_experts_per_tok": 4, "head_dim": 64},
    **{"num_local_experts": 128, "attention_bias": True, "sliding_window": 128},
    **{"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
  },
  tensors=(
    *(*OUTSIDE, *PRE_NORMS, *_ATTENTION),
    vector("model.layers.{}.self_attn.sinks", "layers.attention.sink"),
    linear("model.layers.{}.mlp.router.weight", "layers.mlp.router.kernel"),
    vector("model.layers.{}.mlp.router.bias", "layers.mlp.router.logit_bias"),
    *(
      interleaved(
        f"{_OSS_EXPERTS}{name}_proj{ending}", *(f"layers.mlp.experts.{each}" for each in ours)
      )
      for ending, kind in (("", "kernel"), ("_bias", "bias"))
      for name, ours in (
        ("gate_up", (f"gate.{kind}", f"up.{kind}")),
        ("down", (f"down.{kind}",)),
      )
    ),
  ),
  not_parameters=NOT_PARAMETERS,
)
