"""A training process that is started before it is needed.

Importing is much of what a start takes. So beside each training process its supervisor has the next one, which
has imported all and waits for its order (`await_order` in hardware/messages.py). It has no devices yet.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Self

from maxbatch.command_line.signals import STOP, SUPERVISOR
from maxbatch.hardware.messages import GONE, LONGEST_LINE_BYTES, Connection, Message

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_LIBC = ctypes.CDLL(None)


class TrainingProcess:
  """One of them, from its start to its end."""

  def __init__(
    self, process: asyncio.subprocess.Process, socket_to_it: socket.socket, files: Sequence[int]
  ) -> None:
    """Takes what `begin` has started."""
    self._process, self._socket, self.descriptors = process, socket_to_it, files

  @classmethod
  async def begin(cls, command: Sequence[str], descriptors: Sequence[int]) -> Self:
    """Starts it, by a command line without the interpreter, with open files that it inherits."""
    ours, its = socket.socketpair()
    with its:
      process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        pass_fds=[its.fileno(), *descriptors],
        env=os.environ | {SUPERVISOR: str(its.fileno())},
        preexec_fn=_end_with_parent,
        start_new_session=True,  # Ctrl-C reaches it once, from its supervisor.
      )
    return cls(process, ours, descriptors)

  async def order(self, message: Message) -> Connection:
    """Has it train, as the message says; returns the connection to it."""
    link = Connection(*await asyncio.open_connection(sock=self._socket, limit=LONGEST_LINE_BYTES))
    with contextlib.suppress(*GONE):  # Its exit code will say why it is gone.
      await link.send(message)
    return link

  @property
  def is_there(self) -> bool:
    """Returns whether it has not ended."""
    return self._process.returncode is None

  async def wait(self) -> int:
    """Returns its exit code."""
    return await self._process.wait()

  def stop(self) -> None:
    """Has it finish its step, save and end."""
    self._process.send_signal(STOP)

  async def kill(self) -> None:
    """Ends it, whatever it does."""
    if self.is_there:
      with contextlib.suppress(ProcessLookupError):
        self._process.kill()
      await self._process.wait()
    self._socket.close()


def _end_with_parent() -> None:
  """Has the kernel, which is Linux as memory without a name is (copies.py), end it with its parent."""
  _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
