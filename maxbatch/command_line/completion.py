"""Completes commands, keys and their values in a shell, by argcomplete (`pip install 'maxbatch[completion]'`).

    eval "$(register-python-argcomplete maxbatch)"

The shell calls maxbatch with _ARGCOMPLETE set, which becomes this module; nothing else imports it.
"""

import argparse
import sys
import typing
from collections.abc import Sequence

from maxbatch.config.find import model_names, packaged_names
from maxbatch.config.schema import documented_keys


def complete(commands: Sequence[str]) -> None:
  """Prints for the shell what the line in COMP_LINE may go on with, and ends the process."""
  import argcomplete  # An extra, which the package does without.

  parser = argparse.ArgumentParser(add_help=False)
  parser.add_argument("command", choices=commands)
  words = parser.add_argument("words", nargs="*")
  vars(words)["completer"] = lambda prefix, **_: going_on(prefix)
  argcomplete.autocomplete(parser, always_complete_options=False, append_space=False)


def going_on(prefix: str) -> list[str]:
  """Returns the keys that begin with `prefix`, each with its `=`; behind one the values that it has."""
  types = {one.key: one.type for one in documented_keys()}
  key, equals, _ = prefix.partition("=")
  keys = (f"{name}=" for name in ("config", *types))
  known = [f"{key}={value}" for value in _values(key, types.get(key))] if equals else keys
  return [one for one in known if one.startswith(prefix)]


def _values(key: str, type_: object) -> Sequence[str]:
  if key in ("config", "model_name"):
    return packaged_names() if key == "config" else model_names()
  if type_ is bool:
    return ("true", "false")
  if typing.get_origin(type_) is typing.Annotated:
    return _values(key, typing.get_args(type_)[0])
  return [str(one) for one in typing.get_args(type_) if isinstance(one, str)]


if __name__ == "__main__":
  complete(sys.argv[1:])
