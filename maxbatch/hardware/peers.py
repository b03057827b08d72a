"""The processes that train together: how they meet, and what they say to each other until they end.

jax's coordination service ends all processes with a stack trace of C++ where two have the same
number, and it keeps the others waiting for one that refuses its keys. So process 0 listens at its
address itself first. Every other process says its number and its host there, and waits to hear that
all have come, or why none may start. These connections stay: by signs of life each notices that
another is gone, and values are exchanged over them, for which no device is needed. All of it is done in
a thread, for a process that waits in a collective hears nothing.

jax's client ends its process, too, in the moment in which its connection to process 0 breaks, before
anyone can say what has happened. So it is connected through a relay in its own process, and sees silence.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from itertools import islice
from typing import Any, TypeVar

from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.hardware.messages import (
  GONE,
  LONGEST_LINE_BYTES,
  Connection,
  Message,
  Star,
  Tasks,
  connect,
  split_address,
)

_Result = TypeVar("_Result")
_PAUSE_SECONDS = 0.2
_TICK_SECONDS = 0.25
_GRACE_SECONDS = 3.0
"""In which what is said must be on its way."""
_LONGEST_FAILURE = 4096
"""Letters of it that are sent."""
_CLOCKS_SECONDS = 60.0
"""By which clocks may differ; signs of life themselves are that old at times."""
_PIECE_BYTES = 1 << 16
_EVERYWHERE = ("::", "0.0.0.0", "")
_GIVEN_UP = "CANCELLED: the run ends"
LAST = "end"
"""The name of the last exchange: whoever is gone after it has ended in order."""


class Peers:
  """This process's connections to the others: process 0 waits for them (`serve`), who `check_in` there."""

  def __init__(self, limit_seconds: float, failure: str = "") -> None:
    """Takes for how long one may be silent, and why this process cannot start, which all others hear too."""
    self.limit_seconds = limit_seconds
    self.process, self.num_processes, self.own_host = 0, 1, socket.gethostname()
    self._failure = self.refusal = failure[:_LONGEST_FAILURE]
    """Why none may start, as far as it is known."""
    self._star, self._first = Star(limit_seconds, self._hear), None
    self._hosts, self._num_came, self._complete = {0: "an unknown host"}, 0, asyncio.Event()
    self._values: dict[str, dict[int, Any]] = {}
    self._waiting: dict[str, asyncio.Future[list[Any]]] = {}
    self.heard = queue.SimpleQueue[tuple[int, Message]]()
    """What others say to all, from which process: first why the run ends, {"kind": "end", "end": …}.
    {"kind": "lost", "silent": …} where one is gone; of this process itself {"kind": "still", "seconds": …},
    where it has been stopped for so long that the others have missed it."""
    self._ticked, self._is_over, self._is_given_up = time.monotonic(), False, False
    self._tasks = Tasks()

  def _begin(self) -> None:
    self._loop = asyncio.new_event_loop()
    self._loop.set_exception_handler(_report)
    threading.Thread(target=self._loop.run_forever, daemon=True, name="peers").start()

  def missing(self, most: int | None = None) -> list[int]:
    """Returns, in process 0, the first processes that have not come; `most` of them at most."""
    there = {*self._star.there()}
    return list(islice((n for n in range(1, self.num_processes) if n not in there), most))

  def num_missing(self) -> int:
    """Returns, in process 0, how many have not come: a number of processes that is a mistake may be large."""
    return self.num_processes - 1 - len(self._star.there())

  def host_of(self, process: int) -> str:
    """Returns a process's host, as far as it is known."""
    return self.own_host if process == self.process else self._hosts[process]

  # How they meet.

  def serve(self, address: str, num_processes: int) -> None:
    """Waits for all others, `num_processes` with this one, at HOST:PORT and lets them go on.

    Raises:
      UserError: none may start, for the reason that all have been sent.
      OSError: another program has the port.
    """
    self._begin()
    self.num_processes = num_processes
    host, port = split_address(address)
    try:
      self._run(self._serve(None if host in _EVERYWHERE else host, port))
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
      taken = f"another program has port {port} of this host; choose another port"
      raise ConnectionError(taken) from None
    if self.refusal:
      raise UserError(self.refusal)

  async def _serve(self, host: str | None, port: int) -> None:
    self._note_if_complete()
    server = await asyncio.start_server(
      self._admit, host, port, limit=LONGEST_LINE_BYTES, backlog=self.num_processes
    )
    self._tasks.begin(self._star.ping())
    self._tasks.begin(self._tick())
    await self._complete.wait()
    server.close()  # Before anyone connects to jax's service at this address.
    await self._star.send_all(self._welcome())

  def _welcome(self) -> Message:
    about = {"host": self.own_host, "num_processes": self.num_processes}
    return {"kind": "welcome", "refusal": self.refusal, **about}

  async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Lets one process wait, or refuses it and with it all."""
    connection = Connection(reader, writer)
    try:
      said = await connection.receive()
      _check(said, {"kind": str, "process": int, "host": str, "failure": str, "time": float})
    except (*GONE, asyncio.CancelledError):
      connection.close()  # It is no process of this run, or has never said anything.
      return
    if self._complete.is_set():
      connection.close()  # One too many; what it meets next at this address says so.
      return
    self._num_came += 1
    self.refusal = self.refusal or self._reason(**said)
    if self.refusal:
      await self._star.send_all(self._welcome())
      with contextlib.suppress(OSError):
        await connection.send(self._welcome())
      connection.close()
    else:
      self._hosts[said["process"]] = said["host"]
      self._star.add(said["process"], said, connection)
      self._compare_clocks(said["process"], said["time"])
    self._note_if_complete()

  def _compare_clocks(self, process: int, then: float) -> None:
    """Says that another one's clock is wrong: times in logs and of files are."""
    if abs(ahead := then - time.time()) > _CLOCKS_SECONDS:
      print(
        f"warning: the clock of process {process} on {self._hosts[process]} is {abs(ahead):,.0f} s "
        f"{'ahead of' if ahead > 0 else 'behind'} that of process 0; no decision rests on it, but "
        "the times in its log are wrong"
      )

  def _note_if_complete(self) -> None:
    if self._num_came >= self.num_processes - 1:
      self._complete.set()

  def _reason(self, process: int, host: str, failure: str, **_: object) -> str:
    """Returns why none may start now that this process has come; or nothing."""
    last = self.num_processes - 1
    if failure:
      return f"process {process} on {host}: {failure}"
    if not 0 < process <= last:
      return (
        f"process_id={process} on {host}: process 0 has "
        f"num_processes={self.num_processes}, of which the others are process 1 to process "
        f"{last}; start all with the same number of processes"
      )
    if process in self._star.there():
      return (
        f"process_id={process}: a process on {self._hosts[process]} and one on "
        f"{host} both have this number; each of the {self.num_processes} processes must "
        f"have its own, 0 to {last}"
      )
    return ""

  def check_in(self, address: str, process: int) -> str:
    """Waits for process 0, which need not listen yet, to say at HOST:PORT that all have come.

    Returns: Where to connect to jax's service in process 0, through the relay.

    Raises:
      UserError: none may start, as process 0 says, or what answers is no process 0 that waits.
    """
    self._begin()
    self.process = process
    return self._run(self._check_in(address))

  async def _check_in(self, address: str) -> str:
    said = {"process": self.process, "host": self.own_host, "failure": self._failure}
    said |= {"kind": "hello", "time": time.time()}
    answer: Message = {}
    while not answer:
      connection = None
      try:
        connection = await connect(address, None)
        await connection.send(said)
        answer = await self._answer(connection)
      except (*GONE,) as error:
        if connection:
          connection.close()
        if isinstance(error, ValueError) or getattr(error, "partial", b""):
          raise UserError(
            f"process_id={self.process}: the program that answers at {address} does not expect this "
            "process. Either process 0 has started with another process of this number; each needs its "
            "own. Or the address belongs to another program; choose another port"
          ) from None
        await asyncio.sleep(_PAUSE_SECONDS)  # As when process 0 ends, and may be started again.
      else:
        self.refusal, self._hosts[0] = answer["refusal"], answer["host"]
        self.num_processes = answer["num_processes"]
        if self.refusal:
          connection.close()
          raise SaidByAnotherError(self.refusal)
        self._first = connection
        self._complete.set()
        self._tasks.begin(self._tick())
        self._tasks.begin(self._follow(connection))
    return await self._relay(address)

  async def _answer(self, connection: Connection) -> Message:
    """Returns what process 0 says once all have come; until then it asks for signs of life."""
    while (message := await connection.receive())["kind"] == "ping":
      await connection.send({"kind": "pong"})
    return _check(message, {"kind": str, "refusal": str, "host": str, "num_processes": int})

  # The relay.

  async def _relay(self, address: str) -> str:
    server = await asyncio.start_server(
      lambda *near: self._carry(address, *near), "127.0.0.1", 0, limit=_PIECE_BYTES
    )
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

  async def _carry(
    self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    """Hands on what one connection carries, both ways, and never closes it."""
    host, port = split_address(address)
    while True:  # jax's own limit ends the wait.
      try:
        far_reader, far_writer = await asyncio.open_connection(host, port, limit=_PIECE_BYTES)
        break
      except OSError:
        await asyncio.sleep(_PAUSE_SECONDS)
    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
    await asyncio.Event().wait()

  # What they say.

  def tell(self, message: Message) -> None:
    """Sends a message to process 0, which sends it to all; without waiting."""
    self._loop.call_soon_threadsafe(lambda: self._tasks.begin(self._send(message)))

  async def _send(self, message: Message) -> None:
    if self._first:
      with contextlib.suppress(OSError):
        await self._first.send(message)
    else:
      await self._star.send_all(message)

  def gather(self, name: str, value: Any) -> concurrent.futures.Future[list[Any]]:
    """Exchanges plain values under a name of their own; all processes have all, by their numbers."""
    return asyncio.run_coroutine_threadsafe(self._gather(name, value), self._loop)

  async def _gather(self, name: str, value: Any) -> list[Any]:
    if self._is_given_up:
      raise RuntimeError(_GIVEN_UP)
    result = self._waiting.setdefault(name, self._loop.create_future())
    await self._put(name, value)
    return await result

  async def _put(self, name: str, value: Any) -> None:
    if self._first:
      await self._send({"kind": "value", "name": name, "value": value})
    else:
      self._note(0, name, value)

  def _note(self, process: int, name: str, value: Any) -> None:
    """Keeps, in process 0, what a process has put there; once all have, all are sent all."""
    values = self._values.setdefault(name, {})
    values[process] = value
    if len(values) == self.num_processes and name in self._waiting:
      del self._values[name]
      everything = [values[number] for number in range(self.num_processes)]
      once = everything[:1] if all(each == everything[0] for each in everything) else everything
      self._tasks.begin(self._send({"kind": "all", "name": name, "values": once}))
      self._resolve(name, once)

  def _resolve(self, name: str, values: list[Any]) -> None:
    """Ends the wait for an exchange; where all have said the same, it is in `values` once."""
    self._is_over |= name == LAST
    waiting = self._waiting.pop(name, None)
    if waiting and not waiting.done():
      waiting.set_result(values if len(values) > 1 else values * self.num_processes)

  def give_up(self) -> None:
    """Ends all exchanges with a RuntimeError, those to come as well."""

    def end() -> None:
      self._is_given_up = True
      for waiting in self._waiting.values():
        if not waiting.done():
          waiting.set_exception(RuntimeError(_GIVEN_UP))

    self._loop.call_soon_threadsafe(end)

  def collect(self, name: str, value: Any, seconds: float = _GRACE_SECONDS) -> dict[int, Any]:
    """Puts a value in process 0; returns there what all that are there have put, if in time."""
    self._run(self._put(name, value), _GRACE_SECONDS)
    deadline = time.monotonic() + seconds
    while self._first is None and time.monotonic() < deadline:
      if {*self._star.there()} <= {*self._values.get(name, {})}:
        break
      time.sleep(_TICK_SECONDS / 10)
    return dict(self._values.get(name, {self.process: value}))

  # What is heard.

  def _hear(self, process: int, message: Message) -> None:
    """Takes, in process 0, what another one says."""
    if message["kind"] == "value":
      self._note(process, message["name"], message["value"])
    elif self._complete.is_set() and message["kind"] != "pong":
      self._pass_on(process, message)
    elif message["kind"] == "lost" and not self.refusal:
      self._num_came -= 1  # It may come again.

  async def _follow(self, connection: Connection) -> None:
    """Takes what process 0 says."""
    is_silent = False
    try:
      while True:
        message = await connection.receive(self.limit_seconds)
        if message["kind"] == "ping":
          await connection.send({"kind": "pong"})
        elif message["kind"] == "all":
          self._resolve(message["name"], message["values"])
        else:
          self._pass_on(0, message)
    except TimeoutError:
      is_silent = True
    except GONE:
      pass
    self._pass_on(0, {"kind": "lost", "silent": is_silent})

  def _pass_on(self, process: int, message: Message) -> None:
    stood = time.monotonic() - self._ticked
    if message["kind"] == "lost" and self._is_over:
      return
    if message["kind"] == "lost" and stood > self.limit_seconds:
      process, message = self.process, {"kind": "still", "seconds": stood}
    self.heard.put((process, message))

  async def _tick(self) -> None:
    """Notes that this process is not stopped from outside; the others would go on without it."""
    self._ticked = time.monotonic()
    while True:
      if (stood := time.monotonic() - self._ticked) > self.limit_seconds:
        self.heard.put((self.process, {"kind": "still", "seconds": stood}))
      self._ticked = time.monotonic()
      await asyncio.sleep(min(_TICK_SECONDS, self.limit_seconds / 4))

  def _run(self, work: Coroutine[Any, Any, _Result], seconds: float | None = None) -> _Result:
    return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
  """Copies until one of the two is closed."""
  with contextlib.suppress(OSError):
    while piece := await source.read(_PIECE_BYTES):
      target.write(piece)
      await target.drain()


def _report(loop: asyncio.AbstractEventLoop, context: Message) -> None:
  """Reports what goes wrong in the loop, but not that Python ends with it: jax needs the relay until then."""
  if "was destroyed" not in context["message"]:
    loop.default_exception_handler(context)


def _check(message: Message, types: Mapping[str, type]) -> Message:
  """Returns a message, which must have values of these types under these names. Raises ValueError."""
  if {name: type(value) for name, value in message.items()} != types:
    raise ValueError("this is not what a process of a run says")
  return message
