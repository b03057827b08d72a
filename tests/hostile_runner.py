"""Runs a hostile call in this process, and says what is wrong with how it ends."""

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import pathlib
import re
import shlex
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Self

from hostile_calls import NEEDED
from hostile_places import Places

LONG = "a" * 5000
_PLACE = re.compile(r"<([^<>]+)>")
_SECONDS_OF_THE_FAST_ONE = 0.062
_HOLDS = {"folder", "long", "port", "training"}


@dataclasses.dataclass(frozen=True)
class Outcome:
  call: str
  code: int | str
  output: str
  message: str
  seconds: float
  """Of the processor."""
  changed: Sequence[str]
  arguments: Sequence[str]

  @property
  def faults(self) -> list[str]:
    found = []
    if self.code != 2:
      found.append(f"exit code {self.code}")
    lines = [line for line in self.message.splitlines() if not line.startswith("note: ")]
    if not lines or not lines[0].startswith("error: "):
      found.append("no sentence")
    if "Traceback" in self.message:
      found.append("traceback")
    if self.changed:
      found.append(f"changed {', '.join(self.changed[:3])}")
    if self.seconds > 10 * slowness():
      found.append(f"took {self.seconds:.0f} s of the processor")
    if len(self.message) > 3000:
      found.append(f"{len(self.message)} characters")
    if not names_what(self.arguments, self.message):
      found.append("names neither key nor file")
    return found


@functools.cache
def slowness() -> float:
  """How much longer this processor, busy as it is, takes for a loop than the fast one, with which the
  limit was chosen; at least 1."""

  def seconds() -> float:
    began = time.process_time()
    sum(n * n % 7 for n in range(1_000_000))
    return time.process_time() - began

  return max(1, min(seconds() for _ in range(3)) / _SECONDS_OF_THE_FAST_ONE)


def names_what(arguments: Sequence[str], message: str) -> bool:
  """Whether a message names a key, an option, a value or a file of the call."""
  for argument in arguments:
    key, equals, value = argument.partition("=")
    words = [key, *([value] if equals else [])]
    words += [pathlib.PurePath(word).name for word in words]
    if any(word and word[:40] in message for word in words):
      return True
  return not arguments


class Runner:
  def __init__(self, folder: pathlib.Path):
    self.places = Places(folder)
    self.socket = socket.socket()
    self.socket.bind(("localhost", 0))
    self.socket.listen()

  def __enter__(self) -> Self:
    assert self.places["run"].exists()  # A call may name it as others name a run that is not there.
    return self

  def __exit__(self, *_: object) -> None:
    self.socket.close()

  def arguments(self, call: str) -> tuple[str, list[str]]:
    command, *words = shlex.split(call)
    wide: list[str] = []
    for word in words:
      if word in ("+", "++"):
        wide += NEEDED[command].replace("<training>", f"<training{word}>").split()
      else:
        wide.append(word)
    result: list[str] = []
    for word in wide:
      if word.startswith("<training"):
        text = ("dataset_path=", "dataset_cache_directory=") if "++" in word else ()
        result += [one for one in self.places.training if not one.startswith(text)]
      else:
        result.append(_PLACE.sub(self._place, word))
    return command, result

  def _place(self, match: re.Match[str]) -> str:
    name = match[1]
    if name == "folder":
      return str(self.places.folder)
    if name == "long":
      return LONG
    if name == "port":
      return str(self.socket.getsockname()[1])
    return str(self.places[name])

  def __call__(self, call: str) -> Outcome:
    command, arguments = self.arguments(call)
    module = importlib.import_module(
      "maxbatch.__main__" if command == "maxbatch" else f"maxbatch.{command}"
    )
    before = snapshot(self.places.folder)
    output, message = io.StringIO(), io.StringIO()
    began = time.process_time()
    code: int | str
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(message), at_most(90):
      try:
        code = module.main(arguments)
      except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
          raise
        code = f"{type(error).__name__}"
        message.write(traceback.format_exc())
    seconds = time.process_time() - began
    after = snapshot(self.places.folder)
    changed = sorted(
      name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    self.places.forget_damaged()
    own = [argument for argument in arguments if argument not in self.places.training]
    return Outcome(call, code, output.getvalue(), message.getvalue(), seconds, changed, own)


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
  def stop(*_: object) -> None:
    raise TimeoutError(f"{seconds} s")

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Every file and folder, but caches, with size and time of the last change."""
  result: dict[str, tuple[int, int]] = {}
  for parent, folders, files in os.walk(folder):
    folders[:] = [name for name in folders if name != "cache"]
    # A lock names the latest process that looked; a run's log may say that a start was refused.
    for name in [*folders, *(name for name in files if name != "lock")]:
      path = os.path.join(parent, name)
      state = os.lstat(path)
      is_folder = os.path.isdir(path)
      result[os.path.relpath(path, folder)] = (
        (0, 0) if is_folder else (state.st_size, state.st_mtime_ns)
      )
  return result
