"""A model of a few hundred weights, and rows to feed it, for tests of the model and the loss."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.config.load import load_config
from maxbatch.config.schema import Config, ModelConfig
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters, build_model
from maxbatch.precision.policy import policy_of

VOCABULARY = 37
_SIZES = (
  f"vocab_size={VOCABULARY}",
  "base_emb_dim=16",
  "base_num_decoder_layers=2",
  "base_num_query_heads=4",
  "base_num_kv_heads=2",
  "head_dim=6",
  "base_mlp_dim=24",
)
GPT2_LIKE = (
  "base_num_kv_heads=4",
  "mlp_activation=gelu",
  "normalization=layernorm",
  "position_embedding=learned",
  "logits_via_embedding=true",
  "attention_qkv_bias=true",
  "attention_out_bias=true",
  "mlp_bias=true",
)
GEMMA_LIKE = (
  "mlp_activation=geglu",
  "normalization=zero_centered_rmsnorm",
  "use_post_attn_norm=true",
  "use_post_ffw_norm=true",
  "scale_embedding=true",
  "sliding_window_size=4",
  "layer_types=[sliding_attention, full_attention]",
  "local_rope_max_timescale=10",
  "query_pre_attn_scalar=5",
  "attn_logits_soft_cap=0.5",
  "final_logits_soft_cap=2",
  "logits_via_embedding=true",
)
"""All that Gemma 2 and 3 have, in one."""
OLMO_LIKE = (
  "use_pre_norm=false",
  "use_post_attn_norm=true",
  "use_post_ffw_norm=true",
  "use_qk_norm=true",
  "qk_norm_across_heads=true",
)


def tiny_config(*overrides: str) -> ModelConfig:
  """The model section of base.yml with tiny sizes and `overrides`."""
  return _load(overrides).model


def _load(overrides: Sequence[str]) -> Config:
  return load_config(["config=base", *_SIZES, *overrides])


@functools.cache
def tiny_model(*overrides: str, length: int = 12) -> Model:
  """A tiny Llama-like model for rows of `length` tokens."""
  config = _load(overrides)
  policy = policy_of(config.precision)
  return build_model(config.model, length, config.noise.gns, policy=policy)


def loud_parameters(model: Model) -> Parameters:
  """Parameters large enough for uneven attention, no bias zero and no scale one."""
  leaves, structure = jax.tree.flatten(model.shapes())
  random = np.random.default_rng(1)
  loud = [jnp.asarray(random.normal(size=x.shape) * 0.3, x.dtype) for x in leaves]
  return jax.tree.unflatten(structure, loud)


def random_rows(batch: int, length: int = 12, seed: int = 0) -> Rows:
  """Rows of random tokens, the samples 10, 11, …"""
  tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length + 1)).astype(np.int32)
  return Rows(
    inputs=jnp.asarray(tokens[:, :-1]),
    targets=jnp.asarray(tokens[:, 1:]),
    weights=jnp.ones((batch, length)),
    sample_ids=jnp.arange(10, 10 + batch),
  )
