"""A reward function in a module of its own: the processes that import it start in no time."""

from collections.abc import Sequence
from typing import Any


def count(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
  """What even an untrained model can get more of."""
  del prompts, columns
  return [float(sum(character in "aeiou" for character in each)) for each in completions]
