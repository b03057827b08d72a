"""One microbatch of completions: prompts sampled, rewarded and compared, ready to be trained on."""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.config.schema import RLConfig
from maxbatch.models.registry import Parameters
from maxbatch.rl.advantages import group_advantages, live_groups
from maxbatch.rl.completions import Completions, make_completions
from maxbatch.rl.prompts import Prompt, PromptStream
from maxbatch.rl.rewards import Group, GroupRewards, SharedRewards
from maxbatch.rl.sampled import CompletionSampler, Sampled, Sampling


class Counts(NamedTuple):
  """What a microbatch adds to the metrics of its step."""

  rewards_B: np.ndarray
  """float64."""
  live_G: np.ndarray
  """bool, of each group."""
  num_truncated: int
  num_tokens: int
  num_failures: int
  """Prompts for which a reward function failed."""
  rollout_seconds: Callable[[], float]
  """Once the devices have ended what was dispatched before."""
  reward_seconds: float


class Microbatch(NamedTuple):
  """Completions on the host, and what is known of them."""

  completions: Completions
  counts: Counts


class Unrewarded(NamedTuple):
  """Completions of some prompts that the devices may still be at."""

  prompts: list[Prompt]
  sampling: Sampling
  first_completion: int
  """Index of the first completion in the run's stream of completions."""
  seconds: Callable[[], float]
  """For which they are sampled, see `Counts.rollout_seconds`."""


def untimed(result: object, since: float) -> Callable[[], float]:
  """Measures nothing."""
  del result, since
  return lambda: 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchMaker:
  """Makes microbatch after microbatch; a function of parameters and numbers alone.

  In two parts: `sample` dispatches what runs on the devices, `reward` waits for it and runs in
  processes of the host.
  """

  config: RLConfig
  plan: RLPlan
  prompts: PromptStream
  sampler: CompletionSampler
  rewards: SharedRewards
  timed: Callable[[object, float], Callable[[], float]] = untimed
  """Gives the seconds that the devices take for what is dispatched (`DeviceClock.timed`)."""

  def sample(self, params: Parameters, batch: int, number: int) -> Unrewarded:
    """Dispatches the sampling of microbatch `number` of a batch of completions.

    Raises:
      UserError: a prompt is too long.
    """
    plan = self.plan
    first = number * plan.prompts_per_microbatch
    begin = plan.first_prompt(batch) + first
    prompts = [self.prompts(index) for index in range(begin, begin + plan.prompts_per_microbatch)]
    began = time.perf_counter()
    sampling = self.sampler.begun(params, prompts, "rollout", batch, first)
    seconds = self.timed(sampling.samples, began)
    return Unrewarded(prompts, sampling, plan.first_completion(batch, number), seconds)

  def reward(self, unrewarded: Unrewarded) -> Microbatch:
    """Waits for the completions, and adds the advantages with which they are trained on.

    Raises:
      UserError: a reward function fails, and reward_failure=stop.
      TrainingDivergedError: the policy gives no probabilities.
    """
    plan, sampled = self.plan, self.sampler.completed(unrewarded.sampling)
    began = time.perf_counter()
    scale, size = self.config.scale_rewards == "group", plan.num_generations
    first_group = unrewarded.first_completion // size
    scores = scored(self.rewards, unrewarded.prompts, sampled, first_group)
    advantages_B = group_advantages(scores.rewards_N, size, scale=scale)
    length = plan.batch_plan.max_target_length
    completions = make_completions(
      sampled.rollout,
      advantages_B,
      unrewarded.first_completion,
      length,
      replays=self.config.rollout_routing_replay,
    )
    counts = Counts(
      rewards_B=scores.rewards_N,
      live_G=live_groups(scores.rewards_N, size),
      num_truncated=int((~sampled.ended_B).sum()),
      num_tokens=int(sampled.rollout.lengths_B.sum()),
      num_failures=scores.num_failures,
      rollout_seconds=unrewarded.seconds,
      reward_seconds=time.perf_counter() - began,
    )
    return Microbatch(completions, counts)


def scored(
  rewards: SharedRewards, prompts: list[Prompt], sampled: Sampled, first: int
) -> GroupRewards:
  """Returns the rewards of all completions.

  Args:
    rewards: the functions.
    prompts: each has as many completions.
    sampled: these.
    first: the number of the first prompt, by which processes share them.

  Raises:
    UserError: a reward function fails, and reward_failure=stop.
  """
  size = len(sampled.texts) // len(prompts)
  groups = [
    Group(prompt.text, sampled.texts[number * size : (number + 1) * size], prompt.columns)
    for number, prompt in enumerate(prompts)
  ]
  return rewards(groups, first)


def step_values(all_counts: list[Counts], generations: int) -> dict[str, float]:
  """Returns the metrics of a step's rollout, by their names in metrics.jsonl.

  Args:
    all_counts: of its microbatches.
    generations: completions of a group.
  """
  rewards = np.concatenate([counts.rewards_B for counts in all_counts])
  live = np.concatenate([counts.live_G for counts in all_counts])
  within = rewards.reshape(-1, generations).std(1).mean()
  rollout_seconds = sum(counts.rollout_seconds() for counts in all_counts)
  tokens = sum(counts.num_tokens for counts in all_counts)
  return {
    "rl/reward": float(rewards.mean()),
    "rl/reward_std": float(within),
    "rl/live_groups": float(live.mean()),
    "rl/truncated": sum(counts.num_truncated for counts in all_counts) / len(rewards),
    "rl/reward_failures": float(sum(counts.num_failures for counts in all_counts)),
    "rl/rollout_seconds": rollout_seconds,
    "rl/reward_seconds": sum(counts.reward_seconds for counts in all_counts),
    "rl/rollout_tokens_per_second": tokens / rollout_seconds,
  }
