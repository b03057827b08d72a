"""One decision of all processes: from process 0's clock and files, or from what each of them found."""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.hardware.ending import own_peers
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.paths import RunFolder

_NAMED, _LINES, _LETTERS = 3, 12, 80
"""So many processes, differences and letters of a value a message shows."""
_PATIENCE_SECONDS = 5.0


_exchanges = itertools.count()


class Exchange:
  """Exchanges of values between all processes, one after the other, in the same order in all.

  No device takes part, so that any thread may ask for them, whatever the devices do meanwhile.
  """

  def __init__(self) -> None:
    """Counts exchanges: all processes begin as many of them, in the same order."""
    self._name, self._numbers = next(_exchanges), itertools.count()
    self._waits: concurrent.futures.Future[list[Any]] | None = None
    self._is_given_up = False

  def __call__(self, value: Any, seconds: float | None = None) -> list[Any]:
    """Returns every process's value, plain as JSON, in all processes, by the number of the process.

    Raises:
      CancelledError: it is given up.
      TimeoutError: a process has not come within `seconds`.
      RuntimeError: the run ends, because of another process.
    """
    # A process alone encodes it as well, so that a value that cannot be sent fails there too.
    value = json.loads(json.dumps(value))
    if jax.process_count() == 1:
      return [value]
    self._waits = own_peers().gather(f"{self._name}/{next(self._numbers)}", value)
    if self._is_given_up:
      self._waits.cancel()
    return self._waits.result(seconds)

  def give_up(self) -> None:
    """Ends a call under way in another thread, and all later ones."""
    self._is_given_up = True
    if self._waits:
      self._waits.cancel()


gather = Exchange()
"""Of the main thread."""


def broadcast_one_to_all(value: Any) -> Any:
  """Returns process 0's value in all processes; the other processes' values are ignored.

  All processes must call it, in the same order, with plain values.
  """
  return gather(value if jax.process_index() == 0 else None)[0]


@contextlib.contextmanager
def sync_errors() -> Iterator[None]:
  """Makes all processes refuse what one refuses in this context; process 0 says it, and whose it
  is.

  Without it the others would wait in the next collective for the one that has left. There may be no
  collective inside.

  Raises:
    UserError: one was raised in this context, in any process.
  """
  if jax.process_count() == 1:
    yield
    return
  failure = ""
  try:
    yield
  except UserError as error:
    failure = str(error)
  check_none_failed(gather(failed_here(failure)))


def failed_here(failure: str) -> tuple[str, str]:
  """Returns what `check_none_failed` needs of this process; of all alike where nothing has failed."""
  return (socket.gethostname() if failure else "", failure)


def check_none_failed(results: Sequence[tuple[str, str]]) -> None:
  """Checks that nothing has failed in any process, of each of which `results` has `failed_here`.

  Raises:
    UserError: something has; process 0 says it, and whose it is.
  """
  if any(failure for _, failure in results):
    raise shared_error(_combined(results))


def shared_error(message: str) -> UserError:
  """Returns an error that all processes raise, of which process 0 prints it."""
  return UserError(message) if jax.process_index() == 0 else SaidByAnotherError(message)


def check_alike(values: Mapping[str, Any]) -> None:
  """Checks that all processes have the same plain values under the same names.

  Raises:
    UserError: some differ from those of process 0; names processes, hosts, names and values.
  """
  text = json.dumps(values, sort_keys=True)
  if len(set(gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
    return
  host = socket.gethostname()
  first_host, first = broadcast_one_to_all([host, values])
  own = _differences(first, json.loads(text))[: _LINES + 1]
  lines = [
    f"  process {number} on {host}: {difference}"
    for number, (host, differences) in enumerate(gather([host, own]))
    for difference in differences
  ]
  more = ["  and other differences"] if len(lines) > _LINES else []
  raise shared_error(
    "\n".join(
      [
        f"the processes were started differently; compared with process 0 on {first_host}:",
        *lines[:_LINES],
        *more,
        "Start all of them with the same keys, the same installation and the same data.",
      ]
    )
  )


@contextlib.contextmanager
def one_process_at_a_time() -> Iterator[None]:
  """Lets process 0 pass through this context before the others, who find the files that it made.

  Raises:
    UserError: one was raised in this context, in any process.
  """
  with sync_errors():
    try:
      if jax.process_index() > 0:
        gather(None)
      yield
    finally:
      if jax.process_index() == 0:
        gather(None)


def _differences(first: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
  """Returns what differs from process 0's values, a line per name."""
  absent = "(absent)"
  pairs = {
    name: (first.get(name, absent), results.get(name, absent)) for name in {**first, **results}
  }
  return [
    f"{name}={_shown(now)} instead of {_shown(before)}"
    for name, (before, now) in pairs.items()
    if before != now
  ]


def _shown(value: object) -> str:
  text = '""' if value == "" else str(value)
  return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…"


def _combined(results: Sequence[tuple[str, str]]) -> str:
  """Combines the failures of all processes, each given as its host and what failed there, or
  nothing."""
  different = {failure for _, failure in results}
  if len(different) == 1:
    return different.pop()
  failing = [(number, *one) for number, one in enumerate(results) if one[1]]
  lines = [f"process {number} on {host}: {failure}" for number, host, failure in failing[:_NAMED]]
  if len(failing) > _NAMED:
    lines.append(f"and {len(failing) - _NAMED} other processes")
  return "\n".join(lines)


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
  """Returns whether the file is there, which network file systems take some seconds to show
  elsewhere."""
  until = time.monotonic() + (_PATIENCE_SECONDS if jax.process_index() else 0)
  while not path.exists() and time.monotonic() < until:
    time.sleep(0.1)
  return path.exists()
