"""Rewards where several processes train: each computes those of its own groups, and all have all."""

import socket
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from maxbatch.errors import UserError
from maxbatch.hardware.agreement import check_none_failed
from maxbatch.hardware.coordinator import Exchange
from maxbatch.rl.rewards import Group, RewardPool


class GroupRewards(NamedTuple):
  """The rewards of some groups."""

  rewards_N: np.ndarray
  """float64: of every completion, the groups one after the other."""
  num_failures: int
  """Prompts for which a function gave none."""


class SharedRewards:
  """The reward functions of all processes: group number g is of process g modulo their number.

  All processes call it for the same groups in the same order, in one thread at a time.
  """

  def __init__(self, pool: RewardPool):
    """Those of this process."""
    self._pool, self._exchange = pool, Exchange()

  def __call__(self, groups: Sequence[Group], first: int) -> GroupRewards:
    """The rewards of all completions.

    Args:
      groups: of which all processes have all.
      first: the number of the first of them.

    Raises:
      UserError: a function fails in some process, and reward_failure=stop.
    """
    count, process = jax.process_count(), jax.process_index()
    owners = [number % count for number in range(first, first + len(groups))]
    own = [group for group, owner in zip(groups, owners, strict=True) if owner == process]
    rewards, failures, problem = [], 0, ""
    try:
      scores = self._pool.score(own)
    except UserError as error:
      problem = str(error)
    else:
      rewards = scores.rewards_N.tolist()
      failures = len({failure.prompt for failure in scores.failures})
    found = self._exchange([socket.gethostname(), problem, rewards, failures])
    check_none_failed([(host, problem) for host, problem, _, _ in found])
    of_process = [iter(each) for _, _, each, _ in found]
    in_order = [
      next(of_process[owner])
      for group, owner in zip(groups, owners, strict=True)
      for _ in group.completions
    ]
    return GroupRewards(np.array(in_order, np.float64), sum(each for *_, each in found))

  def give_up(self) -> None:
    """Ends a call under way in another thread, and all later ones."""
    self._exchange.give_up()
    self._pool.give_up()
