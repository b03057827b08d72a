"""How often the policy is right: pass@k on prompts that are never trained on, and examples of them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from maxbatch.models.registry import Parameters
from maxbatch.rl.microbatches import scored
from maxbatch.rl.prompts import Prompt
from maxbatch.rl.rewards import SharedRewards
from maxbatch.rl.sampled import CompletionSampler
from maxbatch.run_folder.metrics import Record


def pass_at_k(correct: Sequence[int], num_completions: int, k: int) -> float:
  """Estimates pass@k without bias, mean over prompts: 1 − C(n − c, k) / C(n, k) (Chen et al. 2021).

  Args:
    correct: for each prompt, how many of its completions are right, c.
    num_completions: of each prompt, n, at least k.
    k: completions of which one has to be right.

  Raises:
    ValueError: k is not between 1 and n, or there is no prompt.
  """
  if not 1 <= k <= num_completions or not correct:
    raise ValueError(f"pass@{k} of {num_completions} completions of {len(correct)} prompts")
  total = math.comb(num_completions, k)
  wrong = sum(math.comb(num_completions - one, k) for one in correct)
  return float(1 - Fraction(wrong, total * len(correct)))


_RIGHT = 1.0
"""The reward from which on a completion passes."""
_EXAMPLES = 4


class Example(NamedTuple):
  """A completion of a prompt."""

  prompt: str
  completion: str
  reward: float

  def __str__(self) -> str:
    return f"{self.reward:6.2f}  {self.prompt!r} {self.completion!r}"


class Evaluated(NamedTuple):
  """What an evaluation has found."""

  record: Record
  examples: list[Example]
  """The first completions of the first prompts."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """Samples completions of each prompt, by random keys that are always the same."""

  prompts: Sequence[Prompt]
  sampler: CompletionSampler
  rewards: SharedRewards
  completions_at_once: int
  """As in the rollout, whose program this shares unless it is greedy."""
  feed_watchdog: Callable[[], None]
  prefix: str = "eval/"
  """Of the metrics' names."""

  def __call__(self, params: Parameters) -> Evaluated:
    """Measures pass@k for k = 1, 2, 4, … and the mean reward; nothing without prompts.

    Raises:
      UserError: a reward function fails, and reward_failure=stop.
    """
    rewards, examples, ended = [], [], []
    size = self.sampler.num_generations
    at_once = self.completions_at_once // size
    for first in range(0, len(self.prompts), at_once):
      some = list(self.prompts[first : first + at_once])
      # As many each time, so that all share a program.
      filled = [*some, *[some[-1]] * (at_once - len(some))]
      sampled = self.sampler(params, filled, "evaluation", 0, first)
      own = sampled._replace(texts=sampled.texts[: len(some) * size])
      result = scored(self.rewards, some, own, first).rewards_N.reshape(-1, size)
      self.feed_watchdog()
      rewards.append(result)
      ended.append(sampled.ended_B[: len(some) * size])
      examples += [
        Example(prompt.text, own.texts[number * size], float(result[number, 0]))
        for number, prompt in enumerate(some)
      ]
    if not rewards:
      return Evaluated({}, [])
    record = _record(np.concatenate(rewards), np.concatenate(ended), self.prefix)
    return Evaluated(record, examples[:_EXAMPLES])


def _record(rewards_QG: np.ndarray, ended_N: np.ndarray, prefix: str) -> Record:
  """Returns the metrics of Q prompts with G completions each."""
  generations = rewards_QG.shape[1]
  right = (rewards_QG >= _RIGHT).sum(1).tolist()
  doubled = itertools.takewhile(lambda k: k <= generations, (2**power for power in range(32)))
  of_k = {f"{prefix}pass_at_{k}": pass_at_k(right, generations, k) for k in doubled}
  return of_k | {
    f"{prefix}reward": float(rewards_QG.mean()),
    f"{prefix}truncated": float((~ended_N).mean()),
  }
