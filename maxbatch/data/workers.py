"""Processes that tokenize: one for every core, each making the shards that no other has claimed.

Each of them runs this file. Its arguments are its number and the pipe on which it says how far it is.
What it is to do comes by its standard input, which stays open as long as whoever started it is there.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import cloudpickle
import tqdm

from maxbatch.data.token_shard import ShardJob, make_shards
from maxbatch.data.tokenize import Recipe
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import claimed

_PROGRAM = ("-m", "maxbatch.data.workers")
_SAID_AFTER_SECONDS = 30
_PATIENCE_SECONDS = 10


def make_shards_in_processes(
  jobs: Sequence[ShardJob], recipe: Recipe, report: Callable[[int], None]
) -> None:
  """Makes shards in as many processes as there are cores; none where one core would do it all.

  The processes of this host take turns, whoever started them, so there may be shards left. Raises
  UserError: a source or the folder cannot be used, or a process ended by itself.
  """
  num_processes = min(os.cpu_count() or 1, len(jobs))
  if num_processes < 2:
    return
  read_end, write_end = os.pipe()
  work = cloudpickle.dumps((list(jobs), recipe))
  workers = []
  try:
    for number in range(num_processes):
      command = [sys.executable, *_PROGRAM, str(number), str(write_end)]
      # Where this process finds modules, the user's own among them.
      env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
      workers.append(
        subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write_end], env=env)
      )
      with contextlib.suppress(BrokenPipeError):  # It has ended; its exit code says why.
        workers[-1].stdin.write(work)
        workers[-1].stdin.flush()
    os.close(write_end)
    write_end = -1
    with open(read_end, closefd=False) as lines:
      for line in lines:
        message = json.loads(line)
        if "error" in message:
          raise UserError(message["error"])
        report(message["bytes"])
    for worker in workers:
      if code := worker.wait():
        raise UserError(
          f"a tokenizing process ended with exit code {code}; see what it says above; if "
          "nothing, it was killed, as the system does when memory runs out. Start again: what "
          "is finished stays"
        )
  finally:
    for end in (read_end, *([write_end] if write_end >= 0 else [])):
      os.close(end)
    _stop(workers)


def _stop(workers: Sequence[subprocess.Popen]) -> None:
  for worker in workers:
    worker.terminate()
    with contextlib.suppress(BrokenPipeError):
      assert worker.stdin is not None
      worker.stdin.close()
  for worker in workers:
    try:
      worker.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
      worker.kill()
      worker.wait()


@contextlib.contextmanager
def tokenizing_progress(part: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
  """Yields a function of the bytes read since its last call that shows how many and how fast.

  On a terminal a bar; elsewhere a line now and then, if it takes long.
  """
  began = said = time.monotonic()
  done = 0
  # disable=None: no bar where the output is not a terminal.
  with tqdm.tqdm(
    total=total_bytes,
    desc=f"tokenizing {part}",
    unit="B",
    unit_scale=True,
    disable=None,
    leave=False,
  ) as bar:

    def report(num_bytes: int) -> None:
      nonlocal done, said
      done += num_bytes
      bar.update(num_bytes)
      now = time.monotonic()
      if bar.disable and now - said > _SAID_AFTER_SECONDS:
        said = now
        print(
          f"tokenizing {part}: {done / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB, "
          f"{done / 1e6 / (now - began):.3g} MB/s",
          flush=True,
        )

    yield report
  if (seconds := time.monotonic() - began) > _SAID_AFTER_SECONDS:
    print(
      f"tokenized {part}: {done / 1e6:,.0f} MB in {seconds:,.0f} s, {done / 1e6 / seconds:.3g} "
      "MB/s",
      flush=True,
    )


def _main(number: str, pipe: str) -> None:
  """Makes the shards that nobody else does, if no process of that number works on this host."""
  # Ctrl-C is sent to all processes of a terminal: whoever started this one ends it.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, _end_once)
  jobs, recipe = pickle.load(sys.stdin.buffer)
  threading.Thread(target=_end_with_parent, daemon=True).start()

  def say(message: dict[str, object]) -> None:
    try:
      os.write(int(pipe), json.dumps(message).encode() + b"\n")
    except BrokenPipeError:  # Whoever started it has ended, of which a signal is on its way.
      signal.raise_signal(signal.SIGTERM)

  place = jobs[0].path.with_name(f".worker-{socket.gethostname()}-{number}")
  try:
    with claimed(place, wait=False) as is_ours:
      if is_ours:
        make_shards(jobs, recipe, lambda size: say({"bytes": size}), wait=False)
  except UserError as error:
    say({"error": str(error)})


def _end_once(number: int, _: object) -> None:
  """Ends the process; a second signal would cut off the removal of temporary files."""
  signal.signal(number, signal.SIG_IGN)
  sys.exit(1)


def _end_with_parent() -> None:
  os.read(sys.stdin.fileno(), 1)  # Not the buffer, whose lock a thread would keep at the end.
  os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
  _main(*sys.argv[1:])
