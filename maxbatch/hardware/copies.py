"""A run's state in the memory of its hosts: written by training processes, kept by their supervisors.

A supervisor (hardware/supervisor.py) makes files that have no name and lie in memory, and its training
process inherits them. They outlive that process, and are gone with the supervisor. Such a slot holds
the length of a header, the header in JSON, then the pieces of arrays that the header lists; the length
is written last, so a slot that a killed process was writing to holds nothing.
"""

import collections
import dataclasses
import functools
import heapq
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from maxbatch.hardware.messages import Order, split_address

MOST_TIME = 0.01
"""Of the time copies may take."""
SECOND_AFTER_STEPS = 10
SLOTS = 2
"""Copies that a process has of its own: one stays whole while the other is written."""
Key = tuple[int, int, int]
"""Of a copy: the generation and the step in which it was made, and the process that made it."""
Read = Callable[[int, int], bytes]
"""Reads bytes of a slot: (offset, count) → bytes."""
_LENGTH_BYTES = 8
_CONNECT_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Piece:
  """A part of an array."""

  start: tuple[int, ...]
  stop: tuple[int, ...]
  offset: int
  """Bytes from the end of the header."""
  nbytes: int
  alone: bool
  """Whether no other host has it, nor a process of this host that comes before."""

  @property
  def shape(self) -> tuple[int, ...]:
    """Elements along each dim."""
    return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


@dataclasses.dataclass(frozen=True)
class Header:
  """What a slot holds."""

  key: Key
  record: dict[str, Any]
  """Position, plan, notes and fingerprints, as of a checkpoint (checkpoints/record.py)."""
  pieces: dict[str, list[Piece]]
  """By the name of the array."""

  @property
  def data_bytes(self) -> int:
    """Bytes of all pieces."""
    return sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)

  @functools.cached_property
  def data_offset(self) -> int:
    """Where in its slot the pieces begin."""
    return _LENGTH_BYTES + len(self.encoded())

  def encoded(self) -> bytes:
    """Returns it as JSON."""
    return json.dumps(dataclasses.asdict(self)).encode()

  @classmethod
  def of(cls, values: Mapping[str, Any]) -> Self:
    """Returns what JSON has made of one. Raises KeyError or TypeError: it is something else."""
    pieces = {
      name: [
        Piece(**one | {"start": tuple(one["start"]), "stop": tuple(one["stop"])}) for one in each
      ]
      for name, each in values["pieces"].items()
    }
    generation, step, process = values["key"]
    return cls((generation, step, process), values["record"], pieces)

  def only_alone(self) -> Self:
    """Returns the header of a copy that has the pieces alone which no other host has."""
    offset, laid_out = 0, {name: list[Piece]() for name in self.pieces}
    for name, pieces in self.pieces.items():
      for piece in (one for one in pieces if one.alone):
        laid_out[name].append(dataclasses.replace(piece, offset=offset))
        offset += piece.nbytes
    return dataclasses.replace(self, pieces=laid_out)


class Slot:
  """A file in memory that holds one copy, or nothing."""

  def __init__(self, descriptor: int | None = None) -> None:
    """Takes an open file, or makes one. Raises OSError: there is no memory for it."""
    self.descriptor = os.memfd_create("maxbatch") if descriptor is None else descriptor

  def clear(self) -> None:
    """Forgets what it holds, and gives its memory back."""
    os.ftruncate(self.descriptor, 0)

  def write(self, header: Header, pieces: Iterable[bytes | memoryview]) -> int:
    """Writes a copy whose pieces come in the header's order; returns its bytes.

    Raises:
      OSError: there is not enough memory.
    """
    offset = self.begin(header)
    for piece in pieces:
      offset = self.append(piece, offset)
    self.finish(header)
    return offset

  def begin(self, header: Header) -> int:
    """Writes a header, so that it holds nothing until `finish`; where its pieces begin."""
    os.pwrite(self.descriptor, bytes(_LENGTH_BYTES), 0)
    return self.append(header.encoded(), _LENGTH_BYTES)

  def append(self, content: bytes | memoryview, offset: int) -> int:
    """Writes bytes at an offset; where they end. Raises OSError: there is not enough memory."""
    left = memoryview(content)
    while left:
      written = os.pwrite(self.descriptor, left, offset)
      left, offset = left[written:], offset + written
    return offset

  def finish(self, header: Header) -> None:
    """Has it hold what was written since `begin`, and no memory of a larger copy before."""
    begins = header.data_offset
    os.ftruncate(self.descriptor, begins + header.data_bytes)
    os.pwrite(self.descriptor, (begins - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little"), 0)

  def read(self, offset: int, count: int) -> bytes:
    """Returns so many bytes from the beginning of the file on; fewer at its end."""
    parts = []
    while count and (part := os.pread(self.descriptor, count, offset)):
      parts.append(part)
      offset, count = offset + len(part), count - len(part)
    return b"".join(parts)

  def header(self) -> Header | None:
    """Returns what it holds; None: nothing, or nothing whole."""
    return header_of(self.read)

  @property
  def made(self) -> tuple[int, int]:
    """The generation and step in which its copy was made; lower than any where it holds nothing."""
    header = self.header()
    return header.key[:2] if header else (-1, -1)


def header_of(read: Read) -> Header | None:
  """Returns the header of a slot that `read` reads; None where there is none."""
  length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
  if not length:
    return None
  try:
    return Header.of(json.loads(read(_LENGTH_BYTES, length)))
  except (ValueError, LookupError, TypeError):
    return None


class Remote:
  """Reads a slot of another supervisor."""

  def __init__(self, address: str, key: Sequence[int]) -> None:
    """Connects. Raises OSError: nobody answers there."""
    self._key = list(key)
    self._connection = socket.create_connection(split_address(address), timeout=_CONNECT_SECONDS)
    self._file = self._connection.makefile("rb")

  def __call__(self, offset: int, count: int) -> bytes:
    """Returns so many bytes from an offset on. Raises OSError: the connection is broken."""
    request = {"kind": "read", "key": self._key, "offset": offset, "count": count}
    self._connection.sendall(json.dumps(request).encode() + b"\n")
    return self._file.read(int(self._file.readline() or b"0"))


class MemoryCopies:
  """The copies of a training process: it writes its own, and reads all that its supervisor names."""

  def __init__(self, order: Order, num_devices: int, period: int) -> None:
    """Says how many devices this process has; `period` is steps between copies, -1: as few as MOST_TIME."""
    self._period, self._is_first = period, True
    self.next_step = 1
    """The step after which a copy is due, if it has been reached."""
    self._order, self.domains = order, order.domains
    self._own = [Slot(descriptor) for descriptor in order.slots]
    self._sources, self._opened = list(order.sources), list[tuple[Header, Read]]()
    self._unsent = False
    self._say({"kind": "devices", "count": num_devices})

  @property
  def step(self) -> int | None:
    """The step after which the copy to resume from was made."""
    return self._order.copy[1] if self._order.copy else None

  def record(self) -> dict[str, Any]:
    """Returns the record of that copy. Raises OSError: no source of it answers."""
    return next(self._headers())[0].record

  def read(self, name: str, index: Sequence[slice], shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns a part of an array of that copy, in memory of its own.

    `index` is of the part, a slice for each dim; `shape` and `dtype` are the array's. Raises OSError: a source
    does not answer, or part of it is nowhere.
    """
    bounds = [one.indices(size) for one, size in zip(index, shape, strict=True)]
    low, high = [start for start, _, _ in bounds], [stop for _, stop, _ in bounds]
    result = np.empty([max(0, b - a) for a, b in zip(low, high, strict=True)], dtype)
    missing, seen = result.size, set[tuple[int, ...]]()
    for header, read in self._headers():
      for piece in header.pieces.get(name, ()):
        if not missing:
          return result
        first = [max(a, b) for a, b in zip(low, piece.start, strict=True)]
        last = [min(a, b) for a, b in zip(high, piece.stop, strict=True)]
        if piece.start in seen or any(a >= b for a, b in zip(first, last, strict=True)):
          continue
        seen.add(piece.start)
        if len(content := read(header.data_offset + piece.offset, piece.nbytes)) < piece.nbytes:
          raise OSError(f"a copy of {name} is not there any more")
        values = np.frombuffer(content, dtype).reshape(piece.shape)
        to = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, low, strict=True))
        of = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, piece.start, strict=True))
        result[to] = values[of]
        missing -= result[to].size
    if missing:
      raise OSError(f"{missing} elements of {name} are in no copy")
    return result

  def _headers(self) -> Iterator[tuple[Header, Read]]:
    """Yields each source's header, and how to read it."""
    yield from self._opened
    while self._sources:
      source = self._sources.pop(0)
      read = (
        Slot(source["slot"]).read if "slot" in source else Remote(source["address"], source["key"])
      )
      if header := header_of(read):
        self._opened.append((header, read))
        yield self._opened[-1]
    if not self._opened:
      raise OSError("the supervisors' copies are not there any more")

  def plan_next(self, step: int, seconds: float, step_seconds: float) -> None:
    """Chooses when the next copy is due, as the one of `step` took `seconds` and a step `step_seconds`."""
    period = max(1, math.ceil(seconds / step_seconds / MOST_TIME))
    # The first one of a start compiles what it needs.
    period = min(period, SECOND_AFTER_STEPS) if self._is_first else period
    self._is_first = False
    self.next_step = step + (self._period if self._period > 0 else period)

  def await_sent(self) -> None:
    """Waits until the last copy is where it is safe. Raises OSError: the supervisor is gone."""
    if self._unsent:
      self._unsent = False
      if not os.read(self._order.link, 1 << 12):
        raise OSError("the supervisor has ended")

  def write(self, record: dict[str, Any], leaves: Mapping[str, Any]) -> int:
    """Writes this process's part of a copy, in the place of the copy before the last; its bytes.

    All processes must have come through `await_sent` since the last one.

    Args:
      record: as of a checkpoint of the state.
      leaves: its jax arrays, by name.

    Raises:
      OSError: there is not enough memory.
    """
    pieces, arrays, offset = dict[str, list[Piece]](), [], 0
    for name, leaf in leaves.items():
      holders, pieces[name] = _holders(leaf), []
      for start, stop, data in _parts(leaf):
        alone = _sender(holders[start], self._order.domains) == self._order.process
        pieces[name].append(Piece(start, stop, offset, data.nbytes, alone))
        arrays.append(data)
        offset += data.nbytes
    header = Header((self._order.generation, record["step"], self._order.process), record, pieces)
    slot = min(self._own, key=lambda slot: slot.made)
    written = slot.write(header, map(_bytes, arrays))
    self._say({"kind": "copied", "step": record["step"], "slot": self._own.index(slot)})
    self._unsent = True
    return written

  def _say(self, said: Mapping[str, Any]) -> None:
    os.write(self._order.link, json.dumps(said).encode() + b"\n")


def _holders(leaf: Any) -> dict[tuple[int, ...], set[int]]:
  """Returns the processes that have each part of an array, by where the part begins."""
  result: dict[tuple[int, ...], set[int]] = {}
  for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
    start = tuple(one.indices(size)[0] for one, size in zip(index, leaf.shape, strict=True))
    result.setdefault(start, set()).add(device.process_index)
  return result


def _sender(holders: Iterable[int], domains: Sequence[int]) -> int | None:
  """Returns which of the processes that have a part sends it; None: they are on several hosts."""
  return min(holders) if len({domains[one] for one in holders}) == 1 else None


def choose_keepers(domains: Sequence[int]) -> dict[int, int]:
  """Returns for each process the one that keeps what no other host has; nothing where there is no other.

  No host has more copies in memory than need be, its own processes' included. As far as that allows they
  go to the next host in the ring, so that only two neighbours can lose a part.

  Args:
    domains: for each process the number of its host.
  """
  there = collections.defaultdict[int, list[int]](list)
  for process, host in enumerate(domains):
    there[host].append(process)
  ring, keepers = list(there), dict[int, int]()
  if len(ring) < 2:
    return {}
  left, room = {host: len(there[host]) for host in ring}, dict.fromkeys(ring, 0)
  least = sorted((left[host], place) for place, host in enumerate(ring))
  for _ in domains:
    size, place = least[0]
    heapq.heapreplace(least, (size + 1, place))
    room[ring[place]] += 1
  most, remaining = max(size for size, _ in least), len(domains)
  for place, own in enumerate(ring):
    others = ring[place + 1 :] + ring[:place]
    for process in there[own]:
      # A host that sends or takes each of the copies that remain must have this one.
      tight = others if remaining <= most else ()
      needed = [one for one in tight if left[one] + room[one] == remaining]
      host = next(one for one in needed or others if room[one])
      keepers[process] = there[host][-room[host] % len(there[host])]
      left[own] -= 1
      room[host] -= 1
      remaining -= 1
  return keepers


def kept_bytes(leaves: Iterable[Any], domains: Sequence[int]) -> tuple[int, int]:
  """Returns what the host that keeps most keeps of its own processes' state, and of others'.

  Args:
    leaves: the state's arrays, abstract or not, with their shardings.
    domains: for each process the number of its host.
  """
  keepers = choose_keepers(domains)
  own, others = collections.Counter[int](), collections.Counter[int]()
  for leaf in leaves:
    size = SLOTS * math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for holders in _holders(leaf).values():
      for process in holders:
        own[domains[process]] += size
      if (sender := _sender(holders, domains)) in keepers:
        others[domains[keepers[sender]]] += size
  host = max(own, key=lambda host: own[host] + others[host])
  return own[host], others[host]


def _parts(leaf: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Any]]:
  """Yields the different parts of an array that this process's devices have: start, stop, data."""
  seen = set[tuple[int, ...]]()
  for shard in leaf.addressable_shards:
    bounds = [one.indices(size) for one, size in zip(shard.index, leaf.shape, strict=True)]
    start = tuple(first for first, _, _ in bounds)
    if start not in seen:
      seen.add(start)
      yield start, tuple(last for _, last, _ in bounds), shard.data


def _bytes(array: Any) -> memoryview:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


_own: list[MemoryCopies] = []
"""Those of this process, once it has joined the others."""


def open_copies(num_devices: int, period: int) -> None:
  """Opens the copies that this process's supervisor keeps, if it has one; arguments of MemoryCopies."""
  order = Order.of_environment(os.environ)
  if order and not _own:
    _own.append(MemoryCopies(order, num_devices, period))


def own_copies() -> MemoryCopies | None:
  """Returns them; None where no supervisor has started this process."""
  return _own[0] if _own else None
