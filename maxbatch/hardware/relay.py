"""A connection to process 0 that stays open here when process 0 ends.

jax's client of the coordination service ends its process with a stack trace of C++ in the moment
in which its connection breaks, before anyone can say what has happened. Through this relay it sees
silence instead, and `hardware/watch.py` says who is gone.
"""

import socket
import threading
from collections.abc import Callable

from maxbatch.hardware.rendezvous import connected

_PIECE_BYTES = 1 << 16


def open_relay(address: str, lost: Callable[[], None]) -> str:
  """Listens on this host for connections, which it hands on to `address`.

  Args:
    address: HOST:PORT of process 0; need not listen yet.
    lost: called when the other side has closed a connection.

  Returns:
    HOST:PORT to connect to instead.
  """
  listener = socket.create_server(("127.0.0.1", 0))

  def serve() -> None:
    while True:
      near, _ = listener.accept()
      threading.Thread(target=_carry, args=(near, address, lost), daemon=True).start()

  threading.Thread(target=serve, daemon=True, name="relay").start()
  return f"127.0.0.1:{listener.getsockname()[1]}"


def _carry(near: socket.socket, address: str, lost: Callable[[], None]) -> None:
  """Hands on what one connection carries, both ways."""
  far = connected(address)  # jax's own limit ends the wait.
  far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  threading.Thread(target=_pump, args=(near, far), daemon=True).start()
  _pump(far, near)
  lost()


def _pump(source: socket.socket, target: socket.socket) -> None:
  """Copies until one of the two is closed, and closes neither."""
  try:
    while piece := source.recv(_PIECE_BYTES):
      target.sendall(piece)
  except OSError:
    return
