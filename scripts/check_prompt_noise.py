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

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.batch.rl_plan import RLPlan, in_pairs, plan_rl
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.conversion.source import find_source, open_source
from maxbatch.hardware.devices import find_devices
from maxbatch.modes.run_rl import ByReinforcement
from maxbatch.noise.prompts import PromptMoments, prompt_moments, within_at
from maxbatch.rl.grpo import grpo_sums
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.rl.microbatches import MicrobatchMaker
from maxbatch.rl.pairs import Pairs
from maxbatch.rl.prompt_noise import in_halves
from maxbatch.rl.prompt_set import prompt_set
from maxbatch.rl.prompts import Prompt, PromptStream
from maxbatch.rl.rewards import RewardPool
from maxbatch.rl.sampled import pair_sampler
from maxbatch.training.build import build_trainer

FIELDS = ("signal", "between", "within")


class Rollout(NamedTuple):
  """The gradient of a batch of pairs, and what a step would have estimated from its parts."""

  gradient: np.ndarray
  estimate: PromptMoments


class Bench:
  """A policy that stays as it is."""

  def __init__(self, config: Config, folder: str, rewards: RewardPool):
    """Reads the policy."""
    target = find_devices(config)
    self.plan: RLPlan = plan_rl(config, target.layout)
    prompts = prompt_set(config)
    method = ByReinforcement(self.plan, prompts)
    trained = in_pairs(config, self.plan)
    loss = method.loss(trained)
    trainer = build_trainer(trained, self.plan.pairs, target.devices, loss=loss)
    self._model, self._mesh, self._loss = trainer.model, trainer.mesh, loss
    source = open_source("RUN", find_source("RUN", folder))
    self._params = source.read(trainer.model, trainer.abstract.parameters)
    self._stream = PromptStream(prompts.train, self.plan.epochs, config.data.data_shuffle_seed)
    self._sampler, self._rewards, self._config = (
      pair_sampler(config, trainer.model, trainer.mesh),
      rewards,
      config,
    )
    self._halved = in_halves(self.plan.num_generations, trainer.mesh)
    self._gradient = jax.jit(self._summed)

  def _summed(self, params: Any, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """The gradient of half a microbatch's summed loss, flat, and what divides it."""
    allowed_V = np.frombuffer(self._loss.allowed, bool)

    def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
      options = pairs.rows, allowed_V, self._loss.temperature
      sums = grpo_sums(token_log_probs(self._model, params, *options), pairs, self._loss.objective)
      return sums.loss, sums.weight

    gradients, weight = jax.grad(loss_of, has_aux=True)(params)
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradients)]), weight

  def rollout(self, number: int, again: int) -> Rollout:
    """Of the prompts of set `number`, with the random keys of its rollout `again`."""
    plan, of_halves, of_parts, whole, weights = self.plan, 0.0, 0.0, 0.0, []
    # The prompts of a set, and as many keys as there are rollouts.
    prompts = _Shifted(self._stream, (number - self._batch(number, again)) * plan.batch_size)
    make = MicrobatchMaker(self._config.rl, plan, prompts, self._sampler, self._rewards)
    for place in range(plan.num_microbatches):
      made = make.reward(make.sample(self._params, self._batch(number, again), place))
      fed = self._halved(jax.tree.map(lambda x: np.asarray(x)[None], made.pairs))
      found = [
        self._gradient(self._params, jax.tree.map(lambda x, at=at: x[at], fed)) for at in (0, 1)
      ]
      halves = [np.asarray(gradient) for gradient, _ in found]
      of_halves += sum(float(half @ half) for half in halves)
      of_parts += float((halves[0] + halves[1]) @ (halves[0] + halves[1]))
      whole = whole + halves[0] + halves[1]
      weights.append(sum(float(weight) for _, weight in found))
    total = sum(weights)
    share = sum(weight**2 for weight in weights) / total**2
    mean = np.asarray(whole) / total
    squares = of_halves / total**2, of_parts / total**2, float(mean @ mean)
    estimate = prompt_moments(plan.batch_size, plan.num_generations, share, *squares)
    assert estimate is not None
    return Rollout(mean, estimate)

  @staticmethod
  def _batch(number: int, again: int) -> int:
    return 2 * number + again


class _Shifted(NamedTuple):
  """A stream of prompts from another place on."""

  stream: PromptStream
  first: int

  def __call__(self, index: int) -> Prompt:
    return self.stream(self.first + index)


def measured(bench: Bench, sets: int) -> tuple[np.ndarray, np.ndarray]:
  """Signal, and noise between prompts and within: by repetition, and as estimated, (F, sets)."""
  prompts, estimates, squares, firsts = bench.plan.batch_size, [], [], []
  total = np.zeros(1)
  for number in range(sets):
    one, other = bench.rollout(number, 0), bench.rollout(number, 1)
    total = total + one.gradient
    firsts.append(one.gradient)
    apart = one.gradient - other.gradient
    squares.append((float(one.gradient @ other.gradient), prompts * float(apart @ apart) / 2))
    for each in (one.estimate, other.estimate):
      estimates.append((each.whole.signal, each.whole.noise - each.within, each.within))
  # A set's mean against all the others', which are of other prompts.
  signals = np.array([float(own @ (total - own)) / (sets - 1) for own in firsts])
  products, within = np.array(squares).T
  between = prompts * (products - signals)
  return np.array([signals, between, within]), np.array(estimates).T


def shown(values_FN: np.ndarray) -> Iterator[str]:
  """Means with their standard errors."""
  for values_N in values_FN:
    error = values_N.std(ddof=1) / np.sqrt(values_N.size)
    yield f"{values_N.mean():9.3g} ± {error:<8.2g}"


def main() -> None:
  """Prints a table for each number of completions."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("run")
  parser.add_argument("--generations", type=int, nargs="+", default=[8, 4, 16])
  parser.add_argument("--sets", type=int, default=24)
  arguments, keys = parser.parse_known_args()
  first: np.ndarray | None = None
  for generations in arguments.generations:
    own = [
      f"num_generations={generations}",
      f"micro_batch_size={4 * generations}",
      "gns_from_microbatches=true",
      "warm_start_steps=0",
    ]
    config = load_config(["config=configs/post_train/rl.yml", *keys, *own])
    with RewardPool(config.rl) as rewards:
      bench = Bench(config, arguments.run, rewards)
      repeated, estimated = measured(bench, arguments.sets)
    print(f"\n{bench.plan.batch_size} prompts of {generations} completions")
    print(f"{'':28}{''.join(f'{name:<21}' for name in FIELDS)}")
    print(f"{'by repeated rollouts':<27}{' '.join(shown(repeated))}")
    print(f"{'estimated from one':<27}{' '.join(shown(estimated))}")
    # Relative to the mean gradient, which the mean of G rewards shortens by 1 / G.
    longer = repeated.mean(1) / (1 - 1 / generations) ** 2
    first = longer if first is None else first
    predicted = within_at(float(first[2]), arguments.generations[0], generations)
    print(
      f"within, for the same mean gradient: {longer[2]:.3g}, predicted {predicted:.3g}", flush=True
    )


if __name__ == "__main__":
  main()
