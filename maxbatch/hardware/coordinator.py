"""The key-value store of the processes that train together, which lives in process 0.

The one place that uses jax's client of its coordination service, which has no public name.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed as jax_distributed

from maxbatch.hardware.relay import open_relay
from maxbatch.hardware.rendezvous import Rendezvous

_PREFIX = "maxbatch/"
_ERRORS = (jax.errors.JaxRuntimeError, ValueError, RuntimeError)
"""jaxlib has several types for what the service answers."""


@contextlib.contextmanager
def relayed(rendezvous: Rendezvous, lost: Callable[[], None]) -> Iterator[None]:
  """In this context jax.distributed.initialize connects to process 0 through a relay.

  Before that all processes meet.

  Args:
    rendezvous: where they do.
    lost: called when process 0 has closed the connection.
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
    """The value of a key, for which it waits; None if it has none by then."""
    try:
      return self._client.blocking_key_value_get(_PREFIX + key, int(seconds * 1000))
    except _ERRORS:
      return None

  def within(self, folder: str) -> dict[str, str]:
    """The keys below a folder, without its name, and their values; {} where that is refused."""
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
    """Waits until all processes have come here."""
    self._client.wait_at_barrier(_PREFIX + name, int(seconds * 1000))
