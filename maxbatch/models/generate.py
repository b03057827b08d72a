"""A few lines of text from a model, to see what it has learned.

T tokens of prompt and text, W of them in view, D width, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.data.rows import Rows
from maxbatch.data.tokenizer import Tokenizer, ordinary_ids
from maxbatch.models.registry import Model, Parameters


def generate(
  model: Model,
  params: Parameters,
  tokenizer: Tokenizer,
  prompt: str,
  length: int,
  temperature: float,
  max_target_length: int,
  *,
  add_bos: bool = True,
) -> str:
  """The prompt and the text of `length` tokens after it, the same at every call.

  Each token costs a forward pass over those before it: meant for samples, not for serving.

  Args:
    model: the model, whose vocabulary holds the tokenizer's.
    params: its parameters, wherever they lie.
    tokenizer: what the model was trained with.
    prompt: text to begin with.
    length: tokens to add.
    temperature: 0 takes the likeliest token.
    max_target_length: tokens of a row in training. A token follows from at most as many before it:
      the model knows no others, and learned positions end there.
    add_bos: begin with the token that begins a document, as an empty prompt always does.
  """
  # Where the locale is not UTF-8, Python hands on what it cannot read as surrogates.
  as_typed = prompt.encode(errors="surrogateescape")
  typed = tokenizer.encode(as_typed).tolist()
  start = [tokenizer.bos_id, *typed] if add_bos or not typed else typed
  tokens_T = jnp.array(start + [0] * length, jnp.int32)
  window = min(max_target_length, len(tokens_T))
  ids = np.asarray(ordinary_ids(tokenizer), np.int32)
  written_T = _write(model, window, temperature, _on_one_device(params), ids, tokens_T, len(start))
  return tokenizer.decode(np.asarray(written_T))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _write(
  model: Model,
  window: int,
  temperature: float,
  params: Parameters,
  ids: jax.Array,
  tokens_T: jax.Array,
  start: jax.Array,
) -> jax.Array:
  """`tokens_T` with `ids` from `start` on, those that stand for text, in place of what is there."""
  bound = model.bind(params)

  def add(at: jax.Array, tokens_T: jax.Array) -> jax.Array:
    first = jnp.maximum(at - window, 0)
    tokens_1W = jax.lax.dynamic_slice(tokens_T, (first,), (window,))[None]
    rows = Rows(tokens_1W, tokens_1W, jnp.ones((1, window)), jnp.zeros(1, int))
    hidden_D = bound(rows, None)[0, at - 1 - first]
    logits_V = (hidden_D @ bound.output_matrix()).astype(jnp.float32)[ids]
    cap = model.config.final_logits_soft_cap
    logits_V = cap * jnp.tanh(logits_V / cap) if cap else logits_V
    choice = jnp.argmax(logits_V)
    if temperature > 0:
      key = jax.random.fold_in(jax.random.key(0), at)
      choice = jax.random.categorical(key, logits_V / temperature)
    return tokens_T.at[at].set(ids[choice])

  return jax.lax.fori_loop(start, len(tokens_T), add, tokens_T)


def _on_one_device(params: Parameters) -> Any:
  """The first device's copy where there is a whole one; else the parameters as they lie."""
  leaves = jax.tree.leaves(params)
  if not all(leaf.is_fully_replicated for leaf in leaves):
    return params
  return jax.tree.map(lambda leaf: leaf.addressable_data(0), params)
