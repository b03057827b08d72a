"""Processes meet before jax connects them: here they are threads of one."""

import asyncio
import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
from processes import PATIENCE_SECONDS
from several_processes import free_port

from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.hardware.peers import Peers

HOST = socket.gethostname()


def connected(address: str) -> socket.socket:
  """A connection to who will listen there."""
  host, _, port = address.rpartition(":")
  deadline = time.monotonic() + PATIENCE_SECONDS
  while True:
    try:
      return socket.create_connection((host, int(port)))
    except ConnectionRefusedError:
      assert time.monotonic() < deadline
      time.sleep(0.01)


def outcomes(*parts: Callable[[], object]) -> list[str]:
  """What each part ended with, all at the same time: nothing, or what was refused."""
  said: list[queue.SimpleQueue[str]] = [queue.SimpleQueue() for _ in parts]

  def play(number: int) -> None:
    refused = ""
    try:
      parts[number]()
    except UserError as error:
      refused = f"{type(error).__name__}: {error}"
    said[number].put(refused)

  for number in range(len(parts)):
    threading.Thread(target=play, args=(number,), daemon=True).start()
  return [each.get(timeout=PATIENCE_SECONDS) for each in said]


def meeting(count: int, *processes: int, failures: dict[int, str] | None = None) -> list[str]:
  """How a rendezvous of `count` processes ends, to which these come beside process 0."""
  port, refused = free_port(), failures or {}
  return outcomes(
    lambda: Peers(60, refused.get(0, "")).serve(f"[::]:{port}", count),
    *(
      lambda number=number: Peers(60, refused.get(number, "")).check_in(f"localhost:{port}", number)
      for number in processes
    ),
  )


def test_all_go_on_once_all_are_there():
  assert meeting(1) == [""]
  assert meeting(4, 3, 1, 2) == [""] * 4


@pytest.mark.parametrize(
  ("count", "processes", "failures", "said"),
  [
    (3, (1, 1), {}, f"process_id=1: a process on {HOST} and one on {HOST} both have this number"),
    (3, (2, 5), {}, f"process_id=5 on {HOST}: process 0 has num_processes=3"),
    (3, (1, 2), {2: "learning_rat: no such key"}, f"process 2 on {HOST}: learning_rat: no such"),
    (3, (1, 2), {0: "learning_rat: no such key"}, "learning_rat: no such key"),
    (3, (1, 2), {2: "é" * 100_000}, f"process 2 on {HOST}: ééé"),
  ],
)
def test_all_hear_why_none_may_start(count, processes, failures, said):
  first, *others = meeting(count, *processes, failures=failures)
  assert first.startswith(f"{UserError.__name__}: {said}")
  assert len(others) == len(processes)
  for other in others:
    assert other.startswith(f"{SaidByAnotherError.__name__}: {said}")


FIRST = b'{"kind": "hello", "process": 1, "host": "a", "failure": "", "time": 0.5}\n'
STRANGERS = (
  b"GET / HTTP/1.1\r\n",
  b"\xff\xfe\n",
  b"[" * 50_000 + b"\n",
  b"x" * 200_000,
  b'{"kind": "hello", "process": 1.5, "host": "a", "failure": "", "time": 0.5}\n',
  b'{"kind": "hello", "process": NaN, "host": "a", "failure": "", "time": 0.5}\n',
  b'{"kind": "hello", "process": "1", "host": "a", "failure": 1, "time": 0.5}\n',
  b'{"kind": "hello", "process": 1}\n',
  b'{"process": 1, "host": "a", "failure": "", "time": 0.5}\n',
)


def test_one_that_went_away_may_come_again_and_strangers_are_not_counted(caplog):
  port, first = free_port(), Peers(60)
  held = threading.Thread(target=first.serve, args=(f"[::]:{port}", 3), daemon=True)
  held.start()
  for said in (*STRANGERS, FIRST):
    with connected(f"localhost:{port}") as connection, contextlib.suppress(ConnectionError):
      connection.settimeout(PATIENCE_SECONDS)
      connection.sendall(said)
      if said not in STRANGERS:
        while first.missing() != [2]:
          time.sleep(0.01)
      elif said[-1:] == b"\n":
        assert connection.recv(1) == b""  # It is not even answered.
  while first.missing() != [1, 2]:
    time.sleep(0.01)
  others = outcomes(
    *(lambda number=number: Peers(60).check_in(f"localhost:{port}", number) for number in (1, 2))
  )
  held.join(PATIENCE_SECONDS)
  assert (others, held.is_alive()) == (["", ""], False)
  assert not caplog.records  # Such as tracebacks of asyncio.


def test_all_may_come_at_the_same_moment(monkeypatch):
  """Connections that the system does not keep are tried again seconds later."""
  port, first, count, listeners = free_port(), Peers(60), 120, []
  inner = asyncio.start_server

  async def noted(*given, **options) -> asyncio.Server:
    server = await inner(*given, **options)
    listeners.extend(server.sockets)
    return server

  monkeypatch.setattr(asyncio, "start_server", noted)
  served = threading.Thread(target=first.serve, args=(f"[::]:{port}", count), daemon=True)
  served.start()
  with connected(f"localhost:{port}") as connection:
    connection.sendall(FIRST)
    while 1 in first.missing():
      time.sleep(0.01)
    # Of a socket that listens: how many it keeps (linux/tcp.h).
    state = listeners[-1].getsockopt(socket.SOL_TCP, socket.TCP_INFO, 104)
    (kept,) = struct.unpack_from("I", state, 28)
  while 1 not in first.missing():
    time.sleep(0.01)
  said = outcomes(
    *(
      lambda number=number: Peers(60).check_in(f"localhost:{port}", number)
      for number in range(1, count)
    )
  )
  served.join(PATIENCE_SECONDS)
  assert (set(said), kept) == ({""}, count)


def test_a_process_that_another_program_answers_is_refused():
  with socket.create_server(("localhost", 0)) as other:
    port = other.getsockname()[1]

    def answer() -> None:
      connection, _ = other.accept()
      connection.sendall(b"\x00\x00\x12\x04\n")
      connection.close()

    (said, _) = outcomes(lambda: Peers(60).check_in(f"localhost:{port}", 1), answer)
  assert said.startswith(
    f"UserError: process_id=1: the program that answers at localhost:{port} does not expect"
  )


def joined(limit_seconds: float):
  """Three processes that have met; what each hears of the others."""
  port, all_peers = free_port(), [Peers(limit_seconds) for _ in range(3)]
  first, *others = all_peers
  refused = outcomes(
    lambda: first.serve(f"[::]:{port}", 3),
    *(lambda k=k, o=o: o.check_in(f"localhost:{port}", k) for k, o in enumerate(others, 1)),
  )
  assert refused == [""] * 3
  return all_peers, [each.heard for each in all_peers]


def test_values_are_exchanged_and_an_end_is_that_of_all():
  all_peers, heard = joined(60)
  for name, values in (("different", [{"a": 1}, [2], None]), ("alike", [0] * 3)):
    waits = [p.gather(name, value) for p, value in zip(all_peers, values, strict=True)]
    assert [each.result(PATIENCE_SECONDS) for each in waits] == [values] * 3
  waiting = all_peers[0].gather("never", 1)
  all_peers[2].tell({"kind": "end", "end": "why"})
  assert heard[0].get(timeout=PATIENCE_SECONDS) == (2, {"kind": "end", "end": "why"})
  all_peers[0].give_up()
  for late in (waiting, all_peers[0].gather("later", 1)):
    with pytest.raises(RuntimeError, match="CANCELLED"):
      late.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_goes_is_missed_at_once_and_one_that_is_silent_after_the_limit(process):
  """A process that goes is one whose connections close; a silent one is one whose thread stands still."""
  all_peers, heard = joined(4)
  hears, other = (heard[1], 0) if process == 0 else (heard[0], process)
  silent = all_peers[process]
  silent._loop.call_soon_threadsafe(time.sleep, 6)
  assert hears.get(timeout=PATIENCE_SECONDS) == (other, {"kind": "lost", "silent": True})
  # It notices itself that it has stood still, whatever else it hears then.
  assert heard[process].get(timeout=PATIENCE_SECONDS)[1]["kind"] == "still"
  if process:
    assert all_peers[2]._first
    all_peers[2]._loop.call_soon_threadsafe(all_peers[2]._first.close)
    assert hears.get(timeout=PATIENCE_SECONDS) == (2, {"kind": "lost", "silent": False})
