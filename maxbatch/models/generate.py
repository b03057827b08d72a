"""A few lines of text from a model of bytes, to see what it has learned.

T tokens of prompt and text, D width, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxbatch.data import tokenizer
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters


def generate(model: Model, params: Parameters, prompt: str, length: int, temperature: float) -> str:
  """The prompt and `length` bytes after it, the same at every call.

  Each token costs a forward pass over the whole text: meant for samples, not for serving.

  Args:
    model: the model; its vocabulary must begin with the 256 bytes.
    params: its parameters, wherever they lie.
    prompt: text to begin with.
    length: bytes to add.
    temperature: 0 takes the likeliest byte.
  """
  start = [tokenizer.BOS, *tokenizer.encode(prompt.encode()).tolist()]
  tokens_T = jnp.array(start + [0] * length, jnp.int32)
  write = jax.jit(functools.partial(_write, model, len(start), temperature))
  return tokenizer.decode(write(_on_one_device(params), tokens_T))


def _write(
  model: Model, start: int, temperature: float, params: Parameters, tokens_T: jax.Array
) -> jax.Array:
  bound = model.bind(params)

  def add(at: jax.Array, tokens_T: jax.Array) -> jax.Array:
    rows = Rows(tokens_T[None], tokens_T[None], jnp.ones((1, len(tokens_T))), jnp.zeros(1, int))
    hidden_D = bound(rows, None)[0, at - 1]
    logits_V = (hidden_D @ bound.output_matrix()).astype(jnp.float32)[:256]
    choice = jnp.argmax(logits_V)
    if temperature > 0:
      key = jax.random.fold_in(jax.random.key(0), at)
      choice = jax.random.categorical(key, logits_V / temperature)
    return tokens_T.at[at].set(choice.astype(jnp.int32))

  return jax.lax.fori_loop(start, len(tokens_T), add, tokens_T)


def _on_one_device(params: Parameters) -> Any:
  """The first device's copy where there is a whole one; else the parameters as they lie."""
  leaves = jax.tree.leaves(params)
  if not all(leaf.is_fully_replicated for leaf in leaves):
    return params
  return jax.tree.map(lambda leaf: leaf.addressable_data(0), params)
