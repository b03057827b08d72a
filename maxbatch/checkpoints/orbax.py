"""Orbax as a run needs it: quiet, with no process that waits for one that failed, and faults in a line.

When one of Orbax's reads or writes fails, it closes its event loop at once. The others under way
then log a traceback each, which nobody can do anything about. And Orbax's processes wait for each
other at every turn, also for one that has just failed.
"""

import functools
import logging
import os
import pathlib
import shutil
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

import jax
import orbax.checkpoint as ocp

from maxbatch.hardware.agreement import gather


@functools.cache
def silence_orbax() -> None:
  """Drops Orbax's log lines and the tracebacks of its abandoned reads and writes, from now on."""
  logging.getLogger("absl").addFilter(lambda record: not _of_orbax(record.pathname))
  logging.getLogger("asyncio").addFilter(lambda record: not _is_about_leftovers(record))
  previous_hook = sys.unraisablehook

  def hook(unraisable: "sys.UnraisableHookArgs") -> None:
    if not _is_leftover(unraisable):
      previous_hook(unraisable)

  sys.unraisablehook = hook


def _of_orbax(path: str) -> bool:
  return "orbax" in pathlib.PurePath(path).parts


def _is_about_leftovers(record: logging.LogRecord) -> bool:
  """Returns whether a log record is of a task that failed or was dropped after the first failure:
  `never retrieved`, `destroyed`.

  A write that met a full disk names the error alone; nothing but Orbax uses asyncio here.
  """
  if record.exc_info and isinstance(record.exc_info[1], OSError):
    return True
  message = record.getMessage()
  return "orbax" in message or "tensorstore" in message or "OCDBT" in message


def _is_leftover(unraisable: "sys.UnraisableHookArgs") -> bool:
  """Returns whether it is a TensorStore callback for a closed loop, or a coroutine of Orbax that
  nobody awaits."""
  if unraisable.object is None:
    return str(unraisable.exc_value) == "Event loop is closed"
  code = getattr(unraisable.object, "cr_code", None)
  return code is not None and _of_orbax(code.co_filename)


_Read = TypeVar("_Read")


class DamagedError(Exception):
  """A step's folder does not hold what was saved; the message says what is wrong."""


class Barrier:
  """Orbax's barrier in its own threads; with one process there is none to wait for."""

  def __init__(self) -> None:
    self.failure: BaseException | None = None
    """What has failed in a save of this process."""

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits for the other processes; raises again what this one has on its hands."""
    if failure := sys.exc_info()[1]:
      self.failure = failure
      raise failure
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def alone() -> ocp.options.MultiprocessingOptions:
  """Returns the options for what this process does by itself, however many there are."""
  if jax.process_count() == 1:
    return ocp.options.MultiprocessingOptions()
  own = jax.process_index()
  return ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})


def lone_reader(directory: pathlib.Path) -> ocp.CheckpointManager:
  """Reads the parts of this process's devices, with no other process."""
  options = ocp.CheckpointManagerOptions(
    read_only=True, lightweight_initialize=True, multiprocessing_options=alone()
  )
  return ocp.CheckpointManager(directory, options=options)


def together(read: Callable[[], _Read]) -> _Read:
  """Returns what `read` returns, in which nothing waits for other processes. Raises DamagedError:
  in all processes, if one has met damage."""
  results, damage = [], ""
  try:
    results.append(read())
  except DamagedError as error:
    damage = str(error)
  result = gather([socket.gethostname(), damage])
  for process, (host, reason) in enumerate(result):
    if reason:
      raise DamagedError(f"process {process} on {host}: {reason}" if len(result) > 1 else reason)
  return results[0]


def refusal(folder: pathlib.Path) -> str | None:
  """Returns which file of a folder the file system does not hand out, and why; None if it does
  all."""
  path = folder
  try:
    for parent, _, names in os.walk(folder, onerror=_raise):
      for path in (pathlib.Path(parent, name) for name in names):
        with path.open("rb") as file:
          while file.read(1 << 24):
            pass
  except OSError as error:
    return f"{error.filename or path} ({error.strerror})"
  return None


def _raise(error: OSError) -> None:
  raise error


def root_cause(error: BaseException) -> BaseException:
  while error.__cause__ is not None:
    error = error.__cause__
  return error


def cause(error: BaseException) -> str:
  """Says what went wrong, in one line: the start says where, the end why."""
  text = repr(error) if isinstance(error, LookupError) or not str(error) else str(error)
  line = text.splitlines()[0].split(" [tensorstore_spec")[0]
  return line if len(line) <= 220 else f"{line[:70]} ... {line[-140:]}"


def free_bytes(directory: pathlib.Path) -> str:
  """Says how much space is free where a folder is or would be."""
  there = next(path for path in (directory, *directory.parents) if path.exists())
  return f"{shutil.disk_usage(there).free:,}"
