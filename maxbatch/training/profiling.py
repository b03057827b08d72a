"""A trace of chosen steps, by jax's profiler: an XPlane, which TensorBoard and xprof read too."""

import dataclasses
from pathlib import Path
from typing import Self

import jax

from maxbatch.config.schema import ProfilingConfig
from maxbatch.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Traced:
  """Which steps to trace, counted as positions are: those after `first` up to `last`."""

  first: int
  last: int


class Profiler:
  """Traces some steps of a run; a context manager. In other processes than the first it waits alike."""

  def __init__(self, config: ProfilingConfig, folder: Path, begins: int):
    """Traces nothing yet, in a start that begins after step `begins`."""
    first = begins + config.skip_first_n_steps_for_profiler
    self._steps = Traced(first, first + config.profiler_steps) if config.profiler else None
    self._folder, self._is_tracing = folder, False
    self.traced: Traced | None = None
    """What was traced; None: nothing yet."""

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    if self._is_tracing:
      jax.profiler.stop_trace()

  def is_due(self, step: int) -> bool:
    """Returns whether a trace begins or ends after this step, which then has to be waited for."""
    return self._steps is not None and step in (self._steps.first, self._steps.last)

  def turn(self, step: int, state: TrainState, *, ending: bool = False) -> None:
    """Begins the trace after its step, and ends it after its last, or where the run ends.

    Waits for `state`, which those steps made, on all devices: the trace has whole steps.
    """
    if self._steps is None or not (ending or self.is_due(step)):
      return
    jax.block_until_ready(state)
    if self._is_tracing and (ending or step == self._steps.last):
      self._is_tracing = False
      jax.profiler.stop_trace()
      self.traced = Traced(self._steps.first, step)
    elif step == self._steps.first and not (ending or self._is_tracing or jax.process_index()):
      jax.profiler.start_trace(self._folder)
      self._is_tracing = True
