"""Several processes, one choice: the numbers are process 0's, and it alone prints."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax

from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.tuning.pipeline_ranking import CompiledChoice
from maxbatch.tuning.search import ProbeResult

Say = Callable[[str], None]
"""Prints a line."""
_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found", ProbeResult, CompiledChoice)


def in_process_0(say: Say) -> Say:
  """The same, silent in the other processes."""
  return say if jax.process_index() == 0 else lambda line: None


def agreed(probe: Callable[[_Asked], _Found]) -> Callable[[_Asked], _Found]:
  """The probe with process 0's numbers everywhere, so that all take the same path."""

  def of(asked: _Asked) -> _Found:
    mine = probe(asked)
    return dataclasses.replace(mine, **broadcast_one_to_all(dataclasses.asdict(mine)))

  return of
