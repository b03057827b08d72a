"""Runs of several real processes on this machine, which tests start, wait for and read."""

import dataclasses
import fcntl
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from preloaded import started
from processes import PATIENCE_SECONDS, REPOSITORY

from maxbatch.run_folder.metrics import read_metrics

_TIMES = ("step_seconds", "data_wait_seconds", "tokens_per_second")
TRAIN = [sys.executable, "-m", "maxbatch.train"]
PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections."""
_held: list[int] = []
"""Descriptors of the files of this process's ports, locked until it ends."""


@dataclasses.dataclass(frozen=True)
class Ended:
  """A process that has ended."""

  exit_code: int
  output: str
  errors: str


def free_port(count: int = 1) -> int:
  """Returns the first of so many neighbouring ports that nobody listens at, and no other test gets."""
  folder = pathlib.Path(tempfile.gettempdir(), f"maxbatch-ports-{os.getuid()}")
  folder.mkdir(exist_ok=True)
  while True:
    first = PORTS.start + secrets.randbelow(len(PORTS) - count + 1)
    files = []
    try:
      for port in range(first, first + count):
        files.append(os.open(folder / str(port), os.O_CREAT | os.O_RDWR))
        fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        socket.create_server(("", port)).close()
    except OSError:
      for file in files:
        os.close(file)
    else:
      _held.extend(files)
      return first


def place(number: int, count: int, port: int) -> list[str]:
  """The keys of process `number` of `count`."""
  address = f"coordinator_address=localhost:{port}"
  return [address, f"num_processes={count}", f"process_id={number}"]


def start(
  count: int,
  arguments: Sequence[str],
  *,
  command: Sequence[str] = TRAIN,
  own: Mapping[int, Sequence[str]] | None = None,
  variables: Mapping[int, Mapping[str, str]] | None = None,
  folders: Mapping[int, pathlib.Path] | None = None,
) -> list[subprocess.Popen[str]]:
  """Starts `count` processes of one run.

  Args:
    count: how many.
    arguments: keys of all of them.
    command: what each runs.
    own: further arguments of some processes, by their numbers.
    variables: further variables of the environment of some processes.
    folders: where some processes start; the others in the repository.
  """
  port, own, variables, folders = free_port(), own or {}, variables or {}, folders or {}
  return [
    started(
      [*command, *arguments, *place(number, count, port), *own.get(number, ())],
      variables.get(number),
      folder=folders.get(number, REPOSITORY),
    )
    for number in range(count)
  ]


def wait(processes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
  """Waits for all processes, in parallel; ends those that hang."""
  try:
    said = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
  finally:
    for process in processes:
      process.kill()
  return [Ended(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def train(count: int, arguments: Sequence[str], **more: Any) -> list[Ended]:
  """Trains in `count` processes; see `start`."""
  return wait(start(count, arguments, **more))


def records(run_folder: pathlib.Path) -> list[dict[str, float]]:
  """metrics.jsonl without what clocks say."""
  return [
    {key: value for key, value in one.items() if key not in _TIMES and key[:8] != "goodput/"}
    for one in read_metrics(run_folder)
  ]
