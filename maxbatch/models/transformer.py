"""A decoder-only transformer that expresses GPT-2, Llama, Mistral, Mixtral, Qwen, Gemma and OLMo.

B rows, T tokens, D width of the residual stream, V vocabulary, L layers.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.schema import ModelConfig, is_latent, rotated_dim
from maxbatch.data.rows import Rows, in_order
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import constrain
from maxbatch.models.attention import (
  Attention,
  AttentionContext,
  LatentAttention,
  attention_contexts,
  next_token_contexts,
)
from maxbatch.models.cache import Cache, Decode, empty_cache, in_row_order
from maxbatch.models.experts import Experts
from maxbatch.models.forms import embedded
from maxbatch.models.layers import (
  FeedForward,
  Norm,
  Outputs,
  dropout,
  fold,
  hidden_of,
  outputs_of,
  parameter,
  with_sums,
)
from maxbatch.models.probes import (
  Probe,
  TiedProbe,
  for_each_row,
  given_out,
  looked_up,
  looked_up_tied,
  probe,
  probe_values,
)
from maxbatch.models.remat import named, validate_remat
from maxbatch.models.stacks import apply_layers, cached_layers, stacked_blocks
from maxbatch.precision.policy import PLAIN, Policy

_EMBEDDING_STD = 0.02


class Block(nnx.Module):
  """One layer: attention and feed-forward, each normalized before, after or both, and added up."""

  policy: Policy = PLAIN

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
    # Two additions to the stream per layer: keeps its variance near one at any depth (GPT-2).
    residual_scale = 1.0 / math.sqrt(2 * config.base_num_decoder_layers)
    self.attention_norm = _norm(config, config.use_pre_norm)
    attention = LatentAttention if is_latent(config) else Attention
    self.attention = attention(rngs, config, residual_scale)
    self.post_attention_norm = _norm(config, config.use_post_attn_norm)
    self.mlp_norm = _norm(config, config.use_pre_norm)
    feed = Experts if config.num_experts > 1 else FeedForward
    self.mlp = feed(rngs, config, residual_scale)
    self.post_mlp_norm = _norm(config, config.use_post_ffw_norm)
    self.dropout_rate = config.dropout_rate

  def __call__(
    self, x_BTD: jax.Array, at: AttentionContext, keys_B: jax.Array | None
  ) -> jax.Array | Outputs:
    """Returns the stream after the layer (B, T, D), and what its feed-forward adds to the step."""
    x_BTD = named(x_BTD, "decoder_layer_input")
    y_BTD = self.attention(_normalized(self.attention_norm, x_BTD), at)
    y_BTD = _normalized(self.post_attention_norm, y_BTD)
    x_BTD = self.policy.cast(
      x_BTD + dropout(y_BTD, self.dropout_rate, fold(keys_B, 0), at.places_T)
    )
    y_BTD = _normalized(self.mlp_norm, x_BTD)
    output = self.mlp(y_BTD, at) if isinstance(self.mlp, Experts) else self.mlp(y_BTD)
    y_BTD, terms, stats = outputs_of(output)
    y_BTD = _normalized(self.post_mlp_norm, y_BTD)
    x_BTD = self.policy.cast(
      x_BTD + dropout(y_BTD, self.dropout_rate, fold(keys_B, 1), at.places_T)
    )
    return with_sums(constrain(x_BTD, ("batch", "length", "activation_embed")), terms, stats)


def _norm(config: ModelConfig, is_used: bool) -> Norm | None:
  return Norm(config, (config.base_emb_dim,), ("embed",)) if is_used else None


def _normalized(norm: Norm | None, x_BTD: jax.Array) -> jax.Array:
  return x_BTD if norm is None else norm(x_BTD)


class Transformer(nnx.Module):
  """Token ids in, normalized hidden states out; the loss applies the output matrix itself.

  The layers' parameters are stacked in a leading dim L always: checkpoints are the same.
  """

  block: Callable[[nnx.Rngs, ModelConfig], Block] = Block
  """What makes a layer; a subclass names its own."""
  offers_cache = True
  """Whether tokens see others through `Attention` alone, whose keys and values can be kept while a
  text is written. A subclass whose tokens do, too, says so itself."""
  takes_any_order = True
  """Whether devices may share a row with its first and last tokens together, in `Rows.places`: what looks at
  neighbours of a token must know."""
  policy: Policy = PLAIN
  """In which format it computes; `build_model` sets it, as in all modules that have it."""
  exponents: Probe | None = None
  """Likewise, for a report of its exponents (models/probes.py)."""
  tied_probe: TiedProbe | None = None
  """What the lookup of a measured call hands to the head, where both have one table."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, max_target_length: int):
    """Raises UserError if sizes contradict each other."""
    validate(config, max_target_length)
    D, V = config.base_emb_dim, config.vocab_size
    std = _EMBEDDING_STD
    self.embedding = parameter(rngs, std, (V, D), ("vocab", "embed"))
    longest = config.max_position_embeddings
    learned = config.position_embedding == "learned"
    shape = (max_target_length if longest == -1 else longest, D)
    self.position_embedding = (
      parameter(rngs, std, shape, ("position", "embed")) if learned else None
    )
    dense = config.first_num_dense_layers
    plain = dataclasses.replace(config, num_experts=1)
    self.dense_layers = stacked_blocks(rngs, plain, self.block, dense) if dense else None
    rest = config.base_num_decoder_layers - dense
    self.layers = stacked_blocks(rngs, config, self.block, rest)
    self.final_norm = Norm(config, (D,), ("embed",))
    tied = config.logits_via_embedding
    self.head = None if tied else parameter(rngs, std, (D, V), ("embed", "vocab"))
    self.embedding_probe = probe("embedding")  # Of a tied table, of both of its uses.
    self.position_probe = probe("position_embedding") if learned else None
    self.head_probe = None if tied else probe("head")
    self.config = config

  def __call__(self, rows: Rows, keys_B: jax.Array | None) -> jax.Array | Outputs:
    """Returns hidden states (B, T, D) after the final norm, in the format of the computation, and the
    terms and statistics of the layers."""
    x_BTD = self.first_layers(self.embed(rows, keys_B), rows, keys_B)
    first = self.config.first_num_dense_layers
    outputs = self.apply_layers(x_BTD, rows, keys_B, first)
    x_BTD, terms, stats = outputs_of(outputs)
    return with_sums(self.normalize(x_BTD), terms, stats)

  def embed(self, rows: Rows, keys_B: jax.Array | None) -> jax.Array:
    """Returns what the first layer is given: (B, T, D)."""
    # Layers fold their own index, from 0, into the rows' keys; the embedding takes the next one.
    embedding_keys_B = fold(keys_B, self.config.base_num_decoder_layers)
    rate = self.config.dropout_rate
    return dropout(self._embed(rows), rate, embedding_keys_B, rows.places)

  def first_layers(self, x_BTD: jax.Array, rows: Rows, keys_B: jax.Array | None) -> jax.Array:
    """Applies the layers without experts that come before those that are alike."""
    if self.dense_layers is None:
      return x_BTD
    at = attention_contexts(self.config, rows)
    return hidden_of(apply_layers(self.dense_layers, self.config, x_BTD, at, keys_B, 0))

  def apply_layers(
    self, x_BTD: jax.Array, rows: Rows, keys_B: jax.Array | None, first: jax.Array | int
  ) -> jax.Array | Outputs:
    """Applies the layers bound here, all alike, of which the first is layer `first` of the model."""
    at = attention_contexts(self.config, rows)
    at = dataclasses.replace(at, counts_BT=rows.weights != 0, routes=rows.routes)
    return apply_layers(self.layers, self.config, x_BTD, at, keys_B, first)

  def prefill(self, rows: Rows, places: int) -> tuple[jax.Array, Cache]:
    """Returns hidden states (B, T, D) as a call does, and a cache of so many places with these
    tokens, as they were read, in the first."""
    B = rows.inputs.shape[0]
    at = attention_contexts(self.config, rows)
    cache = empty_cache(
      self.config, self.policy.dtype, self.config.base_num_decoder_layers, B, places
    )
    layers = self._cached_layers()
    x_BTD, cache = layers(self.embed(rows, None), at, cache, 0, is_new=True)
    cache = cache if rows.places is None else in_row_order(cache, rows.places)
    return self.normalize(x_BTD), cache

  def decoder(self) -> Decode:
    """Returns a pass over one more token of each row, to be called in a loop over tokens."""
    layers = self._cached_layers()

    def decode(
      tokens_B: jax.Array, cache: Cache, place: jax.Array, begins_B: jax.Array
    ) -> tuple[jax.Array, Cache]:
      tokens_B1, positions_B1 = tokens_B[:, None], place - begins_B[:, None]
      weights_B1, ids_B = jnp.ones(tokens_B1.shape), jnp.zeros_like(tokens_B)
      rows = Rows(tokens_B1, tokens_B1, weights_B1, ids_B, positions=positions_B1)
      at = next_token_contexts(self.config, begins_B, place)
      x_B1D, cache = layers(self.embed(rows, None), at, cache, place, is_new=False)
      return self.normalize(x_B1D)[:, 0], cache

    return decode

  def _cached_layers(self) -> Callable[..., tuple[jax.Array, Cache]]:
    stacks = (self.dense_layers, self.layers)
    return cached_layers([each for each in stacks if each is not None], self.config)

  def normalize(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what the output matrix is applied to."""
    return self.final_norm(x_BTD)

  @jax.named_scope("embedding")
  def _embed(self, rows: Rows) -> jax.Array:
    """Returns tokens, and learned positions, as vectors (B, T, D)."""
    table = self.embedding
    x_BTD = embedded(table[...], table.axes, rows.inputs, self.policy)
    probe_BS = probe_values(self.embedding_probe)
    if probe_BS is not None and self.head is None:
      x_BTD, cross_BTD = looked_up_tied(x_BTD, rows.inputs, probe_BS)
      self.tied_probe = TiedProbe(probe_BS, rows.inputs, cross_BTD)
    elif probe_BS is not None:
      x_BTD = looked_up(x_BTD, rows.inputs, probe_BS)
    if self.config.scale_embedding:
      x_BTD = self.policy.cast(x_BTD * math.sqrt(self.config.base_emb_dim))
    if self.position_embedding is not None:
      x_BTD = x_BTD + self._positions(rows)
    x_BTD = given_out(x_BTD, self.policy, self.exponents)
    return constrain(x_BTD, ("batch", "length", "activation_embed"))

  def _positions(self, rows: Rows) -> jax.Array:
    """Returns learned positions as vectors (B or 1, T, D)."""
    assert self.position_embedding is not None
    table_TD, T = self.position_embedding.ready(self.policy), rows.inputs.shape[1]
    probe_BS = probe_values(self.position_probe)
    if rows.positions is not None:
      vectors_BTD = table_TD[rows.positions]
      return vectors_BTD if probe_BS is None else looked_up(vectors_BTD, rows.positions, probe_BS)
    own_TD = table_TD[:T] if rows.places is None else in_order(table_TD[:T], rows.places, 0)
    if probe_BS is not None:
      return for_each_row(own_TD, probe_BS, self.position_embedding.axes)
    return own_TD[None]

  @jax.named_scope("head")
  def output_matrix(self) -> jax.Array:
    """Returns the matrix (D, V) from hidden states to logits, in the computation's format."""
    return self.policy.cast(self.embedding[...].T if self.head is None else self.head[...])

  def output_probe(self) -> jax.Array | TiedProbe | None:
    """Returns the probe of that matrix once the rows are embedded; None: it is not measured."""
    return self.tied_probe if self.head is None else probe_values(self.head_probe)


def validate(config: ModelConfig, max_target_length: int) -> None:
  """Checks the sizes that depend on each other.

  Raises:
    UserError: naming the keys, their values and values that work.
  """
  N, K = config.base_num_query_heads, config.base_num_kv_heads
  if N % K:
    working = max(k for k in range(1, K) if N % k == 0)
    raise UserError(
      f"base_num_query_heads={N} must be a multiple of base_num_kv_heads={K}; "
      f"for example base_num_kv_heads={working}"
    )
  name = "qk_rope_head_dim" if is_latent(config) else "head_dim"
  if config.position_embedding == "rope" and rotated_dim(config) % 2:
    raise UserError(
      f"{name}={rotated_dim(config)} must be even with position_embedding=rope, which rotates pairs; "
      f"for example {name}={rotated_dim(config) + 1}"
    )
  if is_latent(config) and N != K:
    raise UserError(
      f"base_num_kv_heads={K} must be base_num_query_heads={N} with attention_type=mla, which makes keys "
      f"and values for each head; set base_num_kv_heads={N}"
    )
  if is_latent(config) and config.use_qk_norm:
    raise UserError(
      "use_qk_norm=true: attention_type=mla normalizes the latent vectors instead; set use_qk_norm=false"
    )
  _validate_positions(config, max_target_length)
  _validate_experts(config)
  validate_remat(config)


def _validate_positions(config: ModelConfig, max_target_length: int) -> None:
  longest, low = config.max_position_embeddings, config.rope_low_freq_factor
  if config.position_embedding == "learned" and -1 < longest < max_target_length:
    raise UserError(
      f"max_target_length={max_target_length} must be at most max_position_embeddings={longest}, "
      f"the positions that there are with position_embedding=learned; for example "
      f"max_target_length={longest}"
    )
  fast, slow = config.beta_fast, config.beta_slow
  if config.rope_type == "yarn" and fast <= slow:
    raise UserError(
      f"beta_fast={fast:g} must be more than beta_slow={slow:g}; for example beta_fast={32 * slow:g}"
    )
  if config.rope_type == "llama3.1" and config.rope_high_freq_factor <= low:
    raise UserError(
      f"rope_high_freq_factor={config.rope_high_freq_factor:g} must be more than "
      f"rope_low_freq_factor={low:g}; for example rope_high_freq_factor={4 * low or 1:g}"
    )


def _validate_experts(config: ModelConfig) -> None:
  """Checks the keys of a mixture.

  Raises:
    UserError: naming the keys, their values and values that work.
  """
  E, K, G = config.num_experts, config.num_experts_per_tok, config.n_routing_groups
  if E == 1:
    return
  if K == 1 and config.norm_topk_prob:
    raise UserError(
      "num_experts_per_tok=1 with norm_topk_prob=true: the weight of a token's only expert is always 1, "
      "and the router learns nothing from the loss; for example norm_topk_prob=false, or "
      "num_experts_per_tok=2"
    )
  L, dense = config.base_num_decoder_layers, config.first_num_dense_layers
  if dense >= L:
    raise UserError(
      f"first_num_dense_layers={dense} must be less than base_num_decoder_layers={L}, so that a layer has "
      f"experts; for example first_num_dense_layers={L - 1}"
    )
  if G > 0:
    _validate_groups(E, K, G, config.topk_routing_group)


def _validate_groups(E: int, K: int, G: int, kept: int) -> None:
  if E % G or E == G:
    working = max((g for g in range(2, E // 2 + 1) if E % g == 0), default=-1)
    raise UserError(
      f"num_experts={E} must be a multiple of n_routing_groups={G}, and groups have two experts at least; "
      f"for example n_routing_groups={working}"
    )
  if kept > G:
    raise UserError(
      f"topk_routing_group={kept} must be at most n_routing_groups={G}; for example topk_routing_group={G}"
    )
  if kept * (E // G) < K:
    raise UserError(
      f"num_experts_per_tok={K} must be at most the {kept * (E // G)} experts of topk_routing_group={kept} "
      f"of n_routing_groups={G} groups; for example topk_routing_group={-(-K * G // E)}"
    )
