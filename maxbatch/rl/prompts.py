"""Prompts, and the stream of them that a run takes: a pure function of (seed, index)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maxbatch.batch.prompt_epochs import PromptEpochs
from maxbatch.data.mixture import SampleStream
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt, and what the data have besides for the reward functions, by column."""

  text: str
  columns: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Numbered prompts: of files, or of a task."""

  at: Callable[[int], Prompt]
  """The prompt of a number from 0."""
  count: int
  """How many there are; −1: no end."""


@dataclasses.dataclass(frozen=True, eq=False)
class PromptStream:
  """The prompts of a run in order: each once per epoch, shuffled anew in each epoch.

  Where there is no end, they come as they are numbered.
  """

  prompts: Prompts
  epochs: PromptEpochs
  seed: int

  def __call__(self, index: int) -> Prompt:
    """Returns the prompt at a place of the stream."""
    epoch, place = self.epochs.place(index)
    size = self.epochs.num_prompts
    if size == -1:
      return self.prompts.at(place)
    [number] = self._order(np.array([epoch * size + place]))
    return self.prompts.at(int(number))

  @functools.cached_property
  def _order(self) -> SampleStream:
    return SampleStream(self.epochs.num_prompts, self.seed)

  def batch(self, first: int) -> list[Prompt]:
    """Returns the prompts of a batch, of which the first is at this place."""
    return [self(index) for index in range(first, first + self.epochs.batch_size)]


def epoch_size(num_prompts: int, prompts: Prompts) -> int:
  """Returns the prompts of an epoch: num_prompts, or all; −1: no end.

  Raises:
    UserError: there are not as many.
  """
  if num_prompts == -1 or prompts.count == -1:
    return max(num_prompts, prompts.count)
  if num_prompts > prompts.count:
    raise UserError(
      f"num_prompts={num_prompts}: the data have {prompts.count} prompts; for example "
      f"num_prompts={prompts.count}, or num_prompts=-1: all of them"
    )
  return num_prompts
