"""One call of a reward function: what it is given, what it returns, and what may be wrong with that.

No jax, so that the processes that make these calls start quickly.
"""

import math
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxbatch.rl.checkers import RewardFunction


class Call(NamedTuple):
  """One call of one function, for the completions of one prompt."""

  function: int
  """Its place among the names."""
  prompt: str
  completions: Sequence[str]
  columns: Mapping[str, Any]


class Reply(NamedTuple):
  """What became of a call."""

  rewards: list[float]
  problem: str = ""
  """What is wrong with the call or with what it returned; empty: nothing."""


def make_call(function: RewardFunction, call: Call) -> Reply:
  """Calls the function, and checks that it returns a finite number for each completion."""
  count = len(call.completions)
  columns = {name: [value] * count for name, value in call.columns.items()}
  try:
    result = function([call.prompt] * count, list(call.completions), **columns)
    rewards = [float(each) for each in result]
  except Exception as error:
    return Reply([], _described(error))
  if len(rewards) != count:
    return Reply([], f"it returned {len(rewards)} rewards for {count} completions")
  wrong = [place for place, reward in enumerate(rewards) if not math.isfinite(reward)]
  if wrong:
    return Reply([], f"its reward of completion {wrong[0]} is {rewards[wrong[0]]}")
  return Reply(rewards)


def _described(error: Exception) -> str:
  """Says what it raised, and where."""
  frame = traceback.extract_tb(error.__traceback__)[-1]
  text = " ".join(str(error).split())[:300]
  return f"{type(error).__name__}: {text} ({os.path.basename(frame.filename)}:{frame.lineno})"
