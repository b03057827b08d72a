"""pass@k: the probability that at least one of k completions is right."""

import math
from collections.abc import Sequence
from fractions import Fraction


def pass_at_k(correct: Sequence[int], num_completions: int, k: int) -> float:
  """The unbiased estimate of pass@k, mean over prompts: 1 − C(n − c, k) / C(n, k) (Chen et al. 2021).

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
