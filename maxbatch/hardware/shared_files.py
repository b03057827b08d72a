"""The files of a run's folder, which process 0 writes for all."""

import socket
import time
from pathlib import Path

import jax

from maxbatch.hardware.agreement import gather, shared_error, sync_errors
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.paths import RunFolder

_PATIENCE_SECONDS = 5.0
_NAMED = 3
"""So many processes a message names."""


def write_shared_file(path: Path, content: str | bytes) -> None:
  """Writes a file of a run's folder in process 0; all processes call it.

  Raises:
    UserError: it cannot be written; in all processes.
  """
  with sync_errors():
    if jax.process_index() == 0:
      write_run_file(path, content)


def check_shared(folder: RunFolder) -> None:
  """Checks that all processes see the folder of the run, in which process 0 holds the lock.

  Raises:
    UserError: some have another folder under this name.
  """
  seen = gather([socket.gethostname(), _appears(folder.lock)])
  others = [f"process {number} on {host}" for number, (host, sees) in enumerate(seen) if not sees]
  if seen[0][1] and others:
    raise shared_error(
      f"base_output_directory={folder.path.parent}: every process writes its part of a checkpoint "
      f"there, and {', '.join(others[:_NAMED])}{' and others' if others[_NAMED:] else ''} cannot see "
      "what process 0 has written; name a folder on a file system that all hosts share"
    )


def _appears(path: Path) -> bool:
  """Whether the file is there, which network file systems take some seconds to show elsewhere."""
  until = time.monotonic() + (_PATIENCE_SECONDS if jax.process_index() else 0)
  while not path.exists() and time.monotonic() < until:
    time.sleep(0.1)
  return path.exists()
