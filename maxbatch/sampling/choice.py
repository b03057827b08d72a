"""The choice of the next token from the model's logits.

B rows, V vocabulary, K largest logits of each row.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NEVER = float("-inf")


@dataclasses.dataclass(frozen=True)
class Choice:
  """How a token is chosen. What is cut away is cut in the order of the fields, as transformers does."""

  temperature: float = 1.0
  """Divides the logits; 0 takes the most likely token."""
  top_k: int = 0
  """Only this many of the most likely tokens; 0: all."""
  top_p: float = 1.0
  """Only the smallest set of likely tokens with this probability (Holtzman et al. 2020); 1: all."""
  min_p: float = 0.0
  """Only tokens with at least this fraction of the highest probability (Nguyen et al. 2024); 0: all."""

  @property
  def leaves_out(self) -> bool:
    """Whether some tokens that the model gives a probability cannot be chosen."""
    return bool(self.top_k or self.top_p < 1 or self.min_p)


class Vocabulary(NamedTuple):
  """What ids of the model are to a text."""

  allowed_V: np.ndarray | jax.Array
  """bool: what may be written."""
  ends_V: np.ndarray | jax.Array
  """bool: what ends a text; it is its last token."""


def choose(
  logits_BV: jax.Array,
  keys_B: jax.Array,
  number: jax.Array,
  choice: Choice,
  *,
  of_kept: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chooses each row's next token; returns it, its log-probability, and what it was chosen from.

  Args:
    logits_BV: float32, −∞ where a token is not allowed.
    keys_B: a random key for each text: what a row draws does not depend on the others.
    number: int32: which of its tokens this is, from 0.
    of_kept: whether log-probabilities are by the tokens that top_k, top_p and min_p leave; else by all
      that are allowed.

  Returns:
    int32[B]; float32[B]: of the tokens chosen, by the logits over the temperature (1 if that is 0);
    bool[B, V]: which tokens are left.
  """
  scaled_BV = logits_BV / (choice.temperature or 1.0)
  cut_BV = cut(scaled_BV, choice)
  if choice.temperature == 0:
    ids_B = jnp.argmax(logits_BV, axis=-1)
  else:
    keys_B = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)
    ids_B = jax.vmap(jax.random.categorical)(keys_B, cut_BV)
  of_BV = cut_BV if of_kept else scaled_BV
  chosen_B = jnp.take_along_axis(of_BV, ids_B[:, None], 1)[:, 0]
  return ids_B.astype(jnp.int32), chosen_B - jax.nn.logsumexp(of_BV, axis=1), cut_BV > _NEVER


def cut(logits_BV: jax.Array, choice: Choice) -> jax.Array:
  """Returns the logits with −∞ where top_k, top_p or min_p leave a token out."""
  V = logits_BV.shape[1]
  if choice.top_k or choice.top_p < 1:
    largest_BK = jax.lax.top_k(logits_BV, min(choice.top_k or V, V))[0]
    probability_BK = jax.nn.softmax(largest_BK)
    before_BK = jnp.cumsum(probability_BK, axis=1) - probability_BK
    # The likeliest stays, however small top_p is.
    kept_B1 = jnp.maximum((before_BK < choice.top_p).sum(1, keepdims=True), 1)
    least_B1 = jnp.take_along_axis(largest_BK, kept_B1 - 1, 1)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, _NEVER)
  if choice.min_p:
    least_B1 = logits_BV.max(1, keepdims=True) + math.log(choice.min_p)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, _NEVER)
  return logits_BV


_WORD = 32


def num_words(vocab_size: int) -> int:
  """Returns the number of words that `packed` makes of the tokens of a vocabulary."""
  return -(-vocab_size // _WORD)


def packed(kept_BV: jax.Array) -> jax.Array:
  """Packs the tokens as bits of uint32[B, W]."""
  B, V = kept_BV.shape
  bits_BWX = jnp.pad(kept_BV, ((0, 0), (0, -V % _WORD))).reshape(B, -1, _WORD).astype(jnp.uint32)
  return (bits_BWX << jnp.arange(_WORD, dtype=jnp.uint32)[None, None]).sum(-1, dtype=jnp.uint32)


def unpacked(bits_XW: jax.Array, vocab_size: int) -> jax.Array:
  """Unpacks the bool[…, V] that `packed` made the bits of."""
  *lead, words = bits_XW.shape
  places = jnp.arange(_WORD, dtype=jnp.uint32)[(None,) * (len(lead) + 1)]
  bits = (bits_XW[..., None] >> places) & 1
  return bits.reshape(*lead, words * _WORD)[..., :vocab_size].astype(bool)
