"""The key-value store of the processes that train together, which lives in process 0.

The one place that uses jax's client of its coordination service, which has no public name. That client
ends its process with a stack trace of C++ in the moment in which its connection breaks, before anyone
can say what has happened. So it is connected through a relay in its own process: it sees silence
instead, and watch.py says who is gone.

Through it the processes connect their CPU devices before a step needs them. jax joins these by Gloo: a
group of devices when a program first reduces over it, and there each process waits half a minute for the
addresses of the others, which may still compile. So they meet here first, for as long as our own limit
says, and then add up a few numbers over every group of the mesh.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.errors import UserError
from maxbatch.hardware.agreement import check_none_failed
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


_connected: set[Mesh] = set()
"""A group is connected once for all programs."""
_meetings = itertools.count()


def connect_processes(limit_seconds: float) -> None:
  """Connects what processes compare and decide by; see `connect`."""
  if _needs_it():
    _together(_exchange_zeros, limit_seconds)


def connect(mesh: Mesh, limit_seconds: float) -> None:
  """Connects every group of a mesh's devices; all processes call it.

  Args:
    mesh: of a run; only CPU devices of several processes need it.
    limit_seconds: for how long the processes wait for each other.

  Raises:
    UserError: they have not come by then, or cannot be connected, in all processes.
  """
  if _needs_it() and mesh not in _connected:
    _together(lambda: _reduce_over_all_axes(mesh), limit_seconds)
    _connected.add(mesh)


def _needs_it() -> bool:
  return jax.process_count() > 1 and jax.devices()[0].platform == "cpu"


def _together(work: Callable[[], None], limit_seconds: float) -> None:
  """Does `work` in all processes at the same time; where one of them fails, all end with what each says.

  There is no second try: jaxlib keeps a group whose connection has failed, and fails again at once.
  """
  store, exchange = Coordinator(), Exchange()
  _meet(store, limit_seconds)
  mine = _failure(work)
  if mine:
    # Who comes late would take our address, at which nobody answers any more, and wait for ever.
    store.forget_addresses()
  results = _exchanged(exchange, [socket.gethostname(), mine], limit_seconds)
  check_none_failed([(host, failure and _refusal(failure)) for host, failure in results])


def _exchanged(exchange: Exchange, mine: list[str], limit_seconds: float) -> list[list[str]]:
  """Returns what each process says of its connections."""
  limit = threading.Timer(limit_seconds, exchange.give_up)
  limit.start()
  try:
    return exchange(mine)
  except concurrent.futures.CancelledError:
    raise UserError(
      f"a process did not connect its devices within jax_distributed_initialization_timeout="
      f"{limit_seconds:g} seconds of the others. If it is only slow, raise that limit; else start again"
    ) from None
  finally:
    limit.cancel()


def _meet(store: Coordinator, limit_seconds: float) -> None:
  try:
    store.meet(f"connect/{next(_meetings)}", limit_seconds)
  except RuntimeError:
    raise UserError(
      f"the {store.num_processes} processes did not arrive within jax_distributed_initialization_timeout="
      f"{limit_seconds:g} seconds to connect their devices. If they are only slow, raise that limit"
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


def _exchange_zeros() -> None:
  multihost_utils.process_allgather(np.int32(0))
  multihost_utils.broadcast_one_to_all(np.int32(0))


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
