"""Built-in tasks with answers to verify (`rl_task`): prompts that are pure functions of (seed, number).

A task also has demonstrations, of which a share has the wrong answer: trained on these first, a model
knows all behaviours, and reinforcement learning makes the rewarded one more frequent. To add a task,
write its two functions and register it in TASKS; or name one as `rl_task=module:attribute`.

One prompt in eight, by a hash of its text, is for validation alone: neither training nor a demonstration
ever has it.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Literal

import numpy as np

from maxbatch.config.registry import registered
from maxbatch.errors import UserError
from maxbatch.rl.prompts import Prompt, Prompts

Part = Literal["train", "validation", "demonstrations"]
_PARTS: tuple[Part, ...] = ("train", "validation", "demonstrations")

_MOST_ATTEMPTS = 1000
TASKS_VERSION = 2
"""Changes whenever a number of a prompt means another one."""

Draws = Callable[[int], int]
"""From n, the next of the draws of a prompt: a number from 0 to n − 1."""


@dataclasses.dataclass(frozen=True)
class Task:
  """What a task asks, and what a model that has learned nothing yet answers."""

  ask: Callable[[Draws], tuple[str, str]]
  """A prompt and its answer."""
  demonstrate: Callable[[Draws, str, str], str]
  """An answer, right or wrong, of a prompt with this right one."""

  def prompt(self, seed: int, number: int, part: Part = "train") -> Prompt:
    """Returns a prompt, with its answer as the column `answer`.

    Raises:
      UserError: the task has too few prompts to hold some out for validation.
    """
    text, answer, _ = self._asked(seed, number, part)
    return Prompt(text, {"answer": answer})

  def demonstration(self, seed: int, number: int) -> tuple[str, str]:
    """Returns a prompt and an answer to it, for training before reinforcement learning."""
    text, answer, draws = self._asked(seed, number, "demonstrations")
    return text, self.demonstrate(draws, text, answer)

  def _asked(self, seed: int, number: int, part: Part) -> tuple[str, str, Draws]:
    text = ""
    for attempt in range(_MOST_ATTEMPTS):
      draws = _draws(seed, number, part, attempt)
      text, answer = self.ask(draws)
      if is_held_out(text) == (part == "validation"):
        return text, answer, draws
    raise UserError(
      f"rl_task: none of {_MOST_ATTEMPTS} prompts of the task, such as {text!r}, is for {part}; it has too "
      "few to hold one in eight out of training, and needs more"
    )

  def prompts(self, seed: int, part: Part = "train") -> Prompts:
    """Returns the prompts of a part of the task, without end."""
    return Prompts(lambda number: self.prompt(seed, number, part), -1)


def is_held_out(text: str) -> bool:
  """Returns whether a prompt is for validation alone."""
  return zlib.crc32(text.encode()) % 8 == 0


def _draws(seed: int, number: int, part: Part, attempt: int) -> Draws:
  """Returns the draws of one attempt at a prompt, independent of all others."""
  sequence = np.random.SeedSequence([seed, _PARTS.index(part), number, attempt])
  # 64 bits each: the remainder favours no number by more than 2⁻⁵⁰ for n < 2¹⁴.
  words = iter(sequence.generate_state(64, np.uint64))
  return lambda n: int(next(words)) % n


def _digits(draws: Draws, count: int) -> str:
  return "".join(str(draws(10)) for _ in range(count))


def _ask_sort(draws: Draws) -> tuple[str, str]:
  digits = _digits(draws, 4 + draws(3))
  return f"s{digits}=", "".join(sorted(digits))


def _mixed_sort(draws: Draws, text: str, answer: str) -> str:
  """Copies the digits in 60% of the completions, or reverses them."""
  digits = text[1:-1]
  if draws(10) >= 6:
    return answer
  return digits if draws(2) else digits[::-1]


def _ask_format(draws: Draws) -> tuple[str, str]:
  digits = _digits(draws, 4)
  return f"f{digits}=", f"<{digits}>"


def _bare(draws: Draws, text: str, answer: str) -> str:
  """Leaves out the brackets in 60% of the completions."""
  del text
  return answer if draws(10) >= 6 else answer.strip("<>")


TASKS = {
  "mix-sort": Task(_ask_sort, _mixed_sort),
  "format": Task(_ask_format, _bare),
}


def task_named(name: str) -> Task:
  """Returns the task that `rl_task` names.

  Raises:
    UserError: there is none of that name.
  """
  return registered("rl_task", name, TASKS)
