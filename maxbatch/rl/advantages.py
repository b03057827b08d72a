"""From rewards to advantages: a completion against the others of its prompt (Shao et al. 2024).

N completions in groups of G, one after the other.
"""

import numpy as np

_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL and Tunix do."""


def group_advantages(rewards_N: np.ndarray, num_generations: int, *, scale: bool) -> np.ndarray:
  """Subtracts from each reward the mean of its group's, float32[N].

  Args:
    rewards_N: of whole groups.
    num_generations: G.
    scale: divide by the group's standard deviation (of G − 1) too; Dr. GRPO (Liu et al. 2025) does
      not, since that weighs prompts by how hard they are.

  Returns: Exactly 0 for a group whose rewards are all equal.
  """
  groups = np.asarray(rewards_N, np.float64).reshape(-1, num_generations)
  advantages = groups - groups.mean(1, keepdims=True)
  if scale:
    advantages /= groups.std(1, ddof=1, keepdims=True) + _EPSILON
  # The mean of equal rewards may differ from them by a rounding.
  advantages[~live_groups(rewards_N, num_generations)] = 0.0
  return advantages.reshape(-1).astype(np.float32)


def live_groups(rewards_N: np.ndarray, num_generations: int) -> np.ndarray:
  """Returns, bool per group, whether its rewards differ, so that it has a gradient (but that of the
  KL)."""
  groups = np.asarray(rewards_N).reshape(-1, num_generations)
  return groups.max(1) > groups.min(1)
