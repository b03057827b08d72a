"""OLMo 2: norms only after attention and MLP, and over all heads of queries and of keys."""

from maxbatch.hugging_face.families.llama import (
  ACTIVATION,
  DEFAULTS,
  OUTSIDE,
  PROJECTIONS,
  QK_NORMS,
  SAME,
)
from maxbatch.hugging_face.family import Family
from maxbatch.hugging_face.parts import BIASES, HEADS, ROPE
from maxbatch.hugging_face.tensors import vector

OLMO2 = Family(
  model_types=("olmo2",),
  architectures=("Olmo2ForCausalLM",),
  same=SAME,
  constants={
    "use_pre_norm": False,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "use_qk_norm": True,
    "qk_norm_across_heads": True,
  },
  choices=ACTIVATION,
  fixed={"attention_dropout": 0.0},
  parts=(HEADS, ROPE, BIASES),
  defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
  tensors=(
    *OUTSIDE,
    vector("model.layers.{}.post_attention_layernorm.weight", "layers.post_attention_norm.scale"),
    vector("model.layers.{}.post_feedforward_layernorm.weight", "layers.post_mlp_norm.scale"),
    *PROJECTIONS,
    *QK_NORMS,
  ),
)
