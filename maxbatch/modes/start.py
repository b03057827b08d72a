"""The start of a run: its devices, and several processes that must have started alike.

A process with another key, another checkout or another library compiles another program, and all of
them would wait for each other in the first collective that only some of them reach; with other data
they would train on what nobody asked for. So what decides is compared before anything else is done.

Each of several processes has a log; the first alone speaks.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import jax

from maxbatch.batch.from_config import rollout_topology
from maxbatch.compile.step_identity import compiler_environment, library_versions
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.rows import Dataset
from maxbatch.errors import ProcessFailedError, TrainingDivergedError, UserError
from maxbatch.hardware.agreement import (
  check_alike,
  connect,
  connect_processes,
  gather,
  shared_error,
)
from maxbatch.hardware.copies import open_copies
from maxbatch.hardware.devices import Target, find_devices, idle_accelerators, start_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.sharding import make_mesh
from maxbatch.run_folder.paths import RunFolder


@contextlib.contextmanager
def process_log(path: Path, *, speaks: bool) -> Iterator[None]:
  """Copies what this process prints inside this context to the file `path`, and what ended it.

  So is what libraries write past Python: a line of each of a thousand processes hides all others.

  Args:
    speaks: whether the lines are shown too; and what libraries write to standard error.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
  except OSError:
    yield  # The first process says what cannot be written in the run's folder.
    return
  shown = sys.stdout, sys.stderr
  now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
  _append(log, f"--- process {os.getpid()} on {socket.gethostname()}, {now}\n")
  sys.stdout, sys.stderr = (_Logged(log, stream if speaks else None) for stream in shown)
  kept = {number: os.dup(number) for number in ([1] if speaks else [1, 2])}
  for number in kept:
    os.dup2(log, number)
  try:
    yield
  except BaseException as error:
    _append(log, _last_words(error))
    raise
  finally:
    for number, before in kept.items():
      os.dup2(before, number)
      os.close(before)
    sys.stdout, sys.stderr = shown
    os.close(log)


class _Logged(io.TextIOBase):
  """A stream whose lines are in a file too; but not a live line, which is drawn again and again."""

  def __init__(self, log: int, shown: TextIO | None) -> None:
    self._log, self._shown = log, shown

  def write(self, text: str, /) -> int:
    if self._shown is not None:
      self._shown.write(text)
    if "\r" not in text:
      _append(self._log, text)
    return len(text)

  def flush(self) -> None:
    if self._shown is not None:
      self._shown.flush()

  def isatty(self) -> bool:
    return self._shown is not None and self._shown.isatty()

  def fileno(self) -> int:
    return self._shown.fileno() if self._shown is not None else self._log


def _append(log: int, text: str) -> None:
  with contextlib.suppress(OSError):
    os.write(log, text.encode(errors="replace"))


def _last_words(error: BaseException) -> str:
  if isinstance(error, ProcessFailedError):
    return ""  # It has been said.
  if isinstance(error, UserError | TrainingDivergedError):
    return f"error: {error}\n"
  return "".join(traceback.format_exception(error))


_OF_EACH = ("coordinator_address", "process_id")
"""Keys in which processes may differ."""
_LIBRARIES = ("numpy", "grain", "orbax-checkpoint")
_OWN_MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""A key's value that names something of the user's (config/registry.py)."""


@contextlib.contextmanager
def started(config: Config, *, leaves_files: bool = True) -> Iterator[None]:
  """Joins all processes and starts them alike inside this context, where process 0 alone speaks.

  Args:
    leaves_files: whether each process has a log in the run's folder.

  Raises:
    UserError: as `start_devices`, or the processes have different keys, packages or sources.
  """
  with ending_together():
    devices = start_devices(config)
  number = jax.process_index()
  open_copies(jax.local_device_count(), config.distributed.state_copy_period)
  if number == 0 and (idle := idle_accelerators(config, devices)):
    print(f"note: {idle}", file=sys.stderr)
  if config.compile.compile_topology or jax.process_count() == 1:
    yield
    return
  log = RunFolder.of(config.run).process_log(number) if leaves_files else Path(os.devnull)
  with process_log(log, speaks=number == 0):
    with ending_together(alone=True):
      connect_processes(config.distributed.jax_distributed_initialization_timeout)
    check_alike(_keys(config) | _installation() | own_modules(config))
    try:
      yield
    except UserError as error:
      # Process 0 says it, or that it happened here (hardware/ending.py); here it is in the log.
      raise shared_error(str(error)) from None


def connected_devices(config: Config) -> Target:
  """Finds the devices, and connects those of several processes in every group of their meshes: a program
  that is the first to use a group would wait for processes that still compile.

  Raises:
    UserError: as `find_devices`, or they cannot be connected.
  """
  target = find_devices(config)
  if not config.compile.compile_topology:
    meshes = [make_mesh(target.layout, target.devices)]
    rollout = rollout_topology(config.rl)
    meshes += [make_mesh(rollout, target.rollout)] if rollout else []
    with ending_together(alone=True):
      for mesh in meshes:
        connect(mesh, config.distributed.jax_distributed_initialization_timeout)
  return target


def check_same_run(config: Config, plan: BatchPlan, dataset: Dataset) -> None:
  """Checks that all processes have resolved the run alike, and have the same data before them.

  A plan may rest on a file, data are read on every host, and the user's modules have imported others.

  Raises:
    UserError: they have not.
  """
  if jax.process_count() > 1:
    check_alike(
      _keys(config)
      | own_modules(config)
      | {f"plan, {key}": value for key, value in plan.as_dict().items()}
      | _data("training", dataset.fingerprint, dataset.train_files)
      | _data("validation", dataset.validation_fingerprint, dataset.validation_files)
    )


def _keys(config: Config) -> dict[str, object]:
  return {key: value for key, value in to_flat_dict(config).items() if key not in _OF_EACH}


def _installation() -> dict[str, object]:
  """Returns Python, packages, the compiler's environment, and a hash of each of our files."""
  versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
  package = Path(__file__).parents[1]
  files = sorted(package.rglob("*.py"))
  sources = {f"maxbatch/{path.relative_to(package)}": _hash(path) for path in files}
  compiler = compiler_environment(jax.local_devices()[0])
  return {"python": platform.python_version()} | library_versions() | versions | compiler | sources


def own_modules(config: Config) -> dict[str, object]:
  """Hashes each file that a key names as module:attribute.

  And of those beside it that all processes have imported. All processes must call it, in order.
  """
  named = _named_files(config)
  folders, imported = {path.parent for path in named.values()}, dict[str, Path]()
  for name, module in list(sys.modules.items()):
    path = Path(getattr(module, "__file__", None) or "")
    if path.parent in folders and path.suffix:
      imported[name] = path
  # What is imported when it is first used, one process may have needed and another not yet.
  everywhere = set.intersection(*map(set, gather(sorted(imported))))
  files = named | {name: path for name, path in imported.items() if name in everywhere}
  there = {name: path for name, path in sorted(files.items()) if path.is_file()}
  return {f"{name.replace('.', '/')}{path.suffix}": _hash(path) for name, path in there.items()}


def _named_files(config: Config) -> dict[str, Path]:
  """Returns the modules that keys name, and their files."""
  names = re.findall(_OWN_MODULE, "\n".join(map(str, to_flat_dict(config).values())))
  files: dict[str, Path] = {}
  for name in names:
    # Where it cannot be found the registry says so later, better.
    with contextlib.suppress(ImportError, ValueError):
      spec = importlib.util.find_spec(name)
      if spec is not None and spec.origin is not None:
        files[name] = Path(spec.origin)
  return files


def _hash(path: Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _data(part: str, fingerprint: str, files: Mapping[str, int]) -> dict[str, object]:
  sizes: dict[str, object] = {f"{part} data, bytes of {name}": size for name, size in files.items()}
  return sizes | {f"{part} data, fingerprint": fingerprint}
