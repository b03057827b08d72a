"""Completions of prompts by the policy: the tokens that training then takes log-probabilities of.

B completions, P places of prompts, N of completions, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from maxbatch.config.find import shown
from maxbatch.config.schema import Config
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.hardware.devices import Device
from maxbatch.models.registry import Model, Parameters
from maxbatch.rl.completions import Rollout
from maxbatch.rl.prompts import Prompt
from maxbatch.sampling.choice import Choice, Vocabulary
from maxbatch.sampling.requests import PromptEncoder
from maxbatch.sampling.sampler import Prompts, Sampler, Samples, sample
from maxbatch.sampling.text import choice_of, text_after, vocabulary_of

Part = Literal["rollout", "evaluation"]
_TAGS: dict[Part, int] = {"rollout": 2, "evaluation": 3}
"""Tags of the random keys, made from the seed of the weights; dropout has 1."""


class Sampled(NamedTuple):
  """Completions of some prompts, num_generations of each, one after the other."""

  rollout: Rollout
  texts: list[str]
  """The completions, without what ended them."""
  ended_B: np.ndarray
  """bool: whether they ended by themselves, and are not cut off."""


class Sampling(NamedTuple):
  """Completions that the devices are at."""

  batch: int
  ids: Sequence[Sequence[int]]
  """Of each completion's prompt."""
  prompts_BP: np.ndarray
  lengths_B: np.ndarray
  samples: Samples


@dataclasses.dataclass(frozen=True, eq=False)
class CompletionSampler:
  """Samples the completions of whole groups; all calls of as many prompts share a program.

  A token is a function of parameters, seed, batch, prompt, generation and its place: which prompts are
  sampled together does not matter, but for the rounding of the logits.
  """

  sampler: Sampler
  vocabulary: Vocabulary
  encode: Callable[[str], Sequence[int]]
  tokenizer: Tokenizer
  seed: int
  num_generations: int
  max_prompt_length: int

  def __call__(
    self, params: Parameters, prompts: Sequence[Prompt], part: Part, batch: int, first: int
  ) -> Sampled:
    """Samples completions of the prompts of a batch from its prompt number `first` on.

    Raises:
      UserError: a prompt is too long.
      TrainingDivergedError: the policy gives no probabilities.
    """
    return self.completed(self.begun(params, prompts, part, batch, first))

  def begun(
    self, params: Parameters, prompts: Sequence[Prompt], part: Part, batch: int, first: int
  ) -> Sampling:
    """Dispatches what `__call__` samples, and does not wait for it; raises UserError if a prompt is
    too long."""
    ids = [self._encoded(prompt.text) for prompt in prompts for _ in range(self.num_generations)]
    lengths_B = np.array([len(each) for each in ids], np.int32)
    tokens_BP = np.zeros((len(ids), self.max_prompt_length), np.int32)
    for row_P, each in zip(tokens_BP, ids, strict=True):
      row_P[len(row_P) - len(each) :] = each
    numbers = np.arange(len(ids), dtype=np.uint32)
    completions = numbers // self.num_generations + first, numbers % self.num_generations
    # By the host, as devices make no keys before they have ended what they are at.
    with jax.default_device(_host()):
      key = jax.random.fold_in(jax.random.key(self.seed), _TAGS[part])
      keys_B = jax.device_put(_keys(key, np.uint32(batch), *completions), _host())
    given = Prompts(tokens_BP, lengths_B, keys_B)
    samples = sample(self.sampler, params, given, self.vocabulary)
    return Sampling(batch, ids, tokens_BP, lengths_B, samples)

  def completed(self, sampling: Sampling) -> Sampled:
    """Waits for what `begun` has dispatched; raises TrainingDivergedError if the policy gives no
    probabilities."""
    result, batch = jax.device_get(sampling.samples), sampling.batch
    if not np.isfinite(result.log_probs_BN).all():
      raise TrainingDivergedError(
        f"batch {batch}: the policy that samples gives no finite log-probabilities; a lower "
        "learning_rate may help"
      )
    kept = zip(result.tokens_BN, result.lengths_B, result.ended_B, strict=True)
    texts = [
      text_after(self.tokenizer, each, row_N[: length - ended])
      for each, (row_N, length, ended) in zip(sampling.ids, kept, strict=True)
    ]
    completions = result.tokens_BN, result.lengths_B, result.log_probs_BN, result.kept_BNW
    prompts = sampling.prompts_BP, sampling.lengths_B
    rollout = Rollout(*prompts, *completions, experts_BSLK=result.experts_BSLK)
    return Sampled(rollout, texts, result.ended_B)

  def longest(self, prompts: Sequence[Prompt]) -> int:
    """Returns the tokens of the longest of these prompts.

    Raises:
      UserError: it is too long.
    """
    return max((len(self._encoded(prompt.text)) for prompt in prompts), default=0)

  def _encoded(self, text: str) -> Sequence[int]:
    ids = self.encode(text)
    if len(ids) > self.max_prompt_length:
      raise UserError(
        f"max_prefill_predict_length={self.max_prompt_length}: the prompt {shown(text)} has "
        f"{len(ids)} tokens; for example max_prefill_predict_length={len(ids)}, and a "
        "max_target_length that leaves as many tokens to completions as before"
      )
    return ids


@functools.cache
def _host() -> Device | None:
  """Returns the host as a device; None: JAX_PLATFORMS leaves it out."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return None


@jax.jit
def _keys(key: jax.Array, batch: jax.Array, prompts_B: jax.Array, generations_B: jax.Array):
  of_batch = jax.random.fold_in(key, batch)

  def of_completion(prompt: jax.Array, generation: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(of_batch, prompt), generation)

  return jax.vmap(of_completion)(prompts_B, generations_B)


def run_vocabulary(config: Config) -> Vocabulary:
  """Returns the tokens that a run's completions may have, and those that end them."""
  tokenizer = build_tokenizer(config.data)
  ends = PromptEncoder(config.data, tokenizer).ends(())
  return vocabulary_of(tokenizer, config.model.vocab_size, ends)


def rollout_sampler(
  config: Config, model: Model, mesh: jax.sharding.Mesh, *, greedy: bool = False
) -> Sampler:
  """Returns what samples in a run of reinforcement learning, by the policy `model` over a mesh."""
  length = config.batch.max_target_length
  choice = Choice(temperature=0.0) if greedy else choice_of(config.run)
  new_tokens = length - config.rl.max_prefill_predict_length
  keeps = {"keeps_choices": choice.leaves_out, "keeps_experts": has_routes(config)}
  return Sampler(model, choice, new_tokens, length, mesh, **keeps)


def has_routes(config: Config) -> bool:
  """Returns whether completions say which experts their tokens were sent to."""
  return config.model.num_experts > 1


def completion_sampler(
  config: Config, model: Model, mesh: jax.sharding.Mesh, *, greedy: bool = False
) -> CompletionSampler:
  """Makes the sampler of a run of reinforcement learning.

  Args:
    config: the run.
    model: its policy.
    mesh: over which the parameters lie.
    greedy: whether it takes the likeliest token each time; then one completion of each prompt is all.
  """
  tokenizer = build_tokenizer(config.data)
  return CompletionSampler(
    sampler=rollout_sampler(config, model, mesh, greedy=greedy),
    vocabulary=run_vocabulary(config),
    encode=PromptEncoder(config.data, tokenizer),
    tokenizer=tokenizer,
    seed=config.model.init_weights_seed,
    num_generations=1 if greedy else config.rl.num_generations,
    max_prompt_length=config.rl.max_prefill_predict_length,
  )
