"""One of the processes that tokenize, as maxbatch.data.workers starts them.

Its arguments are its number and the pipe on which it says how far it is. What it is to do comes by
its standard input, which stays open as long as whoever started it is there.
"""

import json
import os
import pickle
import signal
import socket
import sys
import threading

from maxbatch.data.token_shard import make_shards
from maxbatch.errors import UserError
from maxbatch.run_folder.claim import claimed


def main(number: str, pipe: str) -> None:
  """Makes the shards that nobody else does, if no process of that number works on this host."""
  # Ctrl-C is sent to all processes of a terminal: whoever started this one ends it.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
  jobs, recipe = pickle.load(sys.stdin.buffer)
  threading.Thread(target=_end_with_parent, daemon=True).start()

  def say(message: dict[str, object]) -> None:
    os.write(int(pipe), json.dumps(message).encode() + b"\n")

  place = jobs[0].path.with_name(f".worker-{socket.gethostname()}-{number}")
  try:
    with claimed(place, wait=False) as is_ours:
      if is_ours:
        make_shards(jobs, recipe, lambda size: say({"bytes": size}), wait=False)
  except UserError as error:
    say({"error": str(error)})


def _end_with_parent() -> None:
  os.read(sys.stdin.fileno(), 1)  # Not the buffer, whose lock a thread would keep at the end.
  os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
  main(*sys.argv[1:])
