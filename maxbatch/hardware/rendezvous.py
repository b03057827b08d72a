"""Processes find each other before jax connects them.

jax's coordination service ends all processes with a stack trace of C++ where two have the same
number, and it keeps the others waiting for one that refuses its keys. So process 0 listens at its
address itself first. Every other process says its number and its host there, and waits to hear that
all have come, or why none may start.
"""

import asyncio
import contextlib
import dataclasses
import errno
import json
import socket
import time

from maxbatch.errors import SaidByAnotherError, UserError

_PAUSE_SECONDS = 0.2
_LONGEST_LINE_BYTES = 1 << 16
_EVERYWHERE = ("::", "0.0.0.0", "")


@dataclasses.dataclass(frozen=True)
class _Guest:
  """What a process says of itself."""

  process: int
  host: str
  failure: str
  """Why it cannot start; empty: it can."""


class Rendezvous:
  """This process's part in it: in process 0 to `hold` it, in the others to `attend` it."""

  def __init__(self, failure: str = "") -> None:
    """`failure`: why this process cannot start, which all are told."""
    self._failure = self.refusal = failure
    """Why none may start, as far as it is known."""
    self._num_processes = 0
    self._waiting: dict[int, asyncio.StreamWriter] = {}
    self._hosts: dict[int, str] = {}
    self._num_refused = 0
    self._complete = asyncio.Event()

  def missing(self) -> list[int]:
    """In process 0: the processes that have not come."""
    return [number for number in range(1, self._num_processes) if number not in self._waiting]

  def hold(self, address: str, num_processes: int) -> None:
    """Waits for all others and lets them go on.

    Args:
      address: HOST:PORT to listen at.
      num_processes: with this one.

    Raises:
      UserError: none may start, for the reason that all have been told.
      OSError: another program has the port.
    """
    self._num_processes = num_processes
    host, _, port = address.rpartition(":")
    try:
      listener = _listener(host.strip("[]"), int(port), num_processes)
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
      taken = f"another program has port {port} of this host; choose another port"
      raise ConnectionError(taken) from None
    asyncio.run(self._until_all_are_here(listener))
    if self.refusal:
      raise UserError(self.refusal)

  def attend(self, address: str, process: int) -> None:
    """Waits for process 0 to say that all have come.

    Args:
      address: HOST:PORT of process 0, which need not listen yet.
      process: the number of this one.

    Raises:
      UserError: none may start, as process 0 says, or what answers is no process 0 that waits.
    """
    guest = _Guest(process, socket.gethostname(), self._failure)
    answer = b""
    while not answer:  # As when process 0 has ended, and may be started again.
      with contextlib.suppress(OSError), connected(address) as connection:
        connection.sendall(_line(dataclasses.asdict(guest)))
        answer = connection.makefile("rb").readline(_LONGEST_LINE_BYTES)
      time.sleep(0 if answer else _PAUSE_SECONDS)
    try:
      self.refusal = str(json.loads(answer)["refusal"])
    except (ValueError, LookupError, TypeError):
      raise UserError(
        f"process_id={process}: what answers at {address} does not wait for this process. Either "
        "process 0 has begun with another process of this number; each must have its own. Or the "
        "address is that of another program; choose another port"
      ) from None
    if self.refusal:
      raise SaidByAnotherError(self.refusal)

  async def _until_all_are_here(self, listener: socket.socket) -> None:
    self._count()
    server = await asyncio.start_server(self._receive, sock=listener, limit=_LONGEST_LINE_BYTES)
    await self._complete.wait()
    server.close()  # Before anyone connects to jax's service at this address.
    await asyncio.gather(*(_answer(writer, "") for writer in self._waiting.values()))

  async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one connection, until it is closed there."""
    try:
      guest = _Guest(**json.loads(await reader.readline()))
      await self._admit(guest, writer)
      with contextlib.suppress(OSError):
        await reader.read()
      if not self._complete.is_set() and self._waiting.get(guest.process) is writer:
        del self._waiting[guest.process]  # It may come again.
    except (OSError, ValueError, TypeError, asyncio.CancelledError):
      pass  # It is none of ours, or has never said anything.
    finally:
      writer.close()

  async def _admit(self, guest: _Guest, writer: asyncio.StreamWriter) -> None:
    """Lets one process wait, or refuses it and with it all."""
    if self._complete.is_set():
      writer.close()  # One too many; what it meets next at this address says so.
      return
    self.refusal = self.refusal or self._reason(guest)
    if self.refusal:
      refused, self._waiting = [writer, *self._waiting.values()], {}
      await asyncio.gather(*(_answer(each, self.refusal) for each in refused))
      self._num_refused += len(refused)
    else:
      self._waiting[guest.process], self._hosts[guest.process] = writer, guest.host
    self._count()

  def _count(self) -> None:
    """Takes note of whether all have come."""
    if self._num_refused + len(self._waiting) >= self._num_processes - 1:
      self._complete.set()

  def _reason(self, guest: _Guest) -> str:
    """Why none may start now that this process has come; or nothing."""
    last = self._num_processes - 1
    if guest.failure:
      return f"process {guest.process} on {guest.host}: {guest.failure}"
    if not 0 < guest.process <= last:
      return (
        f"process_id={guest.process} on {guest.host}: process 0 has been told num_processes="
        f"{self._num_processes}, of which the others are process 1 to process {last}; start all with "
        "the same number of processes"
      )
    if guest.process in self._waiting:
      return (
        f"process_id={guest.process}: a process on {self._hosts[guest.process]} and one on "
        f"{guest.host} both have this number; each of the {self._num_processes} processes must have "
        f"its own, 0 to {last}"
      )
    return ""


def connected(address: str) -> socket.socket:
  """A connection to HOST:PORT, for which it waits."""
  host, _, port = address.rpartition(":")
  while True:
    try:
      return socket.create_connection((host.strip("[]"), int(port)))
    except OSError:
      time.sleep(_PAUSE_SECONDS)


def _listener(host: str, port: int, backlog: int) -> socket.socket:
  if host not in _EVERYWHERE:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
  if not socket.has_dualstack_ipv6():
    return socket.create_server(("", port), backlog=backlog)
  return socket.create_server(
    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
  )


async def _answer(writer: asyncio.StreamWriter, refusal: str) -> None:
  with contextlib.suppress(OSError):
    writer.write(_line({"refusal": refusal}))
    writer.close()
    await writer.wait_closed()


def _line(said: dict[str, object]) -> bytes:
  return json.dumps(said).encode() + b"\n"
