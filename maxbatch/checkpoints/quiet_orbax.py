"""Keeps Orbax's own words off the terminal: what a person needs of them is reported in one line.

When one of Orbax's reads or writes fails, it closes its event loop at once. The others under way
then complain, each with a traceback, to whoever listens; nobody can do anything about those.
"""

import functools
import logging
import pathlib
import sys


@functools.cache
def silence_orbax() -> None:
  """Drops log lines of Orbax and the complaints of its abandoned reads and writes, from now on."""
  logging.getLogger("absl").addFilter(lambda record: not _of_orbax(record.pathname))
  logging.getLogger("asyncio").addFilter(lambda record: not _is_about_leftovers(record))
  told_before = sys.unraisablehook

  def hook(unraisable: "sys.UnraisableHookArgs") -> None:
    if not _is_leftover(unraisable):
      told_before(unraisable)

  sys.unraisablehook = hook


def _of_orbax(path: str) -> bool:
  return "orbax" in pathlib.PurePath(path).parts


def _is_about_leftovers(record: logging.LogRecord) -> bool:
  """Tasks that failed or were dropped after the first failure: `never retrieved`, `destroyed`."""
  message = record.getMessage()
  return "orbax" in message or "tensorstore" in message or "OCDBT" in message


def _is_leftover(unraisable: "sys.UnraisableHookArgs") -> bool:
  """A TensorStore callback for a closed loop, or a coroutine of Orbax that nobody awaits."""
  if unraisable.object is None:
    return str(unraisable.exc_value) == "Event loop is closed"
  code = getattr(unraisable.object, "cr_code", None)
  return code is not None and _of_orbax(code.co_filename)
