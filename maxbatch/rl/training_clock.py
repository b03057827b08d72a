"""How long the devices train, of which a host that dispatches ahead sees neither begin nor end."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax

from maxbatch.training.step import StepMetrics


class TrainingClock:
  """Waits for each dispatch of training in a thread; a context manager.

  Devices run their programs in the order of dispatch: a microbatch is trained on from its dispatch on,
  or from the end of the one before, and what is sampled after it begins at its end. (The CPU runs both
  at once, and then both count in full.)
  """

  def __init__(self) -> None:
    """Nothing is under way."""
    self._waiting = ThreadPoolExecutor(1, thread_name_prefix="training_clock")
    self._times: list[Future[float]] = []
    self._ended = 0.0

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._waiting.shutdown(wait=False, cancel_futures=True)

  def dispatched(self, metrics: StepMetrics) -> None:
    """Takes note of a microbatch whose training is under way from now on."""
    self._times.append(self._waiting.submit(self._until, metrics.loss, time.perf_counter()))

  def last_end(self) -> float:
    """When the last training ended that has, by time.perf_counter."""
    return self._ended

  def seconds(self) -> float:
    """Of the training that was dispatched since this was last asked, which is waited for."""
    times, self._times = self._times, []
    return sum(each.result() for each in times)

  def _until(self, result: jax.Array, dispatched: float) -> float:
    jax.block_until_ready(result)
    began, self._ended = max(dispatched, self._ended), time.perf_counter()
    return self._ended - began
