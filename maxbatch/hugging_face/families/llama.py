"""Llama 2, 3, 3.1, 3.2 and what is made like them, SmolLM for example."""

from maxbatch.hugging_face.family import Family
from maxbatch.hugging_face.parts import BIASES, HEADS, ROPE
from maxbatch.hugging_face.tensors import linear, matrix, vector

SAME = {
  "vocab_size": "vocab_size",
  "hidden_size": "base_emb_dim",
  "intermediate_size": "base_mlp_dim",
  "num_hidden_layers": "base_num_decoder_layers",
  "num_attention_heads": "base_num_query_heads",
  "rms_norm_eps": "normalization_layer_epsilon",
  "max_position_embeddings": "max_position_embeddings",
  "tie_word_embeddings": "logits_via_embedding",
}
"""The names that most families have from Llama."""

ACTIVATION = {"hidden_act": ("mlp_activation", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"})}

OUTSIDE = (
  matrix("model.embed_tokens.weight", "embedding"),
  vector("model.norm.weight", "final_norm.scale"),
  linear("lm_head.weight", "head"),
)

PROJECTIONS = (
  linear("model.layers.{}.self_attn.q_proj.weight", "layers.attention.query.kernel"),
  linear("model.layers.{}.self_attn.k_proj.weight", "layers.attention.key.kernel"),
  linear("model.layers.{}.self_attn.v_proj.weight", "layers.attention.value.kernel"),
  linear("model.layers.{}.self_attn.o_proj.weight", "layers.attention.out.kernel", in_dims=2),
  vector("model.layers.{}.self_attn.q_proj.bias", "layers.attention.query.bias"),
  vector("model.layers.{}.self_attn.k_proj.bias", "layers.attention.key.bias"),
  vector("model.layers.{}.self_attn.v_proj.bias", "layers.attention.value.bias"),
  vector("model.layers.{}.self_attn.o_proj.bias", "layers.attention.out.bias"),
  linear("model.layers.{}.mlp.gate_proj.weight", "layers.mlp.gate.kernel"),
  linear("model.layers.{}.mlp.up_proj.weight", "layers.mlp.up.kernel"),
  linear("model.layers.{}.mlp.down_proj.weight", "layers.mlp.down.kernel"),
  vector("model.layers.{}.mlp.gate_proj.bias", "layers.mlp.gate.bias"),
  vector("model.layers.{}.mlp.up_proj.bias", "layers.mlp.up.bias"),
  vector("model.layers.{}.mlp.down_proj.bias", "layers.mlp.down.bias"),
)

QK_NORMS = (
  vector("model.layers.{}.self_attn.q_norm.weight", "layers.attention.query_norm.scale"),
  vector("model.layers.{}.self_attn.k_norm.weight", "layers.attention.key_norm.scale"),
)

PRE_NORMS = (
  vector("model.layers.{}.input_layernorm.weight", "layers.attention_norm.scale"),
  vector("model.layers.{}.post_attention_layernorm.weight", "layers.mlp_norm.scale"),
)

TENSORS = (*OUTSIDE, *PRE_NORMS, *PROJECTIONS)

NOT_PARAMETERS = ("rotary_emb.inv_freq",)
"""Files of older versions of transformers hold the frequencies too."""


DEFAULTS = {
  "hidden_act": "silu",
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "rope_theta": 10_000.0,
  "attention_bias": False,
  "attention_dropout": 0.0,
}

LLAMA = Family(
  model_types=("llama",),
  architectures=("LlamaForCausalLM",),
  same={**SAME, "mlp_bias": "mlp_bias"},
  choices=ACTIVATION,
  # SmolLM's files say how their queries and keys are rotated: in halves, as all of Llama's.
  fixed={"attention_dropout": 0.0, "rope_interleaved": False},
  parts=(HEADS, ROPE, BIASES),
  harmless=frozenset({"is_llama_config"}),
  defaults={**DEFAULTS, "mlp_bias": False},
  tensors=TENSORS,
  not_parameters=NOT_PARAMETERS,
)
