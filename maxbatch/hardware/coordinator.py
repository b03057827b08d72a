"""The key-value store of the processes that train together, which lives in process 0.

The one place that uses jax's client of its coordination service, which has no public name. That client
ends its process with a stack trace of C++ in the moment in which its connection breaks, before anyone
can say what has happened. So it is connected through a relay in its own process: it sees silence
instead, and watch.py says who is gone.
"""

import concurrent.futures
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed as jax_distributed

from maxbatch.hardware.rendezvous import Rendezvous, connected

_PIECE_BYTES = 1 << 16
_PREFIX = "maxbatch/"
_ERRORS = (jax.errors.JaxRuntimeError, ValueError, RuntimeError)
"""jaxlib has several types for what the service answers."""
_GLANCE_SECONDS = 1.0
"""Between looks whether the answer is still wanted. A process that is gone is found by its silence
(watch.py), and the run ends then."""
_PAUSE_SECONDS = 0.05


def open_relay(address: str, lost: Callable[[], None]) -> str:
  """Listens on this host for connections, which it hands on to process 0 at `address`, HOST:PORT.

  Returns HOST:PORT to connect to instead. `lost` is called when process 0 has closed a connection.
  """
  listener = socket.create_server(("127.0.0.1", 0))

  def serve() -> None:
    while True:
      near, _ = listener.accept()
      threading.Thread(target=_carry, args=(near, address, lost), daemon=True).start()

  threading.Thread(target=serve, daemon=True, name="relay").start()
  return f"127.0.0.1:{listener.getsockname()[1]}"


def _carry(near: socket.socket, address: str, lost: Callable[[], None]) -> None:
  """Hands on what one connection carries, both ways."""
  far = connected(address)  # jax's own limit ends the wait.
  far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  threading.Thread(target=_pump, args=(near, far), daemon=True).start()
  _pump(far, near)
  lost()


def _pump(source: socket.socket, target: socket.socket) -> None:
  """Copies until one of the two is closed, and closes neither."""
  try:
    while piece := source.recv(_PIECE_BYTES):
      target.sendall(piece)
  except OSError:
    return


@contextlib.contextmanager
def relayed(rendezvous: Rendezvous, lost: Callable[[], None]) -> Iterator[None]:
  """Lets jax.distributed.initialize, in this context, connect to process 0 through a relay.

  Before that all processes meet. `lost` is called when process 0 has closed the connection.
  """
  runtime = vars(jax_distributed)["_jax"]
  serve, connect = (
    runtime.get_distributed_runtime_service,
    runtime.get_distributed_runtime_client,
  )

  def serve_all(address: str, num_processes: int, **options: Any) -> object:
    rendezvous.serve(address, num_processes)
    return serve(address, num_processes, **options)

  def connect_by_relay(address: str, process: int, **options: Any) -> object:
    # Process 0 has the service itself, and cannot lose it.
    if process:
      rendezvous.check_in(address, process)
      address = open_relay(address, lost)
    return connect(address, process, **options)

  runtime.get_distributed_runtime_service = serve_all
  runtime.get_distributed_runtime_client = connect_by_relay
  try:
    yield
  finally:
    runtime.get_distributed_runtime_service = serve
    runtime.get_distributed_runtime_client = connect


class Coordinator:
  """The store; every call may take as long as the network keeps it waiting."""

  def __init__(self) -> None:
    state = jax_distributed.global_state
    self._client: Any = state.client
    self.process, self.num_processes = state.process_id, state.num_processes

  def put(self, key: str, value: str) -> None:
    """Sets a key, whatever it was, if that is possible now."""
    with contextlib.suppress(*_ERRORS):
      self._client.key_value_set(_PREFIX + key, value, allow_overwrite=True)

  def put_first(self, key: str, value: str) -> None:
    """Sets a key unless it has a value already."""
    with contextlib.suppress(*_ERRORS):
      self._client.key_value_set(_PREFIX + key, value)

  def wait_for(self, key: str, seconds: float) -> str | None:
    """Returns the value of a key, for which it waits; None if it has none by then."""
    try:
      return self._client.blocking_key_value_get(_PREFIX + key, int(seconds * 1000))
    except _ERRORS:
      return None

  def within(self, folder: str) -> dict[str, str]:
    """Returns the keys below a folder, without its name, and their values; {} where that is
    refused."""
    start = f"{_PREFIX}{folder}/"
    try:
      return {key.removeprefix(start): v for key, v in self._client.key_value_dir_get(start)}
    except _ERRORS:
      return {}

  def remove(self, folder: str) -> None:
    """Removes the keys below a folder, if that is possible now."""
    with contextlib.suppress(*_ERRORS):
      self._client.key_value_delete(f"{_PREFIX}{folder}/")

  def meet(self, name: str, seconds: float) -> None:
    """Waits until all processes have come here. Raises RuntimeError if one has not by then."""
    self._client.wait_at_barrier(_PREFIX + name, int(seconds * 1000))

  def forget_addresses(self) -> None:
    """Removes what Gloo, of jax's CPU client, has written for connections that have failed."""
    with contextlib.suppress(*_ERRORS):
      self._client.key_value_delete("cpu:gloo/")


_exchanges = itertools.count()


class Exchange:
  """Exchanges of values through the store, one after the other, in the same order in all processes.

  No device takes part, so that any thread may ask for them, whatever the devices do meanwhile.
  """

  def __init__(self) -> None:
    """Counts exchanges: all processes begin as many of them, in the same order."""
    self._name, self._numbers = f"exchange/{next(_exchanges)}", itertools.count()
    self._given_up = threading.Event()

  def __call__(self, value: Any) -> list[Any]:
    """Returns every process's value, plain as JSON, in all processes, by the number of the process.

    Raises:
      CancelledError: it is given up.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
      return [json.loads(text)]
    store, number = Coordinator(), next(self._numbers)
    folder = f"{self._name}/{number}"
    if store.process:
      store.put(f"{folder}/{store.process}", text)
      return json.loads(self._awaited(store, f"{folder}/all"))
    others = [self._awaited(store, f"{folder}/{each}") for each in range(1, store.num_processes)]
    results = [json.loads(each) for each in (text, *others)]
    store.put(f"{folder}/all", json.dumps(results))
    # Whoever has come here has what was exchanged before.
    store.remove(f"{self._name}/{number - 1}")
    return results

  def give_up(self) -> None:
    """Ends a call under way in another thread, and all later ones."""
    self._given_up.set()

  def _awaited(self, store: Coordinator, key: str) -> str:
    while not self._given_up.is_set():
      result = store.wait_for(key, _GLANCE_SECONDS)
      if result is not None:
        return result
      self._given_up.wait(_PAUSE_SECONDS)  # It answers at once where process 0 is gone.
    raise concurrent.futures.CancelledError
