"""The files of a run's folder, which process 0 writes for all."""

from pathlib import Path

import jax

from maxbatch.hardware.agreement import failing_together
from maxbatch.run_folder.atomic import write_run_file


def write_shared_file(path: Path, content: str | bytes) -> None:
  """Writes a file of a run's folder in process 0; all processes call it.

  Raises:
    UserError: it cannot be written; in all processes.
  """
  with failing_together():
    if jax.process_index() == 0:
      write_run_file(path, content)
