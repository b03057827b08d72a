"""Keys of the model and of the number formats it is kept and computed in."""

import dataclasses
from typing import Annotated, Literal

from maxbatch.config.declare import (
  CHANGEABLE,
  FIXED,
  FLOAT32,
  FloatFormat,
  LossScale,
  Name,
  NonNegative,
  NonNegativeFloat,
  Path,
  Positive,
  PositiveOrUnset,
  Range,
  Scale,
  Section,
  Seed,
  key,
)
from maxbatch.config.keys.read_when import (
  ADAPTERS,
  BFLOAT16_WEIGHTS,
  CLAMPED,
  CONTEXT,
  CUSTOM_REMAT,
  DYNAMIC_SCALE,
  EXPERT_BALANCE,
  EXPERT_BIAS,
  EXPERT_GROUPS,
  EXPERTS,
  GATED,
  LLAMA_ROPE,
  LONGER_ROPE,
  LOSS_SCALE,
  MLA,
  NOT_GATED,
  NOT_MLA,
  QK_NORM,
  ROPE,
  WINDOW,
  YARN,
)
from maxbatch.errors import UserError

RematPlace = Literal["remat", "device", "offload"]
"""What becomes of a tensor until the backward pass."""


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section, heading="the model"):
  """The model's shape and how it is computed."""

  model_name: Path = key("default", CHANGEABLE)
  """Model shape: configs/models/NAME.yml is merged over this file."""
  decoder_block: Name = key("transformer", FIXED)
  """Registered model to build; add your own in maxbatch/models/."""
  vocab_size: Positive = key(259, FIXED)
  """Vocabulary size in tokens; at least the byte tokenizer's 259 (256 bytes, begin, end, pad)."""
  base_emb_dim: Positive = key(128, FIXED)
  """Embedding dimension: width of the residual stream."""
  base_num_decoder_layers: Annotated[int, Range(low=1, high=10_000)] = key(4, FIXED)
  """Number of transformer layers."""
  base_num_query_heads: Positive = key(4, FIXED)
  """Number of attention (query) heads."""
  base_num_kv_heads: Positive = key(4, FIXED)
  """Number of key/value heads; fewer than base_num_query_heads: grouped-query attention."""
  attention_type: Literal["global", "mla"] = key("global", FIXED)
  """Keys and values from the residual stream (global), or from a latent vector of each token (mla,
  DeepSeek)."""
  head_dim: Positive = key(32, FIXED, NOT_MLA)
  """Dimension of one attention head."""
  q_lora_rank: NonNegative = key(0, FIXED, MLA)
  """attention_type mla: numbers of the latent vector that queries are made of; 0: of the stream
  itself."""
  kv_lora_rank: Positive = key(512, FIXED, MLA)
  """attention_type mla: numbers of the latent vector that keys and values are made of."""
  qk_nope_head_dim: Positive = key(128, FIXED, MLA)
  """attention_type mla: numbers of a query and a key without a position."""
  qk_rope_head_dim: Positive = key(64, FIXED, MLA)
  """attention_type mla: numbers of a query and a key with one; keys have them in common."""
  v_head_dim: Positive = key(128, FIXED, MLA)
  """attention_type mla: numbers of a value."""
  base_mlp_dim: Positive = key(512, FIXED)
  """Hidden dimension of the MLP."""
  mlp_activation: Literal["gelu", "swiglu", "geglu", "clamped_swiglu"] = key("swiglu", FIXED)
  """MLP activation: gelu (two matrices, GPT-2), or gated in three: swiglu (Llama), geglu (Gemma),
  clamped_swiglu (gate·sigmoid(α·gate)·(up + 1), gpt-oss)."""
  mlp_activations_limit: Annotated[float, Range(low=1e-6, limit=FLOAT32)] = key(7.0, FIXED, CLAMPED)
  """Both products of clamped_swiglu are at most this, and the one beside the gate at least its
  negative."""
  swiglu_alpha: Annotated[float, Range(low=1e-6, limit=FLOAT32)] = key(1.702, FIXED, CLAMPED)
  """Steepness of the sigmoid of clamped_swiglu."""
  normalization: Literal["rmsnorm", "zero_centered_rmsnorm", "layernorm"] = key("rmsnorm", FIXED)
  """Normalization: rmsnorm (Llama), zero_centered_rmsnorm (multiplies by 1 + scale, Gemma) or
  layernorm with bias (GPT-2)."""
  normalization_layer_epsilon: NonNegativeFloat = key(1e-05, FIXED)
  """Epsilon added to the variance in normalization."""
  use_pre_norm: bool = key(True, FIXED)
  """Normalize the inputs of attention and MLP; false with the two keys below: OLMo 2."""
  use_post_attn_norm: bool = key(False, FIXED)
  """Normalize the output of attention before it is added to the residual stream (Gemma 2 and 3,
  OLMo 2)."""
  use_post_ffw_norm: bool = key(False, FIXED)
  """Normalize the output of the MLP before it is added to the residual stream (Gemma 2 and 3, OLMo
  2)."""
  position_embedding: Literal["rope", "learned"] = key("rope", FIXED)
  """Position embedding: rope (rotary) or learned (a table of positions)."""
  max_position_embeddings: PositiveOrUnset = key(-1, FIXED)
  """Positions that the model is made for: the length of a learned table, and what an export states;
  -1: max_target_length."""
  rope_type: Literal["default", "llama3.1", "yarn"] = key("default", FIXED, ROPE)
  """RoPE's frequencies: default, or slow ones divided by rope_factor, so that a trained model reads
  longer rows: llama3.1, or yarn (gpt-oss, DeepSeek)."""
  rope_max_timescale: Annotated[float, Range(low=1, limit=FLOAT32)] = key(10000.0, FIXED, ROPE)
  """RoPE's longest wavelength (theta); raise it for longer contexts."""
  local_rope_max_timescale: Annotated[float, Range(low=1, limit=FLOAT32, also=-1)] = key(
    -1.0, FIXED, ROPE, WINDOW
  )
  """The same for layers of sliding attention in layer_types (Gemma 3); -1: rope_max_timescale."""
  rope_linear_scaling_factor: Annotated[float, Range(low=1, limit=FLOAT32)] = key(1.0, FIXED, ROPE)
  """Divides all RoPE frequencies except those of local_rope_max_timescale (Gemma 3: 8); 1: no
  scaling."""
  rope_factor: Annotated[float, Range(low=1, limit=FLOAT32)] = key(1.0, FIXED, ROPE, LONGER_ROPE)
  """Factor by which slow frequencies are divided (Llama 3.1: 8, Llama 3.2 and gpt-oss: 32)."""
  rope_low_freq_factor: NonNegativeFloat = key(1.0, FIXED, ROPE, LLAMA_ROPE)
  """rope_type llama3.1: frequencies with fewer turns than this within
  original_max_position_embeddings are divided in full."""
  rope_high_freq_factor: NonNegativeFloat = key(4.0, FIXED, ROPE, LLAMA_ROPE)
  """rope_type llama3.1: frequencies with more turns than this within
  original_max_position_embeddings stay unchanged."""
  original_max_position_embeddings: Positive = key(8192, FIXED, ROPE, LONGER_ROPE)
  """rope_type llama3.1 or yarn: context length, in tokens, that the model was first trained with."""
  beta_fast: Annotated[float, Range(low=1e-6, limit=FLOAT32)] = key(32.0, FIXED, ROPE, YARN)
  """rope_type yarn: frequencies with more turns than this within original_max_position_embeddings stay
  unchanged."""
  beta_slow: Annotated[float, Range(low=1e-6, limit=FLOAT32)] = key(1.0, FIXED, ROPE, YARN)
  """rope_type yarn: frequencies with fewer turns than this are divided in full."""
  rope_truncate: bool = key(True, FIXED, ROPE, YARN)
  """rope_type yarn: round the first and the last frequency between those outwards; false: gpt-oss."""
  rope_attention_scaling: bool = key(False, FIXED, ROPE, YARN)
  """rope_type yarn: multiply queries and keys by 1 + 0.1·log(rope_factor) (gpt-oss)."""
  mscale: NonNegativeFloat = key(1.0, FIXED, ROPE, YARN, MLA)
  """Attention logits are multiplied by the square of 1 + 0.1·mscale·log(rope_factor) (DeepSeek)."""
  rope_interleave: bool = key(False, FIXED, ROPE)
  """Rotate pairs of neighbours (DeepSeek) instead of the halves of a head (Llama)."""
  attention_sink: bool = key(False, FIXED)
  """A trained logit for each head that takes a part of the attention weights and gives nothing
  (gpt-oss)."""
  sliding_window_size: NonNegative = key(0, FIXED)
  """Sliding-window attention: tokens that a token attends to, including itself; 0: all."""
  layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = key((), FIXED, WINDOW)
  """Layers with that window, as a repeating pattern: [sliding_attention, full_attention] (Gemma 2);
  []: all."""
  query_pre_attn_scalar: NonNegative = key(0, FIXED)
  """Attention logits are divided by its square root; 0: head_dim."""
  attn_logits_soft_cap: NonNegativeFloat = key(0.0, FIXED)
  """Cap of attention logits, by cap·tanh(logit/cap) (Gemma 2: 50); not in cuDNN's kernel; 0:
  off."""
  final_logits_soft_cap: NonNegativeFloat = key(0.0, FIXED)
  """The same for output logits, in loss, evaluation and sampling (Gemma 2: 30); 0: off."""
  scale_embedding: bool = key(False, FIXED)
  """Multiply embeddings by the square root of base_emb_dim (Gemma)."""
  logits_via_embedding: bool = key(False, FIXED)
  """Tie the output projection to the embedding: fewer parameters."""
  use_qk_norm: bool = key(False, FIXED)
  """Normalize queries and keys per head, as in Qwen 3: more stable at high learning rates."""
  qk_norm_across_heads: bool = key(False, FIXED, QK_NORM)
  """Apply use_qk_norm to all heads together, as in OLMo 2."""
  attention_qkv_bias: bool = key(False, FIXED)
  """Biases in the query, key and value projections."""
  attention_out_bias: bool = key(False, FIXED)
  """Bias in attention's output projection."""
  mlp_bias: bool = key(False, FIXED)
  """Biases in the MLP, or in each expert."""
  num_experts: Annotated[int, Range(low=1, high=4096)] = key(1, FIXED)
  """Experts per layer; each token is sent to num_experts_per_tok of them; 1: one MLP, no router
  (docs/mixture_of_experts.md)."""
  num_experts_per_tok: Annotated[int, Range(low=1, high=4096)] = key(2, FIXED, EXPERTS)
  """Experts that a token is sent to; none is ever dropped."""
  base_moe_mlp_dim: PositiveOrUnset = key(-1, FIXED, EXPERTS)
  """Hidden dimension of an expert; -1: base_mlp_dim."""
  first_num_dense_layers: Annotated[int, Range(low=0, high=9999)] = key(0, FIXED, EXPERTS)
  """First layers that have an MLP of base_mlp_dim instead of experts (DeepSeek)."""
  shared_experts: Annotated[int, Range(low=0, high=4096)] = key(0, FIXED, EXPERTS)
  """Experts that see every token, in addition to the chosen ones (DeepSeek)."""
  routed_score_func: Literal["softmax", "sigmoid"] = key("softmax", FIXED, EXPERTS)
  """Scores by which experts are chosen and weighted, in float32: softmax over all experts, or the
  sigmoid of each (DeepSeek-V3)."""
  norm_topk_prob: bool = key(True, FIXED, EXPERTS)
  """Divide the weights of a token's experts by their sum (Mixtral, Qwen 3); false: OLMoE."""
  routed_scaling_factor: Annotated[float, Range(low=1e-6, limit=FLOAT32)] = key(1.0, FIXED, EXPERTS)
  """Factor of those weights (DeepSeek-V3: 2.5)."""
  router_logit_bias: bool = key(False, FIXED, EXPERTS)
  """Biases in the router's logits, trained like any other (gpt-oss)."""
  routed_bias: bool = key(False, FIXED, EXPERTS)
  """Balance with a bias on each expert's score, used only to choose experts; after a step it moves
  towards an even load (DeepSeek-V3)."""
  routed_bias_update_rate: NonNegativeFloat = key(0.001, CHANGEABLE, EXPERTS, EXPERT_BIAS)
  """How far the bias of an expert moves after a step."""
  n_routing_groups: Annotated[int, Range(low=2, high=4096, also=-1)] = key(-1, FIXED, EXPERTS)
  """Groups of experts; a token's experts come from topk_routing_group of them (DeepSeek-V3: 8); -1: no
  groups."""
  topk_routing_group: Positive = key(1, FIXED, EXPERTS, EXPERT_GROUPS)
  """Groups a token's experts come from: those with the highest sum of two scores (DeepSeek-V3: 4)."""
  load_balance_loss_weight: NonNegativeFloat = key(0.0, FIXED, EXPERTS)
  """Weight of the load-balancing loss, smallest at an even load (OLMoE: 0.01); 0: off."""
  load_balance_loss_type: Literal["sequence", "global", "last_step"] = key(
    "sequence", FIXED, EXPERTS, EXPERT_BALANCE
  )
  """Tokens over which the load is balanced: sequence (each row), global (a step, in two passes),
  last_step (the same with the previous step's counts, at no cost)."""
  router_z_loss_weight: NonNegativeFloat = key(0.0, FIXED, EXPERTS)
  """Weight of the squared log normalizer of the router's logits, which keeps them small (OLMoE:
  0.001); 0: off."""
  dropout_rate: Annotated[float, Range(low=0, high=0.99)] = key(0.0, FIXED)
  """Dropout rate in training; masks depend on the sample, not on how the batch is split."""
  init_weights_seed: Seed = key(0, FIXED)
  """Random seed of the initial weights and of dropout, 0 to 2³² − 1."""
  attention: Literal["auto", "dot_product", "flash"] = key("auto", CHANGEABLE)
  """Attention implementation; auto: flash where the device has a kernel and the shapes allow, else
  dot_product."""
  context_parallel_strategy: Literal["auto", "all_gather", "ring", "ulysses"] = key(
    "auto", CHANGEABLE, CONTEXT
  )
  """How devices that share rows get the keys of others: all_gather; ring; ulysses, whole rows of some
  heads; auto: whichever sends least (docs/long_rows.md)."""
  context_parallel_load_balance: bool = key(True, CHANGEABLE, CONTEXT)
  """true: each device that shares a row has some of its first and last tokens, so that all attend to as
  many keys (zigzag)."""
  scan_layers: bool | Literal["auto"] = key("auto", CHANGEABLE)
  """true: scan over one compiled layer (compiles fast); false: unroll the layers (may run faster); auto:
  unroll on GPUs unless remat_policy=full."""
  remat_policy: Literal[
    "none",
    "minimal_with_context",
    "minimal",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "minimal_offloaded",
    "qkv_proj_offloaded",
    "full",
    "custom",
    "auto",
    "explore",
  ] = key("none", CHANGEABLE)
  """What is kept for the backward pass, none (all) to full (nothing); custom: the next keys; auto: the
  fastest that fits; explore: rank them (docs/yardstick.md)."""
  decoder_layer_input: RematPlace = key("device", CHANGEABLE, CUSTOM_REMAT)
  """remat_policy: custom, for each tensor: remat (recompute), device (keep) or offload (keep on the
  host). A layer's input: device or offload."""
  query_proj: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT)
  """Attention queries, rotated."""
  key_proj: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT)
  """Attention keys, rotated."""
  value_proj: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT)
  """Attention values."""
  context: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT)
  """The output of attention, with its normalizers where a kernel computes it."""
  attention_out: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT)
  """The same, laid out for the output projection."""
  out_proj: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT)
  """The result of attention's output projection."""
  mlpwi: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT, NOT_GATED)
  """The result of the MLP's first matrix, where it is not gated."""
  mlpwi_0: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT, GATED)
  """The result of the gate's matrix."""
  mlpwi_1: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT, GATED)
  """The result of the matrix beside the gate."""
  mlpwo: RematPlace = key("remat", CHANGEABLE, CUSTOM_REMAT)
  """The result of the MLP's last matrix."""
  num_vocab_tiling: NonNegative = key(0, CHANGEABLE)
  """Chunks in which logits and loss are computed; more save memory; 0: chosen so that a chunk's
  logits are small beside the output matrix's gradient."""
  z_loss_multiplier: NonNegativeFloat = key(0.0, FIXED)
  """Weight of the z-loss, the squared log normalizer, which keeps logits from drifting; 0: off."""
  lora_rank: NonNegative = key(0, FIXED)
  """Rank of LoRA's adapters, which then are all that trains, beside frozen matrices; 8 to 64 is
  usual; 0: no adapters."""
  lora_alpha: Annotated[float, Range(low=1e-6, limit=FLOAT32, also=-1)] = key(-1.0, FIXED, ADAPTERS)
  """Scale of the adapters: their product is multiplied by lora_alpha / lora_rank; -1: lora_rank, so
  by 1."""
  lora_targets: tuple[str, ...] = key((), FIXED, ADAPTERS)
  """Matrices with adapters: query, key, value, out, gate, up, down (of all experts), router; []: query
  and value."""

  def __post_init__(self) -> None:
    """Raises UserError for a token that would go to more experts than there are."""
    experts, chosen = self.num_experts, self.num_experts_per_tok
    if 1 < experts < chosen:
      raise UserError(
        f"num_experts_per_tok={chosen} must be at most num_experts={experts}; for example "
        f"num_experts_per_tok={experts}"
      )


@dataclasses.dataclass(frozen=True)
class PrecisionConfig(Section, heading="precision"):
  """In which number formats a run computes and keeps what, and the scale of its loss."""

  precision: FloatFormat = key("float32", CHANGEABLE)
  """Format of the computation: float32; bfloat16 (half the activation memory, faster); float16
  (needs loss scaling); cbfloat16 (Cerebras's, emulated)."""
  dtype: Literal["auto", "float32", "bfloat16", "float16", "cbfloat16"] = key("auto", CHANGEABLE)
  """Format of weights in use, activations and their gradients; auto: precision. Norms, softmax,
  loss and sums are always float32."""
  weight_dtype: Literal["float32", "bfloat16"] = key("float32", FIXED)
  """Format of the stored parameters: float32, or bfloat16 without a float32 copy, which needs
  weight_rounding."""
  weight_rounding: Literal["none", "stochastic", "nearest"] = key(
    "none", CHANGEABLE, BFLOAT16_WEIGHTS
  )
  """How updated bfloat16 weights are rounded: stochastic (keeps small updates on average) or
  nearest (loses updates under 1/512 of a weight); none: float32."""
  grad_dtype: FloatFormat = key("float32", CHANGEABLE)
  """Format to which a microbatch's gradients are rounded before they are summed in float32;
  float32: not rounded."""
  quantization: Literal["none", "fp8", "int8"] = key("none", FIXED)
  """fp8, int8: projections multiply in eight bits (docs/precision.md); in `maxbatch sample` int8
  is the format of their weights alone; none: in dtype."""
  loss_scale: LossScale | Literal["auto", "none", "dynamic"] = key("auto", CHANGEABLE)
  """Factor of the loss gradient, divided out again: a number, dynamic (shrinks when gradients
  overflow) or none; auto: dynamic with float16 (docs/precision.md)."""
  initial_loss_scale: Scale = key(16.0, CHANGEABLE, DYNAMIC_SCALE)
  """First scale of loss_scale: dynamic."""
  min_loss_scale: Scale = key(0.0009765625, CHANGEABLE, DYNAMIC_SCALE)
  """Smallest scale of loss_scale: dynamic."""
  max_loss_scale: Scale = key(16777216.0, CHANGEABLE, DYNAMIC_SCALE)
  """Largest scale of loss_scale: dynamic."""
  loss_scale_window: Positive = key(1000, CHANGEABLE, DYNAMIC_SCALE)
  """Steps without a skipped one after which a dynamic scale grows."""
  loss_scale_growth_factor: Annotated[float, Range(low=1.0625, high=1024)] = key(
    2.0, CHANGEABLE, DYNAMIC_SCALE
  )
  """Factor by which it grows."""
  loss_scale_backoff_factor: Annotated[float, Range(low=0.001, high=0.9375)] = key(
    0.5, CHANGEABLE, DYNAMIC_SCALE
  )
  """Factor by which it shrinks when a step is skipped."""
  max_consecutive_skipped_steps: Positive = key(30, CHANGEABLE, LOSS_SCALE)
  """Consecutive skipped steps at which a run stops."""
  precision_report: bool = key(False, CHANGEABLE)
  """Write precision_report.txt and .json at a run's begin and end: which layers underflow or
  overflow in which format, by exponents of what they compute."""


def expert_width(config: ModelConfig) -> int:
  """Returns the width of one expert's hidden layer."""
  return config.base_mlp_dim if config.base_moe_mlp_dim == -1 else config.base_moe_mlp_dim


def mixture_share(config: ModelConfig) -> float:
  """Returns the part of the layers that have experts."""
  if config.num_experts == 1:
    return 0
  return 1 - config.first_num_dense_layers / config.base_num_decoder_layers


def hidden_width(config: ModelConfig) -> float:
  """Returns the numbers of a token between the matrices of a feed-forward layer, those of all of its
  experts; where layers differ, on average."""
  share = mixture_share(config)
  if not share:
    return config.base_mlp_dim
  mixed = expert_width(config) * (config.num_experts_per_tok + config.shared_experts)
  return mixed if share == 1 else share * mixed + (1 - share) * config.base_mlp_dim


def expert_parameters(config: ModelConfig) -> float:
  """Returns the parameters of a layer's routed experts; 0 where there are none, and where layers differ
  the average."""
  matrices, share = 2 if config.mlp_activation == "gelu" else 3, mixture_share(config)
  whole = config.num_experts * matrices * config.base_emb_dim * expert_width(config)
  return whole if share == 1 else share * whole


def idle_parameters(config: ModelConfig) -> float:
  """Returns the parameters of a layer that a token does not meet: of experts that it is not sent to;
  where layers differ, on average."""
  if config.num_experts == 1:
    return 0
  matrices = 2 if config.mlp_activation == "gelu" else 3
  others = config.num_experts - config.num_experts_per_tok
  idle, share = (
    others * matrices * config.base_emb_dim * expert_width(config),
    mixture_share(config),
  )
  return idle if share == 1 else share * idle
