"""Built-in reward functions: completions against known answers. No jax, so that processes start quickly.

A reward function is called as fn(prompts, completions, **columns), with lists of equal lengths: the
prompts, what was sampled for them, and the other columns of the data. It returns as many numbers.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

RewardFunction = Callable[..., Iterable[float]]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_FINAL = "####"


def exact(
  prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
  """Returns 1 for a completion that is the column `answer`, white space at its ends aside; else
  0."""
  del prompts, columns
  return [
    float(completion.strip() == right.strip())
    for completion, right in zip(completions, answer, strict=True)
  ]


def gsm8k(
  prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
  """Returns 1 for a completion whose final number is that of the column `answer`; else 0.

  The final number is what follows the last ####, as in GSM8K's answers (Cobbe et al. 2021), or else
  the last number of the text. $, commas and trailing zeros do not count.
  """
  del prompts, columns
  return [
    float((result := final_number(completion)) is not None and result == final_number(right))
    for completion, right in zip(completions, answer, strict=True)
  ]


def final_number(text: str) -> Fraction | None:
  """Returns the number that a text ends with, see `gsm8k`; None where there is none."""
  _, marked, end = text.rpartition(_FINAL)
  numbers = _NUMBER.findall(end.replace("$", "") if marked else text)
  if not numbers:
    return None
  return Fraction((numbers[0] if marked else numbers[-1]).replace(",", ""))


REWARDS: Mapping[str, RewardFunction] = {"exact": exact, "gsm8k": gsm8k}
