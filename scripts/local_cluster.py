"""What scripts/local_cluster.sh runs: `local_cluster.py N COMMAND LINE`, with signals and one exit code."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_LAST_WORDS_SECONDS = 60
"""For the others, when one has failed: they notice it themselves and say so."""
_POLL_SECONDS = 0.1


def main(arguments: Sequence[str]) -> int:
  """Starts N processes of a command line and waits; the exit code of the first that failed, or 0."""
  count, *words = arguments or [""]
  if not count.isdecimal() or count == "0":
    usage = "usage: scripts/local_cluster.sh N [COMMAND] [key=value ...]; for example N=2"
    print(usage, file=sys.stderr)
    return 2
  command = [*_ending_with_parent(), *words]
  number = int(count)
  place = [f"coordinator_address=localhost:{_free_port()}", f"num_processes={number}"]
  processes = [
    # In sessions of their own: Ctrl-C reaches them once, from here; a second one stops at once.
    subprocess.Popen([*command, *place, f"process_id={own}"], start_new_session=True)
    for own in range(number)
  ]
  for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, lambda got, _: _send(processes, got))
  return _wait(processes)


def _ending_with_parent() -> list[str]:
  """The beginning of a command that the kernel ends when this process is no more."""
  return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def _free_port() -> int:
  """Returns a port that nobody listens at, below those that the kernel gives to outgoing connections."""
  while True:
    port = random.SystemRandom().randrange(20_000, 32_000)
    with contextlib.suppress(OSError), socket.create_server(("", port)):
      return port


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
  for process in processes:
    process.send_signal(number)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
  """Waits for all; when one has failed, for the others no longer than a minute."""
  failed, limit = 0, float("inf")
  while any(process.poll() is None for process in processes):
    time.sleep(_POLL_SECONDS)
    codes = [process.poll() for process in processes]
    if not failed and any(codes):
      failed, limit = next(filter(None, codes)), time.monotonic() + _LAST_WORDS_SECONDS
    if time.monotonic() > limit:
      _send(processes, signal.SIGKILL)
  failed = failed or next(filter(None, (process.poll() for process in processes)), 0)
  return 128 - failed if failed < 0 else failed


if __name__ == "__main__":
  os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
  sys.exit(main(sys.argv[1:]))
