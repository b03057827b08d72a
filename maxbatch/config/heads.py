"""Sizes of attention, which keys give in several ways: as heads, or by latent vectors (MLA)."""

from maxbatch.config.schema import ModelConfig


def is_latent(config: ModelConfig) -> bool:
  """Returns whether keys and values of a token are made of one latent vector."""
  return config.attention_type == "mla"


def query_dim(config: ModelConfig) -> int:
  """Returns the numbers of a query, and of a key, of one head."""
  if is_latent(config):
    return config.qk_nope_head_dim + config.qk_rope_head_dim
  return config.head_dim


def value_dim(config: ModelConfig) -> int:
  """Returns the numbers of a value of one head."""
  return config.v_head_dim if is_latent(config) else config.head_dim


def rotated_dim(config: ModelConfig) -> int:
  """Returns how many numbers of a query and of a key have a position."""
  return config.qk_rope_head_dim if is_latent(config) else config.head_dim


def attention_width(config: ModelConfig) -> float:
  """Returns the numbers of all heads that a product of attention contracts or gives, on average of the
  products with keys and with values."""
  return config.base_num_query_heads * (query_dim(config) + value_dim(config)) / 2


def cached_numbers(config: ModelConfig) -> int:
  """Returns the numbers that a layer keeps of a token while a text is written."""
  return config.base_num_kv_heads * (query_dim(config) + value_dim(config))


def attention_matrices(config: ModelConfig) -> tuple[tuple[int, int], ...]:
  """Returns the matrices of a layer's attention, each (in, out)."""
  D, N, K = config.base_emb_dim, config.base_num_query_heads, config.base_num_kv_heads
  queries, values = N * query_dim(config), value_dim(config)
  if not is_latent(config):
    keys = K * config.head_dim
    return ((D, queries), (D, keys), (D, keys), (queries, D))
  rank, latent = config.q_lora_rank, config.kv_lora_rank
  to_queries = ((D, rank), (rank, queries)) if rank else ((D, queries),)
  made = N * (config.qk_nope_head_dim + values)
  to_keys = ((D, latent + config.qk_rope_head_dim), (latent, made))
  return (*to_queries, *to_keys, (N * values, D))
