"""Keeps Orbax's own log off the terminal: what a user needs of it is reported in one line.

When one of Orbax's reads or writes fails, it closes its event loop at once. The others under way
then log a traceback each, which nobody can do anything about.
"""

import functools
import logging
import pathlib
import sys


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
  """Tasks that failed or were dropped after the first failure: `never retrieved`, `destroyed`.

  A write that met a full disk names the error alone; nothing but Orbax uses asyncio here.
  """
  if record.exc_info and isinstance(record.exc_info[1], OSError):
    return True
  message = record.getMessage()
  return "orbax" in message or "tensorstore" in message or "OCDBT" in message


def _is_leftover(unraisable: "sys.UnraisableHookArgs") -> bool:
  """A TensorStore callback for a closed loop, or a coroutine of Orbax that nobody awaits."""
  if unraisable.object is None:
    return str(unraisable.exc_value) == "Event loop is closed"
  code = getattr(unraisable.object, "cr_code", None)
  return code is not None and _of_orbax(code.co_filename)
