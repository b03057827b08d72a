"""What shows a run's records elsewhere than in metrics.jsonl, and how one that fails is let go."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

Record = dict[str, int | float]

POSITIONS = ("step", "samples", "tokens")
OVER_OTHERS = frozenset({"loss", "eval/loss", "learning_rate", "global_batch_to_train"})
"""Shown over samples and tokens too: runs with different batches compare there."""


@dataclasses.dataclass(frozen=True)
class Opening:
  """What a writer is opened with."""

  folder: Path
  """The run's."""
  first: int
  """The step of the first record that will come."""
  last: Record | None = None
  """The record before it; None: there is none."""
  keys: Mapping[str, object] = dataclasses.field(default_factory=dict)
  """The configuration, as YAML has it."""
  report: Callable[[str], None] = print
  """Receives a line when something cannot be written."""


class Writer(Protocol):
  """One place where records and texts are shown."""

  def write(self, record: Record) -> None:
    """One step, with at least the keys of POSITIONS."""
    ...

  def write_text(self, name: str, step: int, text: str) -> None:
    """A text by its name: what the model wrote, the plan, the configuration."""
    ...

  def close(self) -> None:
    """Writes what waits, as far as that is possible."""
    ...


WriterFactory = Callable[[Opening], Writer]


class Guarded:
  """A writer that is let go at its first error, with a warning: no run ends because of it."""

  def __init__(self, name: str, writer: Writer, report: Callable[[str], None]):
    self._name, self._report = name, report
    self._writer: Writer | None = writer

  def write(self, record: Record) -> None:
    """See `Writer.write`."""
    self._try(lambda writer: writer.write(record))

  def write_text(self, name: str, step: int, text: str) -> None:
    """See `Writer.write_text`."""
    self._try(lambda writer: writer.write_text(name, step, text))

  def close(self) -> None:
    """See `Writer.close`."""
    self._try(lambda writer: writer.close())

  def _try(self, use: Callable[[Writer], None]) -> None:
    if self._writer is None:
      return
    try:
      use(self._writer)
    except Exception as error:  # Networks and services fail in ways that no list of classes has.
      self._writer = None
      self._report(let_go(self._name, error))


def let_go(name: str, error: Exception) -> str:
  """What is said of a writer that has failed."""
  return (
    f"warning: metrics_writers={name} has failed ({type(error).__name__}: {error}); training goes on "
    "without it, and metrics.jsonl has everything"
  )
