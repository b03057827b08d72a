"""One decision of all processes: from process 0's clock and files, or from what each of them found.

And how the CPU devices of several processes are connected before a step needs them. jax joins them by Gloo: a
group of devices when a program first reduces over it, and there each process waits half a minute for the
addresses of the others, which may still compile. So they meet here first, for as long as our own limit says,
and then add up a few numbers over every group of the mesh.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


_connected: set[Mesh] = set()
"""A group is connected once for all programs."""


def connect_processes(limit_seconds: float) -> None:
  """Waits for all processes, that may still start their devices.

  Raises:
    UserError: they have not come by then.
  """
  try:
    Exchange()(None, limit_seconds)
  except TimeoutError:
    raise UserError(
      f"the {jax.process_count()} processes did not arrive within jax_distributed_initialization_timeout="
      f"{limit_seconds:g} seconds to connect their devices. If they are only slow, raise that limit"
    ) from None


def connect(mesh: Mesh, limit_seconds: float) -> None:
  """Connects every group of a mesh's devices; all processes call it.

  Args:
    mesh: of a run; only CPU devices of several processes need it.
    limit_seconds: for how long the processes wait for each other.

  Raises:
    UserError: they have not come by then, or cannot be connected, in all processes.
  """
  is_needed = jax.process_count() > 1 and jax.devices()[0].platform == "cpu"
  if is_needed and mesh not in _connected:
    _together(lambda: _reduce_over_all_axes(mesh), limit_seconds)
    _connected.add(mesh)


def _together(work: Callable[[], None], limit_seconds: float) -> None:
  """Does `work` in all processes at the same time; where one of them fails, all end with what each says.

  There is no second try: jaxlib keeps a group whose connection has failed, and fails again at once.
  """
  connect_processes(limit_seconds)
  mine = _failure(work)
  if mine:
    # Who comes late would take our address, at which nobody answers any more, and wait for ever.
    client: Any = jax_distributed.global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError, RuntimeError, AttributeError):
      client.key_value_delete("cpu:gloo/")
  try:
    check_none_failed(Exchange()(failed_here(mine and _refusal(mine)), limit_seconds))
  except TimeoutError:
    raise UserError(
      f"a process did not connect its devices within jax_distributed_initialization_timeout="
      f"{limit_seconds:g} seconds of the others. If it is only slow, raise that limit; else start again"
    ) from None


def _failure(work: Callable[[], None]) -> str:
  """Does `work`; returns what Gloo has said, or nothing."""
  try:
    work()
  except jax.errors.JaxRuntimeError as error:
    if "Gloo" not in str(error):
      raise
    return str(error).splitlines()[0]
  return ""


def _refusal(failure: str) -> str:
  return (
    f"its devices and those of the other processes could not be connected: {failure}. A process that stands "
    "still for half a minute is enough for that; start again, on a machine that is less busy or with fewer "
    "processes"
  )


def _reduce_over_all_axes(mesh: Mesh) -> None:
  """Adds up a number of each device along every choice of axes."""
  spec = PartitionSpec(*mesh.axis_names)
  ones = jax.make_array_from_callback(
    mesh.devices.shape,
    NamedSharding(mesh, spec),
    lambda _: np.ones((1,) * mesh.devices.ndim, np.float32),
  )
  long = [name for name, size in mesh.shape.items() if size > 1]
  for count in range(1, len(long) + 1):
    for names in itertools.combinations(long, count):
      # Not jnp.sum, of which the compiler makes a sum for each axis.
      add = functools.partial(jax.lax.psum, axis_name=names)
      jax.block_until_ready(
        jax.jit(jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(ones)
      )
