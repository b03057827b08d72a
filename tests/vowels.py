"""Reward functions in a module of their own: the processes that import it start in no time."""

import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

CALLS = "MAXBATCH_TEST_CALLS"
"""A file with a byte for each call of `kill_at_last`, and how many there are to be."""


def count(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
  """What even an untrained model can get more of."""
  del prompts, columns
  return [float(sum(character in "aeiou" for character in each)) for each in completions]


def kill_at_last(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
  """The same; with the last call the process that trains is killed."""
  if _is_last():
    os.kill(os.getppid(), signal.SIGKILL)
  return count(prompts, completions, **columns)


def _is_last() -> bool:
  path, _, last = os.environ.get(CALLS, "").partition(":")
  if not path:
    return False
  with pathlib.Path(path).open("ab") as calls:
    calls.write(b".")
    calls.flush()
    return calls.tell() == int(last)
