"""The files of a run's folder, which process 0 writes for all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from maxbatch.hardware.agreement import failing_together
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.process_log import process_log


def write_shared_file(path: Path, content: str | bytes) -> None:
  """Writes a file of a run's folder in process 0; all processes call it.

  Raises:
    UserError: it cannot be written; in all processes.
  """
  with failing_together():
    if jax.process_index() == 0:
      write_run_file(path, content)


@contextlib.contextmanager
def logged(folder: RunFolder) -> Iterator[None]:
  """Inside, process 0 alone speaks, and each of several processes has a log of its own."""
  number = jax.process_index()
  if jax.process_count() == 1:
    yield
    return
  with process_log(folder.process_log(number), speaks=number == 0):
    yield
