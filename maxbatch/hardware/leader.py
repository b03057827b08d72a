"""Who of a run's supervisors decides: which hosts train, from which copy, and when all start again.

The leader admits supervisors that join it, and calls at those that are missing, so that a host which
comes back is in the run again. A generation is one start of the training processes. It is claimed by
making a file in the run's folder, which only one of two halves of a divided network can do.
"""

import asyncio
import collections
import contextlib
import ipaddress
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.errors import (
  EXIT_DIVERGED,
  EXIT_PROCESS_FAILED,
  EXIT_ROWS,
  EXIT_USER_ERROR,
  UserError,
)
from maxbatch.hardware.copies import choose_keepers
from maxbatch.hardware.messages import (
  PINGS_PER_LIMIT,
  Connection,
  Message,
  Star,
  Tasks,
  address_of,
  connect,
)
from maxbatch.hardware.restarts import (
  Choice,
  Place,
  choose_hosts,
  has_finished,
  headers_of,
  how_ended,
  newest_copy,
)
from maxbatch.run_folder.atomic import elsewhere
from maxbatch.run_folder.events import FAULT, JOINED, RESTART, EventLog
from maxbatch.run_folder.paths import RunFolder

_FINAL = (0, EXIT_USER_ERROR, EXIT_DIVERGED, EXIT_ROWS)
"""Exit codes of training processes that another start would not change."""
FINISHED = "elastic: the run has finished, before this host could take part"
_TICK_SECONDS = 0.2
_HOUR_SECONDS = 3600.0
_LAST_WORDS_SECONDS = 5.0


class Leader:
  """Decides for all, from `run` to `resign`."""

  def __init__(self, place: Place, config: Config) -> None:
    """Takes what this supervisor knows of the run."""
    keys = config.distributed
    self._place, self._config = place, config
    self._limit = float(keys.jax_distributed_heartbeat_timeout_seconds)
    self._patience = float(keys.jax_distributed_initialization_timeout)
    self.leads, self._code = True, None
    """Whether it does, and the exit code of a run that has ended."""
    self._began = time.time()
    self._star, self._copied = Star(self._limit, self._hear), dict[int, int]()
    """Whom it leads, and the step of the last copy that each one's training process has made."""
    self._dead = set[int]()
    self._happened = asyncio.Queue[tuple[int, Message]]()
    self._tasks = Tasks()
    self._restarts = collections.deque[float]()
    # A new leader comes after the loss of another, or of hosts that have been cut off.
    self._fault_time = time.monotonic() if place.generation else None
    self._is_new, self._was_silent = True, False

  def resign(self) -> None:
    """Stops deciding."""
    self.leads = False
    self._tasks.cancel()
    self._star.close()

  async def admit(self, message: Message, connection: Connection) -> None:
    """Takes in a supervisor that joins."""
    own = int(message["process"])
    self._dead.discard(own)
    await connection.send({"kind": "welcome"})
    self._star.add(own, message, connection)
    if self._code is not None:  # It comes between the end of the run and of the leader.
      return await self._star.send(own, {"kind": "end", "code": self._code})
    for each in self._star.there():
      await self._star.send(each, {"kind": "table", "table": self._table_for(each)})
    self._happened.put_nowait((own, {"kind": "joined"}))

  async def run(self) -> None:
    """Starts one generation after the other, until the run ends or this supervisor leads no more."""
    self._tasks.begin(self._star.ping())
    self._tasks.begin(self._call_missing())
    while True:
      if (code := await self._stop_all()) is not None:
        return await self._end(code)
      for own in set(self._place.members) - set(self._star.there()) if self._is_new else ():
        self._say(FAULT, f"process {own}: its supervisor is gone", process=own)
      choice = await self._choose()
      used = choice.hosts
      if not used:
        self._say(FAULT, f"cannot go on: {choice.reason}")
        return await self._end(EXIT_PROCESS_FAILED)
      try:
        is_claimed = await self._claim()
      except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return await self._end(EXIT_PROCESS_FAILED if self._place.generation else EXIT_USER_ERROR)
      if not is_claimed:
        print("elastic: other hosts of this run go on; waiting for them", flush=True)
        return await self._star.send_all({"kind": "look"}, last=self._place.own)
      about = [self._star.members[own].about for own in self._star.there()]
      await self._start(choice, newest_copy(about))
      code = await self._watch(used)
      if code is not None:
        return await self._end(code)

  # Whom it hears.

  def _hear(self, own: int, message: Message) -> None:
    """Puts what a supervisor says, or that it is lost, among what happened."""
    if message["kind"] == "stopped":
      self._star.members[own].about |= message
    elif message["kind"] == "copied":
      self._copied[own] = message["step"]
    elif message["kind"] == "lost":
      self._was_silent |= message["silent"]
      text = (
        f"has given no sign of life for {self._limit:g} s" if message["silent"] else "has ended"
      )
      message["text"] = f"its supervisor {text}"
    self._happened.put_nowait((own, message))

  async def _call_missing(self) -> None:
    """Calls at supervisors that were part of the run once, and are not there."""
    while True:
      for own, address in list(self._place.table.items()):
        if own not in (*self._star.there(), self._place.own):
          await self._call(own, address)
      await asyncio.sleep(_TICK_SECONDS)

  async def _call(self, own: int, address: str) -> None:
    said = {"kind": "lead", "port": self._place.port, "generation": self._place.generation}
    try:
      connection = await connect(address, self._limit / PINGS_PER_LIMIT)
      await connection.send(said)
      connection.close()
    except ConnectionRefusedError:
      self._dead.add(own)
    except OSError:  # Silent, which says nothing.
      self._dead.discard(own)

  def _address_for(self, receiver: int, own: int, port: int = 0) -> str:
    """Returns where one supervisor reaches another, or a port beside it, as far as the leader sees."""
    connection = self._star.members[own].connection
    host = connection.host
    if ipaddress.ip_address(host).is_loopback:  # It is on the leader's host.
      host = self._star.members[receiver].connection.own_host
    return address_of(host, port or self._star.members[own].about["port"])

  def _table_for(self, receiver: int) -> dict[str, str]:
    known = {str(own): address for own, address in self._place.table.items()}
    return known | {str(own): self._address_for(receiver, own) for own in self._star.there()}

  # Before a generation.

  async def _stop_all(self) -> int | None:
    """Has the training processes end, and waits for all supervisors that may be there.

    Returns the exit code where the run may not go on: it begins with all of its processes, or not at all.
    """
    asked, stopped, began = set[int](), set[int](), time.monotonic()
    if self._was_silent:  # Whoever is cut off ends its process soon after the leader misses it.
      await asyncio.sleep(self._limit / 4)
      self._was_silent = False
    while True:
      for own in set(self._star.there()) - asked:
        asked.add(own)
        await self._star.send(own, {"kind": "stop"})
      there, waited = set(self._star.there()), time.monotonic() - began
      known = [self._star.members[own].about["generation"] for own in there]
      self._place.generation = max([self._place.generation, *known])
      if there and there <= stopped and self._all_came(there, waited):
        return None
      is_late = waited > self._patience
      since = self._began - (self._patience if is_late else 0)
      if not self._place.generation and has_finished(RunFolder.of(self._config.run).events, since):
        print(FINISHED, flush=True)
        return 0
      if not self._place.generation and is_late:
        missing = sorted(set(range(self._place.num)) - there)
        self._say(
          FAULT,
          f"process {', '.join(map(str, missing))} did not come within "
          f"jax_distributed_initialization_timeout={self._patience:g} seconds",
        )
        return EXIT_PROCESS_FAILED
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TICK_SECONDS):
          own, message = await self._happened.get()
          if message["kind"] == "stopped":
            stopped.add(own)
          elif message["kind"] == "joined":
            asked.discard(own)
            stopped.discard(own)

  def _all_came(self, there: set[int], waited: float) -> bool:
    if not self._place.generation:
      return len(there) == self._place.num
    missing = set(self._place.members) - there - self._dead
    return not self._is_new or not missing or waited > self._limit

  async def _choose(self) -> Choice:
    """Returns who trains; nobody, and why, where too few have come in time."""
    began = time.monotonic()
    while True:
      choice = self._choice()
      if choice.hosts or time.monotonic() - began > self._patience:
        return choice
      await asyncio.sleep(_TICK_SECONDS)

  def _choice(self) -> Choice:
    there = self._star.there()
    return choose_hosts(self._config, self._place.num, there, self._devices())

  def _devices(self) -> int:
    """Returns the devices of each process; 0: not known yet."""
    simulated = self._config.mesh.num_simulated_devices
    known = [self._star.members[own].about["devices"] for own in self._star.there()]
    return simulated // self._place.num if simulated > 0 else max(known, default=0)

  async def _claim(self) -> bool:
    """Claims the next generation in the run's folder; whether no other part of the run has.

    Raises:
      UserError: the folder cannot be written to, after the first start for a long time.
    """
    folder, began = RunFolder.of(self._config.run).generations, time.monotonic()
    while True:
      try:
        return self._claim_in(folder)
      except OSError as error:
        if not self._place.generation or time.monotonic() - began > self._patience:
          raise UserError(
            f"{folder} cannot be written ({error.strerror}); make room there, or choose another folder"
            f"{elsewhere(folder)}"
          ) from None
      await asyncio.sleep(_TICK_SECONDS)

  def _claim_in(self, folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    claimed = max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)
    missing = set(self._place.members) - set(self._star.there()) - self._dead
    following = (self._place.generation if missing else claimed) + 1
    try:
      os.close(os.open(folder / str(following), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
      return False
    self._place.generation = following
    return True

  async def _start(self, choice: Choice, copy: tuple[int, int]) -> None:
    """Starts the training processes of a generation."""
    used, there = choice.hosts, self._star.there()
    count = len(used)
    self._note_start(choice, copy)
    keys = {"skip_jax_distributed_system": "true"} if self._place.num > 1 else {}
    if count > 1:
      port = self._star.members[used[0]].about["free_port"]
      seen = {self._address_for(other, used[0], port) for other in used[1:]}
      address = next((one for one in sorted(seen) if not one.startswith("127.")), min(seen))
      keys = {"coordinator_address": address, "num_processes": str(count)}
    keys |= choice.keys
    if self._config.mesh.num_simulated_devices > 0:
      keys["num_simulated_devices"] = str(self._devices() * count)
    hosts = [self._star.members[own].connection.host for own in used]
    alike = len(set(hosts)) == 1
    domains = [number if alike else hosts.index(host) for number, host in enumerate(hosts)]
    keepers = choose_keepers(domains)
    shared = {"kind": "start", "generation": self._place.generation, "copy": list(copy)}
    self._is_new, self._place.members = False, there
    for own in there:
      message: Message = shared | {"members": there, "keeper": ""}
      if own in used:
        number = used.index(own)
        if number in keepers:
          message["keeper"] = self._address_for(own, used[keepers[number]])
        message["keys"] = keys | ({"process_id": str(number)} if count > 1 else {})
        message["order"] = {
          "generation": self._place.generation,
          "process": number,
          "domains": domains,
          "copy": list(copy) if copy[1] else None,
          "sources": [
            {"address": self._address_for(own, one), "key": list(header.key)}
            for one in there
            for header in headers_of(self._star.members[one].about)
            if header.key[:2] == copy
          ],
        }
      self._copied[own] = copy[1]
      await self._star.send(own, message)

  def _note_start(self, choice: Choice, copy: tuple[int, int]) -> None:
    if self._fault_time is None:
      return
    down, self._fault_time = time.monotonic() - self._fault_time, None
    used, padding = choice.hosts, ""
    if choice.padding_rows:
      padding = f", {counted(choice.padding_rows, 'row')} of padding in a step"
    source = f"the copy of step {copy[1]} in memory" if copy[1] else "storage"
    spare = [own for own in self._star.there() if own not in used]
    self._restarts.append(time.monotonic())
    self._say(
      RESTART,
      f"start {self._place.generation} with {counted(len(used), 'process', 'processes')} "
      f"({', '.join(map(str, used))}) from {source}{padding}, {down:.1f} s after the fault",
      processes=used,
      spare=spare,
      step=copy[1],
      source="memory" if copy[1] else "storage",
      down_seconds=round(down, 3),
      **({"padding_rows": choice.padding_rows} if padding else {}),
    )

  # While it trains.

  async def _watch(self, used: Sequence[int]) -> int | None:
    """Returns the exit code of the run; None: all are to be started again."""
    ended, joined = dict[int, int](), set[int]()
    while True:
      own, message = await self._happened.get()
      kind = message["kind"]
      if kind == "ended" and message["generation"] == self._place.generation:
        ended[own] = message["code"]
        if message["asked"] or self._is_final(message["code"], used):
          if len(ended) == len(used) or message["code"]:
            await asyncio.sleep(_LAST_WORDS_SECONDS if len(ended) < len(used) else 0)
            return max(ended.values())
        elif not self._fault(own, how_ended(message["code"])):
          return EXIT_PROCESS_FAILED
        else:
          return None
      elif kind == "lost":
        if own in used and not self._fault(own, message["text"]):
          return EXIT_PROCESS_FAILED
        if own in used:
          return None
      elif kind == "joined" and own not in used:
        joined.add(own)
      alike = {self._copied[one] for one in used}
      if joined and kind == "copied" and len(alike) == 1:
        if len(self._choice().hosts) > len(used):
          self._fault_time = time.monotonic()
          names = ", ".join(map(str, sorted(joined)))
          self._say(JOINED, f"process {names}: back", processes=sorted(joined))
          return None
        joined.clear()

  def _is_final(self, code: int, used: Sequence[int]) -> bool:
    """Returns whether another start would end likewise.

    A mistake of the user's shows before anything is trained; later, that others did not come in time.
    """
    has_trained = any(self._copied[own] for own in used)
    return code in _FINAL and not (code == EXIT_USER_ERROR and has_trained)

  def _fault(self, own: int, text: str) -> bool:
    """Takes note of a fault; whether all may start again."""
    now = self._fault_time = time.monotonic()
    self._say(FAULT, f"process {own}: {text}", process=own)
    while self._restarts and now - self._restarts[0] > _HOUR_SECONDS:
      self._restarts.popleft()
    most = self._config.distributed.max_restarts_per_hour
    if len(self._restarts) < most:
      return True
    self._say(FAULT, f"not started again: max_restarts_per_hour={most} are used up")
    return False

  async def _end(self, code: int) -> None:
    self._code = code
    await self._star.send_all({"kind": "end", "code": code}, last=self._place.own)

  def _say(self, kind: str, text: str, **facts: Any) -> None:
    """Prints a decision, and appends it to the run's events."""
    print(f"elastic: {text}", flush=True)
    with contextlib.suppress(OSError), EventLog(RunFolder.of(self._config.run).path) as events:
      events.note(kind, text=text, generation=self._place.generation, **facts)
