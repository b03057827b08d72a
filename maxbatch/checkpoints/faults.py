"""What keeps a checkpoint's folder from being read or written, in a line."""

import os
import pathlib
import shutil


def refusal(folder: pathlib.Path) -> str | None:
  """Which file of a folder the file system does not hand out, and why; None if it does all."""
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
  """What an error was raised from, at the bottom."""
  while error.__cause__ is not None:
    error = error.__cause__
  return error


def cause(error: BaseException) -> str:
  """What went wrong, in one line: the start says where, the end why."""
  text = repr(error) if isinstance(error, LookupError) or not str(error) else str(error)
  line = text.splitlines()[0].split(" [tensorstore_spec")[0]
  return line if len(line) <= 220 else f"{line[:70]} ... {line[-140:]}"


def free_bytes(directory: pathlib.Path) -> str:
  """What is free where a folder is or would be."""
  there = next(path for path in (directory, *directory.parents) if path.exists())
  return f"{shutil.disk_usage(there).free:,}"
