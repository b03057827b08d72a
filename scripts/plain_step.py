"""The default transformer's training step written by hand in plain JAX, as a yardstick.

No modules, no sharding table, no accumulation, no optimizer library: what one would write for one
model on one day. B rows, T tokens, D width, N heads of H, F feed-forward width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from maxbatch.config.schema import ModelConfig

B1, B2, EPSILON, DECAY = 0.9, 0.95, 1e-8, 0.1


def init(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
  """Parameters by name; layers stacked in front."""
  D, F, V, L = (
    config.base_emb_dim,
    config.base_mlp_dim,
    config.vocab_size,
    config.base_num_decoder_layers,
  )
  width = config.base_num_query_heads * config.head_dim
  shapes = {
    "embedding": (V, D),
    "head": (D, V),
    "q": (L, D, width),
    "k": (L, D, width),
    "v": (L, D, width),
    "o": (L, width, D),
    "gate": (L, D, F),
    "up": (L, D, F),
    "down": (L, F, D),
  }
  keys = jax.random.split(key, len(shapes))
  params = {
    name: 0.02 * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }
  return params | {"norm1": jnp.ones((L, D)), "norm2": jnp.ones((L, D)), "norm3": jnp.ones(D)}


def loss(config: ModelConfig, params: dict[str, jax.Array], tokens: jax.Array, targets: jax.Array):
  """Mean cross entropy of tokens int32[B, T]."""
  B, T = tokens.shape
  N, H = config.base_num_query_heads, config.head_dim
  angles = jnp.arange(T)[:, None] * 10000.0 ** (-jnp.arange(0, H, 2) / H)[None]
  cos, sin = (f(angles).astype(params["q"].dtype) for f in (jnp.cos, jnp.sin))
  mask = jnp.tril(jnp.ones((T, T), bool))

  def norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale

  def dense(x, w):
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])

  def rope(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  def heads(x):
    return x.reshape(B, T, N, H).transpose(0, 2, 1, 3)

  def layer(x, w):
    y = norm(x, w["norm1"])
    q, k, v = (heads(dense(y, w[name])) for name in "qkv")
    scores = rope(q) @ rope(k).mT / H**0.5
    wide = jnp.where(mask, scores.astype(jnp.float32), -1e30)
    weights = jax.nn.softmax(wide, -1).astype(x.dtype)
    x = x + dense((weights @ v).transpose(0, 2, 1, 3).reshape(B, T, N * H), w["o"])
    y = norm(x, w["norm2"])
    return x + dense(jax.nn.silu(dense(y, w["gate"])) * dense(y, w["up"]), w["down"]), None

  names = ("q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2")
  x, _ = jax.lax.scan(layer, params["embedding"][tokens], {name: params[name] for name in names})
  logits = dense(norm(x, params["norm3"]), params["head"])
  log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
  return -jnp.take_along_axis(log_p, targets[..., None], -1).mean()


def step(config: ModelConfig, state, tokens, targets, rate, dtype=jnp.float32):
  """One AdamW update with clipping; state is (parameters, mean, mean of squares, count).

  Forward and backward pass are in `dtype`, norms, softmax and what is kept in float32.
  """
  params, mean, square, count = state

  def narrow_loss(wide):
    return loss(config, jax.tree.map(lambda p: p.astype(dtype), wide), tokens, targets)

  value, grads = jax.value_and_grad(narrow_loss)(params)
  size = jnp.sqrt(sum((g * g).sum() for g in grads.values()))
  grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / size), grads)
  count = count + 1
  mean = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, mean, grads)
  square = jax.tree.map(lambda s, g: B2 * s + (1 - B2) * g * g, square, grads)

  def update(p, m, s):
    m_hat, s_hat = m / (1 - B1**count), s / (1 - B2**count)
    return p - rate * (m_hat / (jnp.sqrt(s_hat) + EPSILON) + DECAY * p)

  return (jax.tree.map(update, params, mean, square), mean, square, count), value
