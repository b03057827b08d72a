"""DeepSeek-V2 with greedy routing (Lite), and V3: latent attention, and first layers without experts."""

from typing import Any

from maxbatch.hugging_face.families.llama import (
  ACTIVATION,
  DEFAULTS,
  NOT_PARAMETERS,
  OUTSIDE,
  SAME,
)
from maxbatch.hugging_face.families.mixtures import SHARED_HARMLESS, own_width
from maxbatch.hugging_face.family import BIASES, Family, Ours, Part, Tensor, linear, vector
from maxbatch.hugging_face.model_keys import ConfigJson
from maxbatch.hugging_face.positions import ROPE

_RANKS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SAME = {name: key for name, key in SAME.items() if key != "normalization_layer_epsilon"} | {
  **{name: name for name in (*_RANKS, "num_experts_per_tok", "routed_scaling_factor")},
  **{"first_k_dense_replace": "first_num_dense_layers", "n_routed_experts": "num_experts"},
  "n_shared_experts": "shared_experts",
}


def _read_heads(theirs: ConfigJson) -> dict[str, Any]:
  heads, kv_heads = theirs.integer("num_attention_heads"), theirs["num_key_value_heads"]
  if kv_heads not in (None, heads):
    raise theirs.refusal("num_key_value_heads", f"{heads} are needed, as num_attention_heads")
  # The width of a head has no effect.
  return {"base_num_kv_heads": heads, "head_dim": 32, "q_lora_rank": theirs["q_lora_rank"] or 0}


_HEADS = Part(
  _read_heads,
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


def _layer(ours: str, *mlp: Tensor) -> tuple[Tensor, ...]:
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


def _feed(theirs: str, ours: str) -> tuple[Tensor, ...]:
  return tuple(
    linear(f"model.layers.{{}}.mlp.{theirs}{name}_proj.weight", f"{ours}.{name}.kernel")
    for name in ("gate", "up", "down")
  )


_TENSORS = (
  *OUTSIDE,
  *_layer("dense_layers", *_feed("", "dense_layers.mlp")),
  *_layer(
    "layers",
    linear("model.layers.{}.mlp.gate.weight", "layers.mlp.router.kernel"),
    vector("model.layers.{}.mlp.gate.e_score_correction_bias", "layers.mlp.router.bias"),
    *_feed("experts.{}.", "layers.mlp.experts"),
    *_feed("shared_experts.", "layers.mlp.shared"),
  ),
)
_FIXED = {"attention_dropout": 0.0, "moe_layer_freq": 1, "rms_norm_eps": 1e-6}
"""The norms of latent vectors have this epsilon whatever the file says, so the others must have it."""
_HARMLESS = SHARED_HARMLESS | {
  *("aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "head_dim", "qk_head_dim"),
  *("num_nextn_predict_layers", "num_mtp_layers"),
}
_CONSTANTS = {"attention_type": "mla", "normalization_layer_epsilon": 1e-6}
_DEFAULTS = {**DEFAULTS, "routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": 1536}
_DEFAULTS |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

DEEPSEEK_V2 = Family(
  model_types=("deepseek_v2",),
  architectures=("DeepseekV2ForCausalLM",),
  same=_SAME,
  constants={**_CONSTANTS, "norm_topk_prob": False, "rope_interleave": True},
  choices=ACTIVATION,
  fixed={
    **_FIXED,
    **{"topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax"},
    "mlp_bias": False,
  },
  parts=(_HEADS, ROPE, BIASES, own_width()),
  harmless=_HARMLESS | {"n_group", "topk_group"},
  defaults={
    **_DEFAULTS,
    **{"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"moe_intermediate_size": 1407, "topk_method": "greedy", "num_experts_per_tok": 6},
  },
  tensors=_TENSORS,
  not_parameters=NOT_PARAMETERS,
)

DEEPSEEK_V3 = Family(
  model_types=("deepseek_v3",),
  architectures=("DeepseekV3ForCausalLM",),
  same={**_SAME, "norm_topk_prob": "norm_topk_prob", "rope_interleave": "rope_interleave"},
  constants={**_CONSTANTS, "routed_score_func": "sigmoid", "routed_bias": True},
  choices=ACTIVATION,
  fixed={**_FIXED, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
  parts=(_HEADS, ROPE, BIASES, own_width(), Part(_read_groups, _write_groups)),
  harmless=_HARMLESS,
  defaults={
    **_DEFAULTS,
    **{"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "rope_interleave": True},
    "max_position_embeddings": 4096,
  },
  tensors=_TENSORS,
  # The last layer of the published files predicts the token after the next, and is not trained here.
  not_parameters=(*NOT_PARAMETERS, "model.layers.61."),
)
