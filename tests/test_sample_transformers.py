"""Greedy texts equal those of transformers, token for token, and their log-probabilities do; and the
choice cuts away what its processors do.

The tiny random models of test_families.py; prompts of different lengths, padded on the left on both
sides. N new tokens, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_imports import WhenUsed
from test_families import USED_TOKENS, Pair, T, pair, taken, the_pages_family

from maxbatch.sampling.choice import Choice, Vocabulary, cut
from maxbatch.sampling.sampler import Sampler, sample
from maxbatch.sampling.text import prompts_of

torch = WhenUsed("torch")
transformers = WhenUsed("transformers")

FIXTURES = pair, the_pages_family

LENGTHS = (7, 1, 4)
N = 12
"""Windows of 5 are crossed by all rows."""


def test_greedy_texts_are_those_of_transformers(pair: Pair):
  draw = np.random.default_rng(1)
  prompts = [draw.integers(0, USED_TOKENS, length).tolist() for length in LENGTHS]
  longest = max(LENGTHS)
  padding = [longest - length for length in LENGTHS]
  ids = torch.tensor([[0] * more + text for more, text in zip(padding, prompts, strict=True)])
  mask = torch.tensor([[0] * more + [1] * (longest - more) for more in padding])
  expected = pair.theirs.generate(
    ids,
    attention_mask=mask,
    do_sample=False,
    min_new_tokens=N,
    max_new_tokens=N,
    eos_token_id=None,
    pad_token_id=0,
    output_logits=True,
    return_dict_in_generate=True,
  )
  parameters = taken(pair, {name: x.numpy() for name, x in pair.theirs.state_dict().items()})
  V = pair.config.model.vocab_size
  all_of_them = Vocabulary(np.ones(V, bool), np.zeros(V, bool))
  samples = sample(
    Sampler(pair.model, Choice(temperature=0.0), N, T),
    parameters,
    prompts_of(prompts, seed=0, numbers=[0] * len(prompts)),
    all_of_them,
  )
  found_BN = np.asarray(samples.tokens_BN)
  assert found_BN.tolist() == expected.sequences[:, longest:].tolist()
  log_probs_BNV = torch.log_softmax(torch.stack(expected.logits, 1), -1).numpy()
  chosen_BN = np.take_along_axis(log_probs_BNV, found_BN[..., None], -1)[..., 0]
  np.testing.assert_allclose(samples.log_probs_BN, chosen_BN, atol=1e-4)


@pytest.mark.parametrize(
  "choice",
  [Choice(top_k=7), Choice(top_p=0.8), Choice(min_p=0.1), Choice(0.6, 20, 0.9, 0.02)],
  ids=str,
)
def test_the_choice_is_cut_as_transformers_cuts_it(choice):
  logits_BV = np.random.default_rng(2).normal(size=(16, 100)).astype(np.float32) * 2
  scores_BV = torch.asarray(logits_BV)
  warpers: list[Any] = [transformers.TemperatureLogitsWarper(choice.temperature)]
  warpers += [transformers.TopKLogitsWarper(choice.top_k)] if choice.top_k else []
  warpers += [transformers.TopPLogitsWarper(choice.top_p)] if choice.top_p < 1 else []
  warpers += [transformers.MinPLogitsWarper(choice.min_p)] if choice.min_p else []
  for warper in warpers:
    scores_BV = warper(None, scores_BV)
  found_BV = jax.jit(cut, static_argnums=1)(jnp.asarray(logits_BV) / choice.temperature, choice)
  np.testing.assert_allclose(found_BV, scores_BV.numpy(), rtol=1e-6)
