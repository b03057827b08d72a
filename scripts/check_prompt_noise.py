"""Checks the noise scale of the policy gradient by repeated rollouts of a policy that does not change.

  python scripts/check_prompt_noise.py RUN [--generations 4 8 16] [--sets 24] [KEY=VALUE ...]

RUN is the folder of a run of configs/post_train/rl.yml, or of its warm start; the keys are those that
it had besides. Sets of batch_size prompts are sampled for, each twice over, and the gradients of both
are formed whole. That two of the same prompts differ is by sampling; that those of different prompts
have a product is the signal; that those of the same prompts have more of one is between the prompts.
Beside that is what a step would have estimated from one rollout and its microbatches, and what the noise
with other numbers of completions is predicted to be from the first one given.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.batch.rl_plan import RLPlan, in_samples, plan_rl
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.conversion.source import find_source, open_source
from maxbatch.hardware.devices import find_devices
from maxbatch.noise.prompts import PromptMoments, prompt_moments, within_at
from maxbatch.rl.completions import Completions
from maxbatch.rl.grpo import grpo_sums
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.rl.microbatches import MicrobatchMaker
from maxbatch.rl.prompt_noise import in_halves
from maxbatch.rl.prompt_set import prompt_set
from maxbatch.rl.prompts import Prompt, PromptStream
from maxbatch.rl.rewards import RewardPool, SharedRewards
from maxbatch.rl.sampled import completion_sampler
from maxbatch.rl.trainer import policy_loss
from maxbatch.training.build import build_trainer

FIELDS = ("signal", "between", "within")


class Rollout(NamedTuple):
  """The mean gradients of the microbatches of a batch, and what a step would have estimated."""

  parts_KD: np.ndarray
  estimate: PromptMoments


class Again(PromptStream):
  """Prompts by their place in a set, whatever the batch that they are sampled in is numbered."""

  first = 0

  def __call__(self, index: int) -> Prompt:
    """See `PromptStream`."""
    return super().__call__(self.first + index)


class Bench:
  """A policy that stays as it is."""

  def __init__(self, config: Config, folder: str, rewards: SharedRewards):
    """Reads the policy."""
    target = find_devices(config)
    self.plan: RLPlan = plan_rl(config, target.layout)
    prompts = prompt_set(config)
    trained = in_samples(config, self.plan)
    loss = policy_loss(trained, self.plan)
    trainer = build_trainer(trained, self.plan.batch_plan, target.devices, loss=loss)
    self._model, self._mesh, self._loss = trainer.model, trainer.mesh, loss
    source = open_source("RUN", find_source("RUN", folder))
    self._params = source.read(trainer.model, trainer.abstract.parameters)
    self._stream = Again(prompts.train, self.plan.epochs, config.data.data_shuffle_seed)
    self._sampler, self._rewards, self._config = (
      completion_sampler(config, trainer.model, trainer.mesh),
      rewards,
      config,
    )
    self._halved = in_halves(self.plan.num_generations, trainer.mesh)
    self._gradient = jax.jit(self._summed)

  def _summed(self, params: Any, completions: Completions) -> tuple[jax.Array, jax.Array]:
    """The gradient of half a microbatch's summed loss, flat, and what divides it."""
    allowed_V = np.frombuffer(self._loss.allowed, bool)

    def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
      options = completions.rows, allowed_V, self._loss.temperature, completions.kept_BTW
      sums = grpo_sums(
        token_log_probs(self._model, params, *options), completions, self._loss.objective
      )
      return sums.loss, sums.weight

    gradients, weight = jax.grad(loss_of, has_aux=True)(params)
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradients)]), weight

  def rollout(self, number: int, again: int) -> Rollout:
    """Of the prompts of set `number`, with the random keys of its rollout `again`."""
    plan, of_halves, of_parts, parts, weights = self.plan, 0.0, 0.0, [], []
    batch = 2 * number + again
    self._stream.first = plan.first_prompt(number) - plan.first_prompt(batch)
    make = MicrobatchMaker(self._config.rl, plan, self._stream, self._sampler, self._rewards)
    for place in range(plan.num_microbatches):
      made = make.reward(make.sample(self._params, batch, place))
      fed = self._halved(jax.tree.map(lambda x: np.asarray(x)[None], made.completions))
      results = [
        self._gradient(self._params, jax.tree.map(lambda x, at=at: x[at], fed)) for at in (0, 1)
      ]
      halves = [np.asarray(gradient) for gradient, _ in results]
      whole = halves[0] + halves[1]
      of_halves += sum(float(half @ half) for half in halves)
      of_parts += float(whole @ whole)
      weights.append(sum(float(weight) for _, weight in results))
      parts.append(whole / weights[-1])
    total = sum(weights)
    mean = np.average(parts, axis=0, weights=weights)
    share = sum(weight**2 for weight in weights) / total**2
    squares = of_halves / total**2, of_parts / total**2, float(mean @ mean)
    estimate = prompt_moments(plan.batch_size, plan.num_generations, share, *squares)
    assert estimate is not None
    return Rollout(np.array(parts), estimate)


class Repeated(NamedTuple):
  """Of a set, each microbatch of which was sampled for twice."""

  sum_D: np.ndarray
  """Of the microbatches' gradients, means of both times."""
  square: float
  """Sum of their squares."""
  product: float
  """Of both times, mean over the microbatches."""
  apart: float
  """Half the square of their difference, likewise."""


def repeated(one: Rollout, other: Rollout) -> Repeated:
  """Two rollouts for the same prompts."""
  means_KD, apart_KD = (one.parts_KD + other.parts_KD) / 2, one.parts_KD - other.parts_KD
  products_K = (one.parts_KD * other.parts_KD).sum(1)
  apart = float((apart_KD**2).sum(1).mean()) / 2
  return Repeated(means_KD.sum(0), float((means_KD**2).sum()), float(products_K.mean()), apart)


def truths(sets: list[Repeated], parts: int, prompts: int) -> np.ndarray:
  """Signal, and noise between prompts and within, with standard errors: (F, 2), by the jackknife."""
  total_D = np.sum([each.sum_D for each in sets], 0)
  square = sum(each.square for each in sets)

  def of(left_out: int | None) -> tuple[float, float, float]:
    kept = [each for at, each in enumerate(sets) if at != left_out]
    own = sets[left_out] if left_out is not None else None
    sum_D = total_D if own is None else total_D - own.sum_D
    count = parts * len(kept)
    squares = square - (own.square if own else 0.0)
    signal = float(sum_D @ sum_D - squares) / (count * (count - 1))
    product = float(np.mean([each.product for each in kept]))
    return signal, prompts * (product - signal), prompts * float(np.mean([x.apart for x in kept]))

  without = np.array([of(at) for at in range(len(sets))])
  errors = without.std(0) * np.sqrt(len(sets) - 1)
  return np.stack([of(None), errors], 1)


def measured(bench: Bench, sets: int) -> tuple[np.ndarray, np.ndarray]:
  """By repetition, and as estimated from single rollouts: values and standard errors (F, 2)."""
  plan, both, estimates = bench.plan, [], []
  for number in range(sets):
    completion = bench.rollout(number, 0), bench.rollout(number, 1)
    both.append(repeated(*completion))
    results = [
      (each.whole.signal, each.whole.noise - each.within, each.within)
      for each in (completion[0].estimate, completion[1].estimate)
    ]
    estimates.append(np.mean(results, 0))
  by_repetition = truths(both, plan.num_microbatches, plan.prompts_per_microbatch)
  values_NF = np.array(estimates)
  errors = values_NF.std(0, ddof=1) / np.sqrt(sets)
  return by_repetition, np.stack([values_NF.mean(0), errors], 1)


def shown(values_F2: np.ndarray) -> str:
  """Values with their standard errors."""
  return " ".join(f"{value:9.3g} ± {error:<8.2g}" for value, error in values_F2)


def main() -> None:
  """Prints a table for each number of completions."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("run")
  parser.add_argument("--generations", type=int, nargs="+", default=[8, 4, 16])
  parser.add_argument("--sets", type=int, default=24)
  arguments, keys = parser.parse_known_args()
  within: list[float] = []
  for generations in arguments.generations:
    own = [
      f"num_generations={generations}",
      f"micro_batch_size={4 * generations}",
      "gns_from_microbatches=true",
      "warm_start_steps=0",
    ]
    config = load_config(["config=configs/post_train/rl.yml", *keys, *own])
    with RewardPool(config.rl) as rewards:
      bench = Bench(config, arguments.run, SharedRewards(rewards))
      by_repetition, estimated = measured(bench, arguments.sets)
    print(f"\n{bench.plan.batch_size} prompts of {generations} completions")
    print(f"{'':27}{''.join(f'{name:<21}' for name in FIELDS)}")
    print(f"{'by repeated rollouts':<24}{shown(by_repetition)}")
    print(f"{'estimated from one':<24}{shown(estimated)}")
    # For the same mean gradient, which the mean of G rewards shortens by 1 / G.
    within.append(float(by_repetition[2, 0]) / (1 - 1 / generations) ** 2)
    predicted = within_at(within[0], arguments.generations[0], generations)
    print(
      f"within, for the same mean gradient: {within[-1]:.3g}, predicted {predicted:.3g}", flush=True
    )


if __name__ == "__main__":
  main()
