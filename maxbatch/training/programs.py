"""The compiled step for every microbatch shape of a run, the next one compiled ahead of its phase.

A schedule that keeps the microbatch changes only their number and needs one program. Where
phases have other microbatches, the program of the next shape is compiled in a thread while the
phase before it trains, so that the step that changes shape does not wait.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from maxbatch.training.step import Step


class StepPrograms:
  """Compiled steps by microbatch size; a context manager."""

  def __init__(self, compile_for: Callable[[int], Step], micro_batches: Sequence[int]):
    """Takes the shapes of `micro_batches` in the order in which the run first meets them."""
    self._compile_for, self._order = compile_for, list(micro_batches)
    self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
    self._programs: dict[int, Future[Step]] = {}

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    # A compilation under way cannot be stopped; it is waited for unless a person is in a hurry.
    hurried = kind is not None and issubclass(kind, KeyboardInterrupt)
    self._pool.shutdown(wait=not hurried, cancel_futures=True)

  def __call__(self, micro_batch: int) -> Step:
    """Returns the step for this microbatch; begins to compile the one that comes after it."""
    program = self._program(micro_batch)
    step = program.result()
    after = self._order.index(micro_batch) + 1
    if after < len(self._order):
      self._program(self._order[after])
    return step

  def all(self) -> dict[int, Step]:
    """Returns every step of the run by microbatch, once all are compiled."""
    return {size: self._program(size).result() for size in self._order}

  def _program(self, micro_batch: int) -> Future[Step]:
    if micro_batch not in self._programs:
      self._programs[micro_batch] = self._pool.submit(self._compile_for, micro_batch)
    return self._programs[micro_batch]
