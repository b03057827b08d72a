"""From prompts to what a sampler takes, and from its tokens to text.

B rows, P places of the prompts, V vocabulary.
"""

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.config.schema import RunConfig
from maxbatch.data.tokenizer import Ids, Tokenizer, ordinary_ids
from maxbatch.errors import UserError
from maxbatch.sampling.choice import Choice, Vocabulary
from maxbatch.sampling.sampler import Prompts

_MULTIPLE = 16
"""The places of prompts are multiples of this: similar lengths share a compiled program."""
_INCOMPLETE = "\ufffd"


def choice_of(run: RunConfig) -> Choice:
  """Returns how the keys say that a token is chosen."""
  return Choice(
    run.decode_sampling_temperature,
    run.decode_sampling_top_k,
    run.decode_sampling_nucleus_p,
    run.decode_sampling_min_p,
  )


def encoded(tokenizer: Tokenizer, prompt: str, *, add_bos: bool) -> list[int]:
  """Returns the ids of a prompt; an empty one begins a document, whatever `add_bos` says."""
  # Where the locale is not UTF-8, Python hands on what it cannot read as surrogates.
  typed = tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist()
  return [tokenizer.bos_id, *typed] if add_bos or not typed else typed


def prompts_of(ids: Sequence[Sequence[int]], seed: int, numbers: Sequence[int]) -> Prompts:
  """Pads prompts on the left.

  Args:
    numbers: of each row among those of the same prompt. A text's random key is a function of seed,
      prompt and number alone, so that no other prompt changes what is written.
  """
  longest = max(map(len, ids))
  tokens_BP = np.zeros((len(ids), -(-longest // _MULTIPLE) * _MULTIPLE), np.int32)
  for row_P, prompt in zip(tokens_BP, ids, strict=True):
    row_P[len(row_P) - len(prompt) :] = prompt
  hashes = [zlib.crc32(np.array(prompt, "<i4").tobytes()) for prompt in ids]
  folded = jax.vmap(
    lambda *parts: functools.reduce(jax.random.fold_in, parts, jax.random.key(seed))
  )
  keys_B = folded(jnp.array(hashes, jnp.uint32), jnp.array(numbers, jnp.uint32))
  return Prompts(tokens_BP, np.array([len(prompt) for prompt in ids], np.int32), keys_B)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int] = ()) -> Vocabulary:
  """Returns the tokens that stand for text, and those of `ends`, of a model's `vocab_size` logits.
  Raises UserError: the model has no logit for some token."""
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"vocab_size={vocab_size} must be at least the {tokenizer.vocab_size} tokens of the tokenizer; "
      "give the tokenizer that the model was trained with"
    )
  ends_V = np.zeros(vocab_size, bool)
  ends_V[[end for end in ends if end < vocab_size]] = True
  allowed_V = ends_V.copy()
  allowed_V[ordinary_ids(tokenizer)] = True
  return Vocabulary(allowed_V, ends_V)


def text_after(tokenizer: Tokenizer, prompt: Ids, ids: Ids) -> str:
  """Returns the text of `ids` after a prompt: a tokenizer may drop the first one's space."""
  before, both = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
  return both.removeprefix(before) if both.startswith(before) else tokenizer.decode(ids)


class TextStream:
  """A text in pieces as its tokens come; a character whose bytes have not all come is held back."""

  def __init__(self, tokenizer: Tokenizer, prompt: Ids):
    self._tokenizer, self._prompt, self._shown = tokenizer, prompt, ""

  def more(self, ids: Ids, *, is_all: bool = False) -> str:
    """Returns the new part of a text, of all of its tokens until now."""
    text = text_after(self._tokenizer, self._prompt, ids)
    whole = text if is_all else text.rstrip(_INCOMPLETE)
    if not whole.startswith(self._shown):
      return ""
    new, self._shown = whole[len(self._shown) :], whole
    return new
