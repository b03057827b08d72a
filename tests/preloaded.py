"""Processes that find the imports done: a start costs a fork, not two seconds of processor time.

`started` starts `python -m MODULE …`, `python FILE …` or `python -c CODE …` as a process of its own,
with a jax of its own. It is forked from one that has imported what maxbatch imports, read base.yml
and let XLA look at the suite's flags, and has done nothing else: this file, as
`python tests/preloaded.py`, is that one, and forks at each request.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

_NUMBER = struct.Struct("i")
"""The process's number, then how it ended."""

_REPOSITORY = pathlib.Path(__file__).parents[1]
_LARGEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_READ_ONCE = ("PYTHON", "JAX_", "LC_", "LANG", "LD_", "GLIBC_")
"""Variables that count when Python, or jax, is loaded."""


def started(
  command: Sequence[str],
  variables: Mapping[str, str] | None = None,
  *,
  folder: pathlib.Path = _REPOSITORY,
  stdout: int | IO[str] = subprocess.PIPE,
  stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
  """Starts a command with the environment of tests/processes.py and these variables."""
  # The process that forks imports nothing that it does not need.
  from processes import environment

  env, usual = environment(**(variables or {})), environment()
  given: dict[str, Any] = {"cwd": folder, "env": env, "stdout": stdout, "stderr": stderr}
  read_once = [name for name in {*env, *usual} if name.startswith(_READ_ONCE)]
  same = all(env.get(name) == usual.get(name) for name in read_once)
  # Elsewhere than on Linux a fork that goes on is not safe.
  can_fork = sys.platform == "linux" and command[0] == sys.executable and same
  return (_Forked if can_fork else subprocess.Popen)(command, text=True, **given)


class _Forked(subprocess.Popen[str]):
  """A Popen that asks for a fork of the process which has the imports done."""

  _exit_status: int | None = None

  def _execute_child(self, args: Any, *more: Any) -> None:
    """What Popen does between making its pipes and reading them."""
    cwd, env = more[4], more[5]
    stdout_ours, stdout, stderr_ours, stderr = more[11:15]
    self._status, status = os.pipe()
    request = json.dumps({"command": args[1:], "cwd": str(cwd), "env": dict(env)}).encode()
    socket.send_fds(_forking_process(env)[0], [request], [stdout, stderr, status])
    os.close(status)
    for ours, its in ((stdout_ours, stdout), (stderr_ours, stderr)):
      if ours != -1:
        os.close(its)
    self._closed_child_pipe_fds = True
    self.pid = _read(self._status)
    self._child_created = True

  def _try_wait(self, wait_flags: int) -> tuple[int, int]:
    """os.waitpid(self.pid, wait_flags), for what is a child of another process."""
    if self._exit_status is None:
      patience = 0 if wait_flags & os.WNOHANG else None
      if not select.select([self._status], [], [], patience)[0]:
        return 0, 0
      self._exit_status = _read(self._status)
      os.close(self._status)
    return self.pid, self._exit_status

  def _internal_poll(self, *_: Any, **__: Any) -> int | None:
    if self.returncode is None and self._try_wait(os.WNOHANG)[0]:
      assert self._exit_status is not None
      self.returncode = os.waitstatus_to_exitcode(self._exit_status)
    return self.returncode


def _read(end: int) -> int:
  """The next number of a pipe."""
  return _NUMBER.unpack(os.read(end, _NUMBER.size))[0]


_forking: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


def _forking_process(env: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
  """Where the process that forks reads requests; it ends with this one."""
  if not _forking:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
      command = [sys.executable, __file__]
      process = subprocess.Popen(
        command, stdin=its.fileno(), stdout=subprocess.DEVNULL, env=env, cwd=_REPOSITORY
      )
    _forking.append((ours, process))
    atexit.register(_stop_forking, ours, process)
  return _forking[0]


def _stop_forking(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
  """Ends the process that forks, which reads no more requests."""
  ours.close()
  process.wait()


def _serve() -> dict[str, Any]:
  """Forks at every request, and returns it in the process that is to run it."""
  requests = socket.socket(fileno=os.dup(0))
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  while True:
    request, ends, _, _ = socket.recv_fds(requests, _LARGEST_BYTES, 3)
    if not request:
      os._exit(0)
    if os.fork() == 0:
      requests.close()
      _fork_and_wait(*ends)
      return json.loads(request)
    for end in ends:
      os.close(end)
    with contextlib.suppress(ChildProcessError):
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass


def _fork_and_wait(stdout: int, stderr: int, status: int) -> None:
  """Forks the process itself, in which this returns; waits for it and says how it ended."""
  _end_with_parent()
  process = os.fork()
  if process == 0:
    _end_with_parent()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for end in (stdout, stderr, status):
      os.close(end)
    return
  for end in (0, 1, 2, stdout, stderr):
    os.close(end)
  os.write(status, _NUMBER.pack(process))
  os.write(status, _NUMBER.pack(os.waitpid(process, 0)[1]))
  os._exit(0)


def _end_with_parent() -> None:
  """A run that a test has failed to stop is killed when the tests have ended."""
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(command: Sequence[str], cwd: str, env: Mapping[str, str]) -> NoReturn:
  """What `python COMMAND` does."""
  os.chdir(cwd)
  os.environ.clear()
  os.environ.update(env)
  first, *others = command
  sys.argv = [first, *others[1:]] if first in {"-m", "-c"} else [first, *others]
  if first == "-m":
    sys.path[0] = cwd
    runpy.run_module(others[0], run_name="__main__", alter_sys=True)
  elif first == "-c":
    sys.path[0] = ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(others[0], "<string>", "exec"), vars(sys.modules["__main__"]))
  else:
    sys.path[0] = str(pathlib.Path(first).parent)
    runpy.run_path(first, run_name="__main__")
  sys.exit()


if __name__ == "__main__":
  gc.set_threshold(100_000, 20, 20)
  import jaxlib.mlir.dialects.mhlo  # noqa: F401

  # Not the commands themselves: runpy warns of a module that it finds imported.
  import maxbatch.command_line.run
  import maxbatch.modes.compile_only
  import maxbatch.modes.run_log
  from maxbatch.config.load import load_config
  from maxbatch.hardware.devices import check_environment
  from maxbatch.run_report.background import BackgroundReport

  # As in tests/conftest.py.
  run_log: Any = maxbatch.modes.run_log
  run_log.BackgroundReport = lambda *given, **_: BackgroundReport(*given, enabled=False)
  # What they find is kept, and the same in each process.
  load_config(["config=base"])
  check_environment()
  gc.freeze()
  _run(**_serve())
