"""What processes of a run say to each other, supervisors or those that train: JSON, a line each."""

import asyncio
import contextlib
import dataclasses
import json
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self

from maxbatch.command_line.signals import SUPERVISOR
from maxbatch.errors import EXIT_PROCESS_FAILED

Message = dict[str, Any]
LONGEST_LINE_BYTES = 1 << 28
GONE = (OSError, ValueError, LookupError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
"""What a connection raises that is broken, silent for too long, or to something else."""
PINGS_PER_LIMIT = 8
_PIECE_BYTES = 1 << 16


def encoded(message: Message) -> bytes:
  """Returns a message as it is sent."""
  return json.dumps(message).encode() + b"\n"


class Connection:
  """Messages between two supervisors, two training processes, or one and its supervisor."""

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
    await self.send_bytes(encoded(message))

  async def send_bytes(self, content: bytes) -> None:
    """Sends bytes. Raises OSError."""
    self._writer.write(content)
    await self._writer.drain()

  async def receive(self, seconds: float | None = None) -> Message:
    """Returns the next message.

    Raises:
      TimeoutError: there is none within `seconds`.
      IncompleteReadError, OSError: the connection is broken.
      ValueError: what came is no message; whoever sent it is no process of the run.
    """
    async with asyncio.timeout(seconds):
      line = await self._reader.readuntil(b"\n")
    try:
      message = json.loads(line)
    except RecursionError:  # Nothing but brackets.
      message = None
    if not isinstance(message, dict) or "kind" not in message:
      raise ValueError(f"{line[:80]!r} is no message of a run")
    return message

  async def receive_bytes(self, count: int) -> bytes:
    """Returns so many bytes. Raises IncompleteReadError or OSError."""
    return await self._reader.readexactly(count)

  def close(self) -> None:
    """Closes it."""
    with contextlib.suppress(OSError, RuntimeError):
      self._writer.close()


class Tasks:
  """Work beside all else; a mistake of the program in it ends this process, not in silence."""

  def __init__(self) -> None:
    self._running = set[asyncio.Task[None]]()

  def begin(self, work: Coroutine[Any, Any, None]) -> None:
    """Runs it."""
    task = asyncio.get_running_loop().create_task(work)
    self._running.add(task)
    task.add_done_callback(self._done)

  def _done(self, task: asyncio.Task[None]) -> None:
    self._running.discard(task)
    if not task.cancelled() and (error := task.exception()):
      traceback.print_exception(error)
      os._exit(EXIT_PROCESS_FAILED)

  def cancel(self) -> None:
    """Ends all of it."""
    for task in self._running:
      task.cancel()


@dataclasses.dataclass
class Member:
  """A process at the end of a connection of a star."""

  about: Message
  """What it has said of itself."""
  connection: Connection
  is_lost: bool = False


class Star:
  """The connections of one process, in the middle, with all others: who is there, what they say."""

  def __init__(self, limit_seconds: float, heard: Callable[[int, Message], None]) -> None:
    """Takes the seconds for which a member may be silent, and what is called with what each says.

    When one is gone, that is a message too: {"kind": "lost", "silent": whether it is only silent}.
    """
    self._limit, self._heard = limit_seconds, heard
    self.members = dict[int, Member]()
    self._tasks = Tasks()

  def there(self) -> list[int]:
    """Returns the members that are not lost."""
    return sorted(number for number, member in list(self.members.items()) if not member.is_lost)

  def add(self, number: int, about: Message, connection: Connection) -> None:
    """Listens to a member, in the place of one with the same number."""
    if before := self.members.get(number):
      before.connection.close()
    member = self.members[number] = Member(about, connection)
    self._tasks.begin(self._hear(number, member))

  async def send(self, number: int, message: Message) -> None:
    """Sends a message to one, if that is possible."""
    await self._send(number, encoded(message))

  async def _send(self, number: int, content: bytes) -> None:
    with contextlib.suppress(OSError):
      await self.members[number].connection.send_bytes(content)

  async def send_all(self, message: Message, last: int | None = None) -> None:
    """Sends a message to all that are there, to one of them last."""
    content, there = encoded(message), self.there()
    await asyncio.gather(*(self._send(number, content) for number in there if number != last))
    if last in there:
      await self._send(last, content)

  async def ping(self) -> None:
    """Asks all for signs of life, on and on."""
    pause = self._limit / PINGS_PER_LIMIT
    while True:
      with contextlib.suppress(TimeoutError):  # One that takes nothing keeps none from the others.
        async with asyncio.timeout(pause):
          await self.send_all({"kind": "ping"})
      await asyncio.sleep(pause)

  async def _hear(self, number: int, member: Member) -> None:
    is_silent = False
    while True:
      try:
        message = await member.connection.receive(self._limit)
      except TimeoutError:
        is_silent = True
        break
      except GONE:
        break
      self._heard(number, message)
    is_news = not member.is_lost and self.members.get(number) is member
    member.is_lost = True
    member.connection.close()
    if is_news:
      self._heard(number, {"kind": "lost", "silent": is_silent})

  def close(self) -> None:
    """Closes all connections."""
    self._tasks.cancel()
    for member in self.members.values():
      member.is_lost = True
      member.connection.close()


async def connect(address: str, seconds: float | None) -> Connection:
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


@dataclasses.dataclass(frozen=True)
class Order:
  """What a supervisor tells the training process that it starts."""

  generation: int
  process: int
  domains: list[int]
  """For each process the number of its host: hosts fail one by one."""
  link: int
  """File descriptor of a socket to the supervisor."""
  slots: list[int]
  """Of the files for this process's own copies."""
  copy: list[int] | None
  """Generation and step of the copy to resume from; None: the supervisors have none."""
  sources: list[dict[str, Any]]
  """Where its parts are, the nearest first: {"slot": descriptor} or {"address": HOST:PORT, "key": …}."""

  @classmethod
  def of_environment(cls, environment: Mapping[str, str]) -> Self | None:
    """Returns what this process's supervisor has said; None where it has none."""
    text = environment.get(SUPERVISOR)
    return cls(**json.loads(text)) if text else None


def await_order() -> list[str]:
  """Waits, in a process that its supervisor has started, for what it is told; returns keys that it gives.

  Raises:
    OSError: the supervisor is gone.
  """
  link, said = int(os.environ[SUPERVISOR]), b""
  while not said.endswith(b"\n"):
    said += (part := os.read(link, _PIECE_BYTES))
    if not part:
      raise OSError("the supervisor has ended")
  message = json.loads(said)
  os.environ[SUPERVISOR] = json.dumps(message["order"] | {"link": link})
  return [f"{key}={value}" for key, value in message["keys"].items()]
