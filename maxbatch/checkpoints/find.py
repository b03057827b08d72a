"""The checkpoints of a folder and what they say without reading their arrays; the one that a key names.

Orbax as a run needs it: quiet, with no process that waits for one that failed, and faults in a line.
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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from maxbatch.checkpoints.record import is_intact, is_parameters_only
from maxbatch.config.find import shown, user_path
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import gather
from maxbatch.run_folder.paths import RunFolder


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
  """Returns whether a log record is of a task that failed or was dropped after the first failure.

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
  """Returns which file of a folder the file system does not hand out, and why; else None."""
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


def completed_steps(directory: pathlib.Path) -> list[int]:
  """Lists the steps whose saves were completed, oldest first; not yet verified."""
  if not directory.is_dir():
    return []
  names = (path.name for path in directory.iterdir() if path.is_dir())
  return sorted(int(name) for name in names if name.isdecimal())


def parameters_to_begin_with(directory: pathlib.Path) -> pathlib.Path | None:
  """Returns the folder of step 0, if a conversion left parameters alone there, for good."""
  folder = directory / "0"
  record = record_of(folder) if folder.is_dir() else None
  return folder if record is not None and is_parameters_only(record) else None


def resumable_steps(directory: pathlib.Path) -> list[int]:
  """Lists the completed steps that a run saved while it trained."""
  steps = completed_steps(directory)
  return steps[1:] if parameters_to_begin_with(directory) else steps


def newest_record(directory: pathlib.Path) -> dict[str, Any] | None:
  """Returns the record of the newest resumable step that has an intact one; None if there is none.

  A restore may still fall back to an older step, if the arrays of this one are damaged.
  """
  records = (record_of(directory / str(step)) for step in reversed(resumable_steps(directory)))
  return next((record for record in records if record is not None), None)


def record_of(folder: pathlib.Path) -> dict[str, Any] | None:
  """Reads a step's record; None if it cannot be read, or is not what was written."""
  silence_orbax()
  try:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler(), multiprocessing_options=alone()) as reader:
      record = reader.restore(folder / "record")
  except (OSError, ValueError, RecursionError):
    return None
  return record if is_intact(record) and record["step"] == int(folder.name) else None


_SHOWN = 5
_LONGEST_PATH = 1000
_NO_PROCESSES = ("coordinator_address=", "num_processes=-1", "process_id=-1")
"""Where a run's processes found each other nobody waits now."""


def find_checkpoint(given: str, key: str = "checkpoint", others: str = "") -> pathlib.Path:
  """Finds the folder of the checkpoint that `key=given` names: a step, or a run's newest step.

  Args:
    others: what else the key may name, for messages: `; or …`.

  Raises UserError: the folder does not exist or has no checkpoint.
  """
  path = user_path(given).absolute()
  if path.name.isdecimal() and path.parent == RunFolder(path.parent.parent).checkpoints:
    return _step_folder(given, key, path)
  steps = RunFolder(path).checkpoints
  if path == RunFolder(path.parent).checkpoints:
    steps = path
  result = completed_steps(steps)
  if result:
    return steps / str(result[-1])
  if not given or not path.exists():
    what = "there is no such folder" if given else "it has no value"
  else:
    is_run = steps.exists()
    what = "no run has completed a checkpoint there" if is_run else "that is not a run's folder"
  raise UserError(
    f"{key}={shown(given, _LONGEST_PATH)}: {what}; name a run's folder, for its newest checkpoint, "
    f"or one of its steps{others}; for example {key}=runs/first_run or "
    f"{key}=runs/first_run/checkpoints/200"
  )


def config_of(step_folder: pathlib.Path, arguments: Sequence[str]) -> Config:
  """Loads the configuration of the run that wrote a checkpoint, in the folder where that is now.

  Args:
    arguments: keys on top of it, or config= and another file in its place.

  Raises UserError: there is none, or a key is wrong.
  """
  if any(argument.startswith("config=") for argument in arguments):
    return load_config(arguments)
  folder = step_folder.parent.parent
  written = RunFolder(folder).config
  if not written.exists():
    raise UserError(
      f"checkpoint={step_folder}: there is no {written} to tell how the run "
      "was configured; give its configuration, for example config=my.yml"
    )
  place = [f"base_output_directory={folder.parent}", f"run_name={folder.name}"]
  return load_config([f"config={written}", *place, *_NO_PROCESSES, *arguments])


def _step_folder(given: str, key: str, path: pathlib.Path) -> pathlib.Path:
  if path.is_dir():
    return path
  there = completed_steps(path.parent)
  newest = ", ".join(map(str, there[-_SHOWN:]))
  others = f"there are {newest}" if there else "there is none in that folder"
  raise UserError(
    f"{key}={shown(given, _LONGEST_PATH)}: there is no checkpoint of that step; {others}"
  )


def other_step(folder: pathlib.Path, key: str) -> str:
  """Suggests what to take instead of a step's folder that is damaged."""
  others = [step for step in completed_steps(folder.parent) if step != int(folder.name)]
  return f"{key}={folder.parent / str(others[-1])}" if others else "one of another run"
