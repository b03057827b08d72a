"""One of the processes that run reward functions, as maxbatch.rl.rewards starts them. No jax.

Its arguments are the descriptor of the connection on which calls come and rewards go, and the names
of the functions. Its standard input stays open as long as whoever started it is there.
"""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

from maxbatch.config.registry import registered
from maxbatch.errors import UserError
from maxbatch.rl.checkers import REWARDS
from maxbatch.rl.reward_calls import Reply, make_call


def main(descriptor: str, *names: str) -> None:
  """Imports the functions, says so, and answers calls until there are no more."""
  threading.Thread(target=_end_with_parent, daemon=True).start()
  connection = Connection(int(descriptor))
  plugins = connection.recv()
  try:
    functions = [registered("reward_functions", name, REWARDS, plugins) for name in names]
  except UserError as error:
    connection.send(Reply([], str(error)))
    return
  connection.send(Reply([]))
  while True:
    try:
      call = connection.recv()
    except EOFError:
      return
    connection.send(make_call(functions[call.function], call))


def _end_with_parent() -> None:
  os.read(sys.stdin.fileno(), 1)
  os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
  main(*sys.argv[1:])
