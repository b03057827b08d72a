"""Sampling: the cache changes nothing, and a text is its prompt's, its key's and nobody else's."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mesh
from tiny_model import GPT2_LIKE, VOCABULARY, loud_parameters, tiny_model

from maxbatch.data.rows import Rows
from maxbatch.models import transformer
from maxbatch.models.registry import MODELS, Model, Parameters
from maxbatch.sampling.choice import Choice, Vocabulary
from maxbatch.sampling.sampler import Prompts, Sampler, on_fewest_devices, sample, stream
from maxbatch.sampling.text import prompts_of
from maxbatch.training.state import abstract_state, shardings
from maxbatch.training.optimizer import make_optimizer

LENGTH = 20
TEXTS = [[34, 3, 7, 7, 30], [34], [34, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [34, 20, 20]]
LETTERS = Vocabulary(np.arange(VOCABULARY) < 34, np.zeros(VOCABULARY, bool))
GREEDY, WARM = Choice(temperature=0.0), Choice(temperature=1.0)
MIXED = (
  "use_qk_norm=true",
  "sliding_window_size=4",
  "layer_types=[sliding_attention,full_attention]",
  "local_rope_max_timescale=100",
  "attn_logits_soft_cap=5",
  "final_logits_soft_cap=4",
  "logits_via_embedding=true",
)
FAMILIES = {
  "llama": (),
  "gpt2": GPT2_LIKE,
  "mixed": MIXED,
  "unrolled": (*MIXED, "scan_layers=false"),
}
every_family = pytest.mark.parametrize("keys", FAMILIES.values(), ids=FAMILIES)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: Model, parameters: Parameters, tokens_1T: jax.Array) -> jax.Array:
  """float32[T, V] of one row."""
  rows = Rows(tokens_1T, tokens_1T, jnp.ones(tokens_1T.shape), jnp.zeros(1, int))
  bound, cap = model.bind(parameters), model.config.final_logits_soft_cap
  logits_TV = bound(rows, None)[0] @ bound.output_matrix()
  return cap * jnp.tanh(logits_TV / cap) if cap else logits_TV


def log_probs_after(model: Model, parameters: Parameters, tokens: Sequence[int]) -> np.ndarray:
  """float32[V]: of what follows the last LENGTH tokens, by a pass over a row of them alone."""
  seen = list(tokens)[-LENGTH:]
  row = jnp.array([seen + [0] * (LENGTH - len(seen))], jnp.int32)
  logits_V = logits_of(model, parameters, row)[len(seen) - 1]
  return np.asarray(jax.nn.log_softmax(jnp.where(LETTERS.allowed_V, logits_V, -jnp.inf)))


def written(samples, row: int) -> list[int]:
  return np.asarray(samples.tokens_BN)[row, : int(samples.lengths_B[row])].tolist()


def prompts(texts: Sequence[Sequence[int]], more_padding: int = 0) -> Prompts:
  """The prompts, with the keys that are theirs wherever they stand."""
  made = prompts_of(texts, seed=5, numbers=[0] * len(texts))
  padded_BP = np.pad(np.asarray(made.tokens_BP), ((0, 0), (more_padding, 0)))
  return made._replace(tokens_BP=padded_BP)


@every_family
def test_each_token_is_the_likeliest_after_those_before_it(keys):
  # More than a row of training has: the cache serves until there, then whole passes do.
  model = tiny_model(*keys, length=LENGTH)
  parameters = loud_parameters(model)
  samples = sample(Sampler(model, GREEDY, 14, LENGTH), parameters, prompts(TEXTS), LETTERS)
  for row, text in enumerate(TEXTS):
    tokens = list(text)
    for number, token in enumerate(written(samples, row)):
      log_probs_V = log_probs_after(model, parameters, tokens)
      assert token == np.argmax(log_probs_V)
      found = float(samples.log_probs_BN[row, number])
      np.testing.assert_allclose(found, log_probs_V[token], atol=2e-5)
      tokens.append(token)
    assert len(tokens) == len(text) + 14
