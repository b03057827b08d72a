"""Keeps a run going when processes or hosts of it die: `maxbatch train … elastic=true` becomes this.

One supervisor runs on each host, beside no jax. It starts this host's training process, keeps the copies
of its state in memory (hardware/copies.py), and starts it again. All supervisors follow one leader
(hardware/leader.py), which is process 0's at first, and the lowest that is there when that one is gone;
the leader follows itself too, so what a supervisor does is all here.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from maxbatch.command_line.run import EnduringStreams
from maxbatch.command_line.signals import INTERRUPTED, STOP, ending_signals
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.errors import EXIT_PROCESS_FAILED, EXIT_USER_ERROR, UserError
from maxbatch.hardware.copies import Header, Slot
from maxbatch.hardware.held import HeldCopies
from maxbatch.hardware.leader import FINISHED, Leader
from maxbatch.hardware.messages import (
  GONE,
  LONGEST_LINE_BYTES,
  Connection,
  Message,
  Tasks,
  address_of,
  connect,
  split_address,
)
from maxbatch.hardware.restarts import Place, has_finished
from maxbatch.hardware.waiting import TrainingProcess
from maxbatch.run_folder.paths import RunFolder

_PAUSE_SECONDS = 0.3
_PIECE_BYTES = 1 << 22
_PLACED = ("coordinator_address", "num_processes", "process_id")
"""Keys of the training process that its supervisor gives, or leaves out."""


class Supervisor:
  """This host's part."""

  def __init__(self, config: Config, command: Sequence[str]) -> None:
    """Takes the command line of the training process, without the interpreter."""
    keys = config.distributed
    self._config, self._command = config, list(command)
    self._limit = float(keys.jax_distributed_heartbeat_timeout_seconds)
    self._patience = float(keys.jax_distributed_initialization_timeout)
    self.place = Place(max(keys.process_id, 0), max(keys.num_processes, 1))
    self._first = keys.coordinator_address
    self._began, self._events = time.time(), RunFolder.of(config.run).events
    self._held = HeldCopies()
    self._child: TrainingProcess | None = None
    self._waiting: TrainingProcess | None = None
    """The next one."""
    self._link: Connection | None = None
    self._leader: Leader | None = None
    self._up: Connection | None = None
    self._called = ""
    self._devices, self._was_asked = 0, False
    self._tasks = Tasks()

  async def run(self) -> int:
    """Supervises until the run ends; returns the exit code."""
    loop = asyncio.get_running_loop()
    for number in ending_signals():
      loop.add_signal_handler(number, self._signalled, number)
    _, port = split_address(self._first) if self._first else ("", 0)
    port = port + self.place.own if port else 0
    try:
      server = await asyncio.start_server(
        self._serve, "" if self._first else "127.0.0.1", port, limit=LONGEST_LINE_BYTES
      )
    except OSError as error:
      print(
        f"error: coordinator_address={self._first} elastic=true: the supervisor of process "
        f"{self.place.own} listens on port {port}, so many above process 0's, and cannot "
        f"({error.strerror}); choose another port",
        file=sys.stderr,
      )
      return EXIT_USER_ERROR
    self.place.port = server.sockets[0].getsockname()[1]
    if self._first:
      self.place.table[0] = self._first
    try:
      while True:
        leader = await self._find_leader()
        code = await self._follow(leader) if leader else os.EX_OK
        if code is not None:
          return code
    except UserError as error:
      print(f"error: {error}", file=sys.stderr, flush=True)
      return EXIT_PROCESS_FAILED
    finally:
      await self._kill()
      if self._waiting:
        await self._waiting.kill()
      server.close()

  def _signalled(self, number: signal.Signals) -> None:
    """Has the training process stop; without one, ends at once."""
    if self._child is None or not self._child.is_there:
      print(INTERRUPTED, file=sys.stderr, flush=True)
      os._exit(128 + number)
    self._was_asked = True
    self._child.stop()

  # Who leads.

  async def _find_leader(self) -> Connection | None:
    """Returns the connection to the leader, which may be this supervisor; None: the run has finished."""
    began = asyncio.get_running_loop().time()
    dead = set[int]()
    while True:
      waited = asyncio.get_running_loop().time() - began
      if self._called:
        address, self._called = self._called, ""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
          if found := await self._join(address):
            return found
      if self.place.own in self.place.members:
        candidates = [one for one in self.place.members if one < self.place.own]
      else:  # It has never been part of the run, or not of what it is now.
        candidates = [one for one in self.place.table if one != self.place.own]
      for one in candidates:
        try:
          if found := await self._join(self.place.table[one]):
            return found
        except ConnectionRefusedError:
          dead.add(one)
        except (TimeoutError, OSError):
          if waited > self._limit:
            dead.add(one)
      if self._may_lead(candidates, dead):
        self._leader = Leader(self.place, self._config)
        self._tasks.begin(self._leader.run())
        found = await self._join(f"127.0.0.1:{self.place.port}")
        assert found is not None
        return found
      # It may have been just before, and its other hosts gone by now.
      since = self._began - (self._patience if waited > self._patience else 0)
      if not self.place.members and has_finished(self._events, since):
        print(FINISHED, flush=True)
        return None
      if not self.place.members and waited > self._patience:
        raise UserError(
          f"no supervisor of the run answers at {self._first} within "
          f"jax_distributed_initialization_timeout={self._patience:g} seconds; process 0's host must be "
          "there when the run starts"
        )
      await asyncio.sleep(_PAUSE_SECONDS)

  def _may_lead(self, candidates: Sequence[int], dead: set[int]) -> bool:
    if not self.place.members:
      return self.place.own == 0
    return self.place.own in self.place.members and dead.issuperset(candidates)

  async def _join(self, address: str) -> Connection | None:
    """Returns the connection to who leads at an address, or where that one says; None: not yet."""
    for _ in range(2):
      connection = await connect(address, self._limit)
      await connection.send({"kind": "join", **self._about()})
      answer = await connection.receive(self._limit)
      if answer.get("kind") == "welcome":
        return connection
      connection.close()
      address = str(answer.get("to") or "")
      if not address:
        return None
    return None

  def _about(self) -> Message:
    """Returns what a leader must know of this supervisor."""
    with socket.socket() as free:
      free.bind(("", 0))
      port = free.getsockname()[1]
    return {
      "process": self.place.own,
      "host": socket.gethostname(),
      "port": self.place.port,
      "free_port": port,
      "generation": self.place.generation,
      "lineage": self.place.lineage,
      "devices": self._devices,
      "copies": self._held.about(),
    }

  # What others ask.

  async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = Connection(reader, writer)
    with contextlib.suppress(*GONE):
      message = await connection.receive()
      kind = message.get("kind")
      if kind == "join" and self._leader and self._leader.leads:
        await self._leader.admit(message, connection)
        return
      if kind == "join":
        following = self._up.address if self._up and not self._leader else ""
        await connection.send({"kind": "elsewhere", "to": following})
      elif kind == "lead" and (not self._up or message["generation"] > self.place.generation):
        self._called = address_of(connection.host, message["port"])
        if self._up:  # It has found another leader, which the run has gone on without.
          self._up.close()
      elif kind == "put":
        await self._keep(message, connection)
      while kind == "read":
        await self._answer_read(message, connection)
        message = await connection.receive()
        kind = message.get("kind")
    connection.close()

  async def _answer_read(self, message: Message, connection: Connection) -> None:
    slot = self._held.find(message["key"])
    content = slot.read(message["offset"], message["count"]) if slot else b""
    await connection.send_bytes(f"{len(content)}\n".encode() + content)

  async def _keep(self, message: Message, connection: Connection) -> None:
    """Takes what no other host has of a copy."""
    header, failure = Header.of(message["header"]), ""
    slot = self._held.slot_for(header)
    try:
      offset, left = slot.begin(header), header.data_bytes
      while left:
        piece = await connection.receive_bytes(min(_PIECE_BYTES, left))
        offset, left = slot.append(piece, offset), left - len(piece)
      if header.key[0] == self.place.generation:
        slot.finish(header)
    except OSError as error:
      failure = str(error)
    await connection.send({"kind": "kept", "failure": failure})

  # What the leader says.

  async def _follow(self, leader: Connection) -> int | None:
    """Obeys a leader until the run ends, whose exit code it returns; None: the leader is gone."""
    self._up = leader
    try:
      while True:
        message = await leader.receive(self._limit)
        if message["kind"] == "end":
          await self._kill()
          return int(message["code"])
        if message["kind"] == "look":
          return None
        await self._obey(message, leader)
    except GONE:
      return None
    finally:
      self._up = None
      leader.close()
      await self._kill()
      if self._leader:
        self._leader.resign()
        self._leader = None

  async def _obey(self, message: Message, leader: Connection) -> None:
    if message["kind"] == "table":
      self.place.table = {int(one): where for one, where in message["table"].items()}
    elif message["kind"] == "stop":
      await self._kill()
      await leader.send({"kind": "stopped", **self._about()})
    elif message["kind"] == "start":
      self.place.generation, self.place.lineage = message["generation"], message["copy"]
      self.place.members = message["members"]
      self._held.drop_but(message["copy"])
      await self._start(message, leader)
    elif message["kind"] == "ping":
      await leader.send({"kind": "pong"})

  # The training process.

  async def _start(self, message: Message, leader: Connection) -> None:
    """Starts the training process, if this host has a part in this generation."""
    order = message.get("order")
    if order is None:
      return
    waiting, self._waiting = self._waiting, None
    if not waiting or not waiting.is_there:
      waiting = await self._begin()
    order["slots"] = [slot.descriptor for slot in self._held.own]
    for source in order["sources"]:
      slot = self._held.find(source["key"])
      if slot and slot.descriptor in waiting.descriptors:
        source["slot"] = slot.descriptor
    order["sources"].sort(key=lambda source: "slot" not in source)
    self._child = waiting
    self._link = await waiting.order({"order": order, "keys": message["keys"]})
    self._tasks.begin(self._listen(self._link, message["keeper"], leader))
    self._tasks.begin(self._await_end(self._child, message["generation"], leader))

  async def _begin(self) -> TrainingProcess:
    arguments = [one for one in self._command if one.partition("=")[0] not in _PLACED]
    return await TrainingProcess.begin(arguments, [slot.descriptor for slot in self._held.slots()])

  async def _await_end(self, child: TrainingProcess, generation: int, leader: Connection) -> None:
    code = await child.wait()
    if self._child is not child:
      return  # It was to end.
    if code == -STOP:  # It was still starting.
      print(INTERRUPTED, file=sys.stderr, flush=True)
      code = 128 + signal.SIGTERM
    with contextlib.suppress(OSError):
      ended = {"kind": "ended", "code": code, "generation": generation, "asked": self._was_asked}
      await leader.send(ended)

  async def _listen(self, link: Connection, keeper: str, leader: Connection) -> None:
    """Hears of the training process's copies, and sends what others lack to their keeper."""
    with contextlib.suppress(*GONE):
      for number in itertools.count():
        message = await link.receive()
        if message["kind"] == "devices":
          self._devices = message["count"]
          continue
        failure = await self._send_on(self._held.own[message["slot"]], keeper)
        if failure:
          print(
            f"elastic: no copy of step {message['step']} on another host: {failure}", flush=True
          )
        await link.send({"kind": "sent"})
        await leader.send({"kind": "copied", "step": message["step"]})
        if number < 2:  # Devices are number 0.
          continue
        self._held.drop_before(self.place.generation)  # The first copy is whole in all processes.
        # Until the second copy what was lost is trained again, with nothing beside it.
        if not self._waiting:
          self._waiting = await self._begin()

  async def _send_on(self, slot: Slot, keeper: str) -> str:
    """Sends what no other host has to another one; returns why it could not."""
    header = slot.header()
    if header is None or not keeper:
      return ""
    kept = header.only_alone()
    if not kept.data_bytes:
      return ""
    try:
      connection = await connect(keeper, self._limit)
      await connection.send({"kind": "put", "header": dataclasses.asdict(kept)})
      for piece in itertools.chain.from_iterable(header.pieces.values()):
        for offset in range(0, piece.nbytes if piece.alone else 0, _PIECE_BYTES):
          size = min(_PIECE_BYTES, piece.nbytes - offset)
          await connection.send_bytes(slot.read(header.data_offset + piece.offset + offset, size))
      answer = await connection.receive()
      connection.close()
    except GONE as error:
      return str(error) or type(error).__name__
    return str(answer["failure"])

  async def _kill(self) -> None:
    """Ends the training process, whatever it does."""
    child, self._child = self._child, None
    if child:
      await child.kill()
    if self._link:
      self._link.close()
      self._link = None


def main(command: Sequence[str]) -> int:
  """Supervises the training process of a command line, without the interpreter; its exit code."""
  config = load_config([one for one in command if "=" in one and not one.startswith("-")])
  with EnduringStreams():
    return asyncio.run(Supervisor(config, command).run())


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
