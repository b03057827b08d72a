"""The files that options such as --csv name, written without replacing a file of another kind."""

import errno
import os
import pathlib

from maxbatch.config.find import user_path
from maxbatch.errors import UserError

_HEAD_BYTES = 16
"""A format is known by its first bytes."""
_MADE_BY = (b"maxbatch report", b"maxbatch picture")
"""A page of ours says so near its beginning, and many others begin with the same bytes."""
_NEAR_BYTES = 4096


def check_output(option: str, file: str, content: bytes) -> None:
  """Refuses what `write_output` could not write, before the work that it would hold.

  Args:
    content: what is to be written, or another of the kind.

  Raises:
    UserError: with a name that works.
  """
  path = user_path(file)
  reason = 0
  if path.is_dir():
    reason = errno.EISDIR
  elif not path.parent.is_dir():
    reason = errno.ENOENT
  elif not os.access(path if path.exists() else path.parent, os.W_OK):
    reason = errno.EACCES
  if reason:
    raise UserError(
      f"{option} {file}: cannot be written: {os.strerror(reason)}; for example {option} "
      f"new-{path.name}"
    )
  _check_alike(option, file, content)


def write_output(option: str, file: str, content: bytes) -> None:
  """Writes what `option file` asks for.

  A file that is there is replaced if it begins as this content does: an earlier one of this command.

  Raises:
    UserError: something else is there, or it cannot be written.
  """
  _check_alike(option, file, content)
  try:
    user_path(file).write_bytes(content)
  except OSError as error:
    raise UserError(f"{option} {file}: cannot be written: {error.strerror or error}") from error


def _check_alike(option: str, file: str, content: bytes) -> None:
  path = user_path(file)
  try:
    if file.startswith("/dev/") or not path.exists() or _is_alike(path, content):
      return
  except OSError as error:
    raise UserError(f"{option} {file}: cannot be written: {error.strerror or error}") from error
  raise UserError(
    f"{option} {file}: the existing file was not written by this command and would be overwritten; "
    f"name another file, for example {option} {path.with_name(f'new-{path.name}')}"
  )


def _is_alike(path: pathlib.Path, content: bytes) -> bool:
  if not path.is_file():
    return path.is_dir()  # Which writing says itself; a pipe would be waited for.
  with path.open("rb") as file:
    there = file.read(_NEAR_BYTES)
  near = content[:_NEAR_BYTES]
  return not there or (
    there[:_HEAD_BYTES] == near[:_HEAD_BYTES]
    and all((name in there) == (name in near) for name in _MADE_BY)
  )
