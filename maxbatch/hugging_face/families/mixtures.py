"""Mixtures of experts: Mixtral, OLMoE, Qwen 3's, gpt-oss and DeepSeek's.

Files have a tensor for each matrix of each expert, but those of gpt-oss, one for all experts. Of DeepSeek
V2 with greedy routing (Lite), and V3: with latent attention, and first layers without experts.
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

_RANKS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK_SAME = {
  name: key for name, key in SAME.items() if key != "normalization_layer_epsilon"
} | {
  **{name: name for name in (*_RANKS, "num_experts_per_tok", "routed_scaling_factor")},
  **{"first_k_dense_replace": "first_num_dense_layers", "n_routed_experts": "num_experts"},
  "n_shared_experts": "shared_experts",
}


def _read_deepseek_heads(theirs: ConfigJson) -> dict[str, Any]:
  heads, kv_heads = theirs.integer("num_attention_heads"), theirs["num_key_value_heads"]
  if kv_heads not in (None, heads):
    raise theirs.refusal("num_key_value_heads", f"{heads} are needed, as num_attention_heads")
  # The width of a head has no effect.
  return {"base_num_kv_heads": heads, "head_dim": 32, "q_lora_rank": theirs["q_lora_rank"] or 0}


_DEEPSEEK_HEADS = Part(
  _read_deepseek_heads,
  lambda ours: {
    "num_key_value_heads": ours["base_num_kv_heads"],
    "q_lora_rank": ours["q_lora_rank"] or None,
  },
)


def _read_groups(theirs: ConfigJson) -> dict[str, Any]:
  given = ("n_group", "topk_group")
  groups, kept = (1 if theirs[key] is None else theirs.integer(key) for key in given)
  return {"n_routing_groups": groups, "topk_routing_group": kept} if groups > 1 else {}


def _write_groups(ours: Ours) -> dict[str, Any]:
  if ours["n_routing_groups"] == -1:
    return {"n_group": 1, "topk_group": 1}
  return {"n_group": ours["n_routing_groups"], "topk_group": ours["topk_routing_group"]}


def _deepseek_layer(ours: str, *mlp: Tensor) -> tuple[Tensor, ...]:
  """Returns the tensors of the layers that stand in our parameters as `ours`."""
  theirs, attention = "model.layers.{}.", f"{ours}.attention."
  a = f"{theirs}self_attn."
  return (
    vector(f"{theirs}input_layernorm.weight", f"{ours}.attention_norm.scale"),
    vector(f"{theirs}post_attention_layernorm.weight", f"{ours}.mlp_norm.scale"),
    linear(f"{a}q_proj.weight", f"{attention}query.kernel"),
    linear(f"{a}q_a_proj.weight", f"{attention}query_latent.kernel"),
    vector(f"{a}q_a_proj.bias", f"{attention}query_latent.bias"),
    vector(f"{a}q_a_layernorm.weight", f"{attention}query_norm.scale"),
    linear(f"{a}q_b_proj.weight", f"{attention}query_up.kernel"),
    linear(
      f"{a}kv_a_proj_with_mqa.weight", f"{attention}latent.kernel", f"{attention}common_key.kernel"
    ),
    vector(f"{a}kv_a_proj_with_mqa.bias", f"{attention}latent.bias", f"{attention}common_key.bias"),
    vector(f"{a}kv_a_layernorm.weight", f"{attention}latent_norm.scale"),
    linear(f"{a}kv_b_proj.weight", f"{attention}key_value.kernel"),
    linear(f"{a}o_proj.weight", f"{attention}out.kernel", in_dims=2),
    vector(f"{a}o_proj.bias", f"{attention}out.bias"),
    *mlp,
  )


def _deepseek_feed(theirs: str, ours: str) -> tuple[Tensor, ...]:
  return tuple(
    linear(f"model.layers.{{}}.mlp.{theirs}{name}_proj.weight", f"{ours}.{name}.kernel")
    for name in ("gate", "up", "down")
  )


_DEEPSEEK_TENSORS = (
  *OUTSIDE,
  *_deepseek_layer("dense_layers", *_deepseek_feed("", "dense_layers.mlp")),
  *_deepseek_layer(
    "layers",
    linear("model.layers.{}.mlp.gate.weight", "layers.mlp.router.kernel"),
    vector("model.layers.{}.mlp.gate.e_score_correction_bias", "layers.mlp.router.bias"),
    *_deepseek_feed("experts.{}.", "layers.mlp.experts"),
    *_deepseek_feed("shared_experts.", "layers.mlp.shared"),
  ),
)
_DEEPSEEK_FIXED = {"attention_dropout": 0.0, "moe_layer_freq": 1, "rms_norm_eps": 1e-6}
"""The norms of latent vectors have this epsilon whatever the file says, so the others must have it."""
_DEEPSEEK_HARMLESS = SHARED_HARMLESS | {
  *("aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "head_dim", "qk_head_dim"),
  *("num_nextn_predict_layers", "num_mtp_layers"),
}
_DEEPSEEK_CONSTANTS = {"attention_type": "mla", "normalization_layer_epsilon": 1e-6}
_DEEPSEEK_DEFAULTS = {
  **DEFAULTS,
  "routed_scaling_factor": 1.0,
  "kv_lora_rank": 512,
  "q_lora_rank": 1536,
}
_DEEPSEEK_DEFAULTS |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

DEEPSEEK_V2 = Family(
  model_types=("deepseek_v2",),
  architectures=("DeepseekV2ForCausalLM",),
  same=_DEEPSEEK_SAME,
  constants={**_DEEPSEEK_CONSTANTS, "norm_topk_prob": False, "rope_interleave": True},
  choices=ACTIVATION,
  fixed={
    **_DEEPSEEK_FIXED,
    **{"topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax"},
    "mlp_bias": False,
  },
  parts=(_DEEPSEEK_HEADS, ROPE, BIASES, own_width()),
  harmless=_DEEPSEEK_HARMLESS | {"n_group", "topk_group"},
  defaults={
    **_DEEPSEEK_DEFAULTS,
    **{"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"moe_intermediate_size": 1407, "topk_method": "greedy", "num_experts_per_tok": 6},
  },
  tensors=_DEEPSEEK_TENSORS,
  not_parameters=NOT_PARAMETERS,
)

DEEPSEEK_V3 = Family(
  model_types=("deepseek_v3",),
  architectures=("DeepseekV3ForCausalLM",),
  same={**_DEEPSEEK_SAME, "norm_topk_prob": "norm_topk_prob", "rope_interleave": "rope_interleave"},
  constants={**_DEEPSEEK_CONSTANTS, "routed_score_func": "sigmoid", "routed_bias": True},
  choices=ACTIVATION,
  fixed={**_DEEPSEEK_FIXED, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
  parts=(_DEEPSEEK_HEADS, ROPE, BIASES, own_width(), Part(_read_groups, _write_groups)),
  harmless=_DEEPSEEK_HARMLESS,
  defaults={
    **_DEEPSEEK_DEFAULTS,
    **{"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "rope_interleave": True},
    "max_position_embeddings": 4096,
  },
  tensors=_DEEPSEEK_TENSORS,
  # The last layer of the published files predicts the token after the next, and is not trained here.
  not_parameters=(*NOT_PARAMETERS, "model.layers.61."),
)
