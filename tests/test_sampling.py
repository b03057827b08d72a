"""Sampling: the cache changes nothing, and a text is its prompt's, its key's and nobody else's."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mesh
from tiny_model import GPT2_LIKE, VOCABULARY, loud_parameters, tiny_model

from maxbatch.data.rows import Routes, Rows
from maxbatch.hardware.sharding import sharding
from maxbatch.models.attention import AttentionContext
from maxbatch.models.experts import FLIPS
from maxbatch.models.layers import hidden_of, outputs_of
from maxbatch.models.registry import Model, Parameters, by_path
from maxbatch.models.transformer import Block, Transformer
from maxbatch.rl.completions import Rollout, make_completions
from maxbatch.sampling import sampler as sampler_module
from maxbatch.sampling.choice import (
  Choice,
  Vocabulary,
  choose,
  cut,
  num_words,
  packed,
  unpacked,
)
from maxbatch.sampling.sampler import Prompts, Sampler, Samples, on_fewest_devices, sample, stream
from maxbatch.sampling.text import prompts_of

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
DEEPSEEK_LIKE = (
  *("num_experts=4", "shared_experts=1", "base_moe_mlp_dim=8", "first_num_dense_layers=1"),
  *("attention_type=mla", "base_num_kv_heads=4", "q_lora_rank=7", "kv_lora_rank=5"),
  *("qk_nope_head_dim=3", "qk_rope_head_dim=4", "v_head_dim=5", "rope_interleave=true"),
)
FAMILIES = {
  "llama": (),
  "gpt2": GPT2_LIKE,
  "mixed": MIXED,
  "unrolled": (*MIXED, "scan_layers=false"),
  "mixture": ("num_experts=4", "shared_experts=1", "base_moe_mlp_dim=8"),
  "gpt-oss": (
    *("num_experts=4", "router_logit_bias=true", "mlp_bias=true", "mlp_activation=clamped_swiglu"),
    *("attention_sink=true", "sliding_window_size=4"),
    *("layer_types=[sliding_attention,full_attention]", "rope_type=yarn", "rope_factor=4"),
    *("original_max_position_embeddings=8", "rope_attention_scaling=true"),
  ),
  "deepseek": (*DEEPSEEK_LIKE,),
  "deepseek, unrolled": (*DEEPSEEK_LIKE, "q_lora_rank=0", "scan_layers=false"),
}
every_family = pytest.mark.parametrize("keys", FAMILIES.values(), ids=FAMILIES)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: Model, parameters: Parameters, tokens_1T: jax.Array) -> jax.Array:
  """float32[T, V] of one row."""
  rows = Rows(tokens_1T, tokens_1T, jnp.ones(tokens_1T.shape), jnp.zeros(1, int))
  bound, cap = model.bind(parameters), model.config.final_logits_soft_cap
  logits_TV = hidden_of(bound(rows, None))[0] @ bound.output_matrix()
  return cap * jnp.tanh(logits_TV / cap) if cap else logits_TV


def log_probs_after(model: Model, parameters: Parameters, tokens: Sequence[int]) -> np.ndarray:
  """float32[V]: of what follows the last LENGTH tokens, by a pass over a row of them alone."""
  seen = list(tokens)[-LENGTH:]
  row = jnp.array([seen + [0] * (LENGTH - len(seen))], jnp.int32)
  logits_V = logits_of(model, parameters, row)[len(seen) - 1]
  return np.asarray(jax.nn.log_softmax(jnp.where(LETTERS.allowed_V, logits_V, -jnp.inf)))


def written(samples: Samples, row: int) -> list[int]:
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
      result = float(samples.log_probs_BN[row, number])
      np.testing.assert_allclose(result, log_probs_V[token], atol=2e-5)
      tokens.append(token)
    assert len(tokens) == len(text) + 14


@pytest.mark.parametrize("family", ["mixture", "deepseek, unrolled"])
def test_a_mixture_says_where_it_sent_each_token_as_a_whole_pass_sends_it(family):
  model = tiny_model(*FAMILIES[family], length=LENGTH)
  parameters, given = loud_parameters(model), prompts(TEXTS, more_padding=1)
  P = given.tokens_BP.shape[1]
  sampler = Sampler(model, GREEDY, LENGTH - P + 1, LENGTH, keeps_experts=True)
  samples = jax.device_get(sample(sampler, parameters, given, LETTERS))
  sampled = samples.tokens_BN, samples.lengths_B, samples.log_probs_BN
  rollout = Rollout(given.tokens_BP, given.lengths_B, *sampled, experts_BSLK=samples.experts_BSLK)  # pyright: ignore
  rows = make_completions(rollout, np.zeros(len(TEXTS)), 0, LENGTH).rows
  assert rows.routes is not None
  routes, dense = np.asarray(rows.routes.experts), model.config.first_num_dense_layers
  sent_BT = np.arange(LENGTH)[None] < given.lengths_B[:, None] + samples.lengths_B[:, None] - 1
  assert ((routes[:, :, dense:] >= 0) == sent_BT[..., None, None]).all()
  assert (routes[:, :, :dense] == -1).all()

  def flips(routes: np.ndarray) -> float:
    outputs = model.bind(parameters)(rows._replace(routes=Routes(jnp.asarray(routes))), None)
    return float(outputs_of(outputs)[2][FLIPS].value())  # pyright: ignore

  assert flips(routes) == 0
  assert flips(np.roll(routes, 1, axis=1)) > 0.1
  assert dense or flips(np.roll(routes, 1, axis=2)) > 0.1


# --- nobody else's ----------------------------------------------------------------------------------

MODEL = tiny_model(*MIXED, *FAMILIES["mixture"], length=LENGTH)
WARM_SAMPLER = Sampler(MODEL, WARM, 10, LENGTH)


@functools.cache
def samples_together() -> Samples:
  """What is drawn for all of TEXTS in one batch."""
  return sample(WARM_SAMPLER, loud_parameters(MODEL), prompts(TEXTS), LETTERS)


def together() -> list[list[int]]:
  """Its tokens."""
  return [written(samples_together(), row) for row in range(len(TEXTS))]


def test_a_text_does_not_depend_on_its_neighbours_their_order_or_padding():
  assert len({tuple(text) for text in together()}) == len(TEXTS)
  parameters = loud_parameters(MODEL)
  other = prompts([*TEXTS[::-1], TEXTS[0]], more_padding=16)
  mixed = sample(WARM_SAMPLER, parameters, other, LETTERS)
  assert [written(mixed, row) for row in range(4)] == together()[::-1]
  log_probs_BN = np.asarray(samples_together().log_probs_BN)
  np.testing.assert_allclose(mixed.log_probs_BN[:4], log_probs_BN[::-1], atol=2e-5)
  longest = max(map(len, TEXTS))
  for row in (1, 2):
    text = TEXTS[row]
    alone = sample(WARM_SAMPLER, parameters, prompts([text], longest - len(text)), LETTERS)
    assert written(alone, 0) == together()[row]


@pytest.mark.parametrize(
  ("sizes", "strategy"),
  [({"fsdp": 2, "tensor": 2, "expert": 2}, "auto"), ({"fsdp": 2, "context": 2}, "ring")],
)
def test_nor_on_devices_or_on_how_often_it_is_looked_at(sizes, strategy):
  """Two devices that share the prompts of a row have its first and last tokens each (zigzag)."""
  devices = mesh(**sizes)
  axes = MODEL.axes()
  model = tiny_model(
    *MIXED, *FAMILIES["mixture"], f"context_parallel_strategy={strategy}", length=LENGTH
  )
  divided = by_path(
    lambda path, leaf: jax.device_put(leaf, sharding(axes[path], leaf.shape, devices)),
    loud_parameters(MODEL),
  )
  several = Sampler(model, WARM, 10, LENGTH, devices, keeps_experts=True)
  seen = list(stream(several, divided, prompts(TEXTS[:3]), LETTERS, chunk=4))
  assert [written(seen[-1], row) for row in range(3)] == together()[:3]
  # The longest text fills its row with its ninth token, where the cache ends.
  assert [int(samples.lengths_B[0]) for samples in seen] == [4, 8, 9, 10]
  assert [written(seen[0], row) for row in range(3)] == [text[:4] for text in together()[:3]]
  alone = dataclasses.replace(several, mesh=None)
  first = next(stream(alone, loud_parameters(MODEL), prompts(TEXTS[:3]), LETTERS, chunk=4))
  both = np.asarray(seen[0].experts_BSLK), np.asarray(first.experts_BSLK)
  for routes, others, text in zip(*both, TEXTS[:3], strict=True):
    own = slice(max(map(len, TEXTS[:3])) - len(text), None)
    np.testing.assert_array_equal(routes[own], others[own])


def test_a_key_is_the_seed_s_the_prompt_s_and_the_number_s():
  def keys(seed: int, *numbers: int) -> list[list[int]]:
    texts = [TEXTS[0]] * len(numbers)
    return jax.random.key_data(prompts_of(texts, seed, numbers).keys_B).tolist()

  assert keys(5, 0, 1) == [keys(5, 0)[0], keys(5, 1)[0]]
  others = jax.random.key_data(prompts_of(TEXTS, 5, [0] * 4).keys_B).tolist()
  assert others[0] == keys(5, 0)[0]
  different = [*others, *keys(5, 1), *keys(6, 0, 1)]
  assert len({tuple(key) for key in different}) == len(different)


def test_one_device_writes_what_does_not_divide_over_whole_copies():
  devices = mesh(data=4, fsdp=2)
  whole = jax.device_put({"x": jnp.ones(4)}, sharding((None,), (4,), devices))
  divided = jax.device_put({"x": jnp.ones(4)}, sharding(("embed",), (4,), devices))
  assert on_fewest_devices(whole, devices, 16)[1] is devices
  assert on_fewest_devices(divided, devices, 3)[1] is devices
  params, none = on_fewest_devices(whole, devices, 3)
  assert (len(params["x"].devices()), none) == (1, None)


# --- the end of a text ------------------------------------------------------------------------------


def test_a_text_ends_with_a_token_that_ends_it_and_the_others_go_on():
  parameters, endless = loud_parameters(MODEL), together()
  end = endless[0][3]
  places = [text.index(end) + 1 if end in text else 10 for text in endless]
  assert 0 < min(places) < max(places) == 10
  vocabulary = LETTERS._replace(ends_V=np.arange(VOCABULARY) == end)
  samples = sample(WARM_SAMPLER, parameters, prompts(TEXTS), vocabulary)
  assert [written(samples, row) for row in range(4)] == [
    text[:place] for text, place in zip(endless, places, strict=True)
  ]
  assert samples.lengths_B.tolist() == places
  assert samples.ended_B.tolist() == [end in text for text in endless]
  after_BN = np.arange(10)[None] >= np.asarray(places)[:, None]
  for values_BN in (samples.tokens_BN, samples.log_probs_BN):
    assert not np.asarray(values_BN)[after_BN].any()


def test_nothing_is_computed_once_all_have_ended():
  all_end = LETTERS._replace(ends_V=LETTERS.allowed_V)
  seen = list(stream(WARM_SAMPLER, loud_parameters(MODEL), prompts(TEXTS), all_end, chunk=3))
  assert [samples.lengths_B.tolist() for samples in seen] == [[1, 1, 1, 1]]


# --- models of users --------------------------------------------------------------------------------


class LooksBack(Block):
  """Adds what the token before brought along: more than attention keeps."""

  def __call__(self, x_BTD: jax.Array, at: AttentionContext, keys_B: jax.Array | None) -> jax.Array:
    before_BTD = jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return hidden_of(super().__call__(x_BTD, at, keys_B)) + before_BTD


class Own(Transformer):
  block = LooksBack


class OwnWithCache(Transformer):
  offers_cache = True


def test_a_model_that_offers_no_cache_writes_by_whole_passes():
  model = tiny_model("decoder_block=test_sampling:Own", length=LENGTH)
  parameters = loud_parameters(model)
  samples = sample(Sampler(model, GREEDY, 3, LENGTH), parameters, prompts(TEXTS), LETTERS)
  for row, text in enumerate(TEXTS):
    tokens = list(text)
    for token in written(samples, row):
      assert token == np.argmax(log_probs_after(model, parameters, tokens))
      tokens.append(token)
  offers = sampler_module._offers_cache
  assert [offers(each) for each in (MODEL, model)] == [True, False]
  assert offers(tiny_model("decoder_block=test_sampling:OwnWithCache"))


# --- the choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("choice", "kept"),
  [
    (Choice(), [0, 1, 2, 3, 4]),
    (Choice(top_k=2), [1, 3]),
    (Choice(top_k=9), [0, 1, 2, 3, 4]),
    (Choice(top_p=0.5), [3]),
    (Choice(top_p=0.51), [1, 3]),
    (Choice(top_p=0.001), [3]),
    (Choice(top_p=0.96), [0, 1, 2, 3]),
    # Of 2 tokens, 0.5 and 0.25, the first has two thirds.
    (Choice(top_k=2, top_p=0.6), [3]),
    (Choice(min_p=0.2), [0, 1, 3]),
    (Choice(min_p=1.0), [3]),
    (Choice(top_k=3, min_p=0.3), [1, 3]),
  ],
  ids=str,
)
def test_what_is_cut_away(choice, kept):
  probabilities = jnp.array([[0.125, 0.25, 0.0875, 0.5, 0.0375, 0.0]])
  logits_BV = jnp.log(probabilities).at[0, 5].set(-jnp.inf)
  result = cut(logits_BV, choice)
  assert np.flatnonzero(np.isfinite(result[0])).tolist() == kept
  np.testing.assert_array_equal(result[0, np.array(kept)], logits_BV[0, np.array(kept)])


def test_tokens_are_drawn_as_often_as_they_are_likely():
  logits_V = jnp.array([0.3, 1.1, -0.7, 0.9, -jnp.inf])
  count, choice = 20_000, Choice(temperature=0.7, min_p=0.2)
  keys_B = jax.random.split(jax.random.key(3), count)
  logits_BV = jnp.broadcast_to(logits_V, (count, 5))
  drawn = jax.jit(choose, static_argnums=3, static_argnames="of_kept")
  ids_B, log_probs_B, kept_BV = drawn(logits_BV, keys_B, jnp.int32(2), choice)
  kept_V = jnp.where(jnp.array([True, True, False, True, False]), logits_V / 0.7, -jnp.inf)
  expected_V = np.asarray(jax.nn.softmax(kept_V))
  shares_V = np.bincount(np.asarray(ids_B), minlength=5) / count
  np.testing.assert_allclose(shares_V, expected_V, atol=4 * np.sqrt(0.25 / count))
  assert shares_V[2] == shares_V[4] == 0
  # The log-probability is that of the policy, of which nothing is cut away.
  policy_V = jax.nn.log_softmax(logits_V / 0.7)
  np.testing.assert_allclose(log_probs_B, policy_V[ids_B], atol=1e-6)
  # Or of what is left.
  assert kept_BV.all(0).tolist() == kept_BV.any(0).tolist() == [True, True, False, True, False]
  same_B, log_probs_B, _ = drawn(logits_BV, keys_B, jnp.int32(2), choice, of_kept=True)
  np.testing.assert_array_equal(same_B, ids_B)
  np.testing.assert_allclose(log_probs_B, np.log(expected_V[ids_B]), atol=1e-6)


@pytest.mark.parametrize("size", [31, 32, 70])
def test_tokens_as_bits(size):
  kept_BV = np.random.default_rng(size).random((5, size)) < 0.3
  bits_BW = packed(jnp.asarray(kept_BV))
  assert bits_BW.shape == (5, num_words(size))
  np.testing.assert_array_equal(unpacked(bits_BW, size), kept_BV)
  np.testing.assert_array_equal(unpacked(bits_BW[:, None], size)[:, 0], kept_BV)


def test_another_token_s_number_draws_anew():
  keys_B, logits_BV = jax.random.split(jax.random.key(0), 200), jnp.zeros((200, 8))
  first, second = (choose(logits_BV, keys_B, jnp.int32(n), WARM)[0] for n in (0, 1))
  assert 0 < (first == second).mean() < 0.3
