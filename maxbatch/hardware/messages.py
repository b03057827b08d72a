"""What the supervisors of a run say to each other, and to their training processes: JSON, a line each."""

import asyncio
import contextlib
import json
import os
import traceback
from collections.abc import Coroutine
from typing import Any

from maxbatch.errors import EXIT_PROCESS_FAILED

Message = dict[str, Any]
LONGEST_LINE_BYTES = 1 << 28
GONE = (OSError, ValueError, LookupError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
"""What a connection raises that is broken, silent for too long, or to something else."""


class Connection:
  """Messages in JSON, a line each, between two supervisors or with a training process."""

  def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str = ""):
    """Takes as `address` HOST:PORT of the other side, where that is known."""
    self._reader, self._writer, self.address = reader, writer, address

  @property
  def host(self) -> str:
    """The other side's address, and this side's as the other one sees it."""
    return self._writer.get_extra_info("peername")[0]

  @property
  def own_host(self) -> str:
    """This side's address as the other one sees it."""
    return self._writer.get_extra_info("sockname")[0]

  async def send(self, message: Message) -> None:
    """Sends a message. Raises OSError."""
    await self.send_bytes(json.dumps(message).encode() + b"\n")

  async def send_bytes(self, content: bytes) -> None:
    """Sends bytes. Raises OSError."""
    self._writer.write(content)
    await self._writer.drain()

  async def receive(self, seconds: float | None = None) -> Message:
    """Returns the next message. Raises TimeoutError, IncompleteReadError or OSError: there is none."""
    async with asyncio.timeout(seconds):
      line = await self._reader.readuntil(b"\n")
    return json.loads(line)

  async def receive_bytes(self, count: int) -> bytes:
    """Returns so many bytes. Raises IncompleteReadError or OSError."""
    return await self._reader.readexactly(count)

  def close(self) -> None:
    """Closes it."""
    with contextlib.suppress(OSError, RuntimeError):
      self._writer.close()


def spawn(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> None:
  """Runs work beside all else; a mistake of the program in it ends this supervisor, not in silence."""

  def done(task: asyncio.Task[Any]) -> None:
    tasks.discard(task)
    if not task.cancelled() and (error := task.exception()):
      traceback.print_exception(error)
      os._exit(EXIT_PROCESS_FAILED)

  task = asyncio.get_running_loop().create_task(work)
  tasks.add(task)
  task.add_done_callback(done)


async def connect(address: str, seconds: float) -> Connection:
  """Returns a connection to HOST:PORT. Raises OSError or TimeoutError."""
  host, port = split_address(address)
  async with asyncio.timeout(seconds):
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE_BYTES)
  return Connection(reader, writer, address)


def split_address(address: str) -> tuple[str, int]:
  """Returns the two parts of HOST:PORT."""
  host, _, port = address.rpartition(":")
  return host.strip("[]"), int(port)


def address_of(host: str, port: int) -> str:
  """Returns HOST:PORT."""
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
