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
from collections.abc import Mapping
from typing import Any

from maxbatch.errors import SaidByAnotherError, UserError

_PAUSE_SECONDS = 0.2
_LONGEST_LINE_BYTES = 1 << 16
_LONGEST_FAILURE = 4096
"""Letters of it that are sent: with JSON's escapes they are within a line."""
_EVERYWHERE = ("::", "0.0.0.0", "")


@dataclasses.dataclass(frozen=True)
class _Hello:
  """What a process says of itself."""

  process: int
  host: str
  failure: str
  """Why it cannot start; empty: it can."""


class Rendezvous:
  """This process's part in it: process 0 waits for the others (`serve`), who `check_in` there."""

  def __init__(self, failure: str = "") -> None:
    """Takes as `failure` why this process cannot start, which all others hear too."""
    self._failure = self.refusal = failure[:_LONGEST_FAILURE]
    """Why none may start, as far as it is known."""
    self._num_processes = 0
    self._waiting: dict[int, asyncio.StreamWriter] = {}
    self._hosts: dict[int, str] = {}
    self._num_refused = 0
    self._complete = asyncio.Event()

  def missing(self) -> list[int]:
    """Returns, in process 0, the processes that have not come."""
    return [number for number in range(1, self._num_processes) if number not in self._waiting]

  def serve(self, address: str, num_processes: int) -> None:
    """Waits for all others, `num_processes` with this one, at HOST:PORT and lets them go on.

    Raises:
      UserError: none may start, for the reason that all have been sent.
      OSError: another program has the port.
    """
    self._num_processes = num_processes
    host, _, port = address.rpartition(":")
    try:
      listener = _listener(host.strip("[]"), int(port))
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
      taken = f"another program has port {port} of this host; choose another port"
      raise ConnectionError(taken) from None
    asyncio.run(self._serve(listener))
    if self.refusal:
      raise UserError(self.refusal)

  def check_in(self, address: str, process: int) -> None:
    """Waits for process 0, which need not listen yet, to say at HOST:PORT that all have come.

    Raises:
      UserError: none may start, as process 0 says, or what answers is no process 0 that waits.
    """
    hello = _Hello(process, socket.gethostname(), self._failure)
    answer = b""
    while not answer:  # As when process 0 has ended, and may be started again.
      with contextlib.suppress(OSError), connected(address) as connection:
        connection.sendall(_line(dataclasses.asdict(hello)))
        answer = connection.makefile("rb").readline(_LONGEST_LINE_BYTES)
      time.sleep(0 if answer else _PAUSE_SECONDS)
    try:
      self.refusal = _said(answer, {"refusal": str})["refusal"]
    except ValueError:
      raise UserError(
        f"process_id={process}: the program that answers at {address} does not expect this process. Either "
        "process 0 has started with another process of this number; each needs its own. Or the "
        "address belongs to another program; choose another port"
      ) from None
    if self.refusal:
      raise SaidByAnotherError(self.refusal)

  async def _serve(self, listener: socket.socket) -> None:
    self._note_if_complete()
    server = await asyncio.start_server(
      self._handle, sock=listener, limit=_LONGEST_LINE_BYTES, backlog=self._num_processes
    )
    await self._complete.wait()
    server.close()  # Before anyone connects to jax's service at this address.
    await asyncio.gather(*(_answer(writer, "") for writer in self._waiting.values()))

  async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one connection, until it is closed there."""
    try:
      hello = _Hello(
        **_said(await reader.readline(), {"process": int, "host": str, "failure": str})
      )
      await self._add(hello, writer)
      with contextlib.suppress(OSError):
        while await reader.read(_LONGEST_LINE_BYTES):
          pass
      if not self._complete.is_set() and self._waiting.get(hello.process) is writer:
        del self._waiting[hello.process]  # It may come again.
    except (OSError, ValueError, asyncio.CancelledError):
      pass  # It is no process of this run, or has never said anything.
    finally:
      writer.close()

  async def _add(self, hello: _Hello, writer: asyncio.StreamWriter) -> None:
    """Lets one process wait, or refuses it and with it all."""
    if self._complete.is_set():
      writer.close()  # One too many; what it meets next at this address says so.
      return
    self.refusal = self.refusal or self._reason(hello)
    if self.refusal:
      refused, self._waiting = [writer, *self._waiting.values()], {}
      await asyncio.gather(*(_answer(each, self.refusal) for each in refused))
      self._num_refused += len(refused)
    else:
      self._waiting[hello.process], self._hosts[hello.process] = writer, hello.host
    self._note_if_complete()

  def _note_if_complete(self) -> None:
    if self._num_refused + len(self._waiting) >= self._num_processes - 1:
      self._complete.set()

  def _reason(self, hello: _Hello) -> str:
    """Returns why none may start now that this process has come; or nothing."""
    last = self._num_processes - 1
    if hello.failure:
      return f"process {hello.process} on {hello.host}: {hello.failure}"
    if not 0 < hello.process <= last:
      return (
        f"process_id={hello.process} on {hello.host}: process 0 has "
        f"num_processes={self._num_processes}, of which the others are process 1 to process "
        f"{last}; start all with the same number of processes"
      )
    if hello.process in self._waiting:
      return (
        f"process_id={hello.process}: a process on {self._hosts[hello.process]} and one on "
        f"{hello.host} both have this number; each of the {self._num_processes} processes must "
        f"have its own, 0 to {last}"
      )
    return ""


def connected(address: str) -> socket.socket:
  """Returns a connection to HOST:PORT, for which it waits."""
  host, _, port = address.rpartition(":")
  while True:
    try:
      return socket.create_connection((host.strip("[]"), int(port)))
    except OSError:
      time.sleep(_PAUSE_SECONDS)


def _listener(host: str, port: int) -> socket.socket:
  if host not in _EVERYWHERE:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
  if not socket.has_dualstack_ipv6():
    return socket.create_server(("", port))
  return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)


async def _answer(writer: asyncio.StreamWriter, refusal: str) -> None:
  with contextlib.suppress(OSError):
    writer.write(_line({"refusal": refusal}))
    writer.close()
    await writer.wait_closed()


def _line(said: dict[str, object]) -> bytes:
  return json.dumps(said).encode() + b"\n"


def _said(line: bytes, types: Mapping[str, type]) -> dict[str, Any]:
  """Returns what a line of the protocol says: values of these types under these names.

  Raises:
    ValueError: it says something else; whoever sent it is no process of the run.
  """
  try:
    said = json.loads(line)
  except RecursionError:  # Nothing but brackets.
    said = None
  if not isinstance(said, dict) or {name: type(value) for name, value in said.items()} != types:
    raise ValueError(f"{line[:80]!r} is not a line of the protocol")
  return said
