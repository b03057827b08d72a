"""The command line of every command: `key=value`, and options with two dashes.

A command declares what it takes besides the configuration's keys as a frozen dataclass, whose fields
are annotated with `Key`, `Flag` or `File`; `parse` reads them, and --help (help.py) shows them.
argparse is not used: `key=value` means nothing to it, so that our own reading of keys would stay,
and its abbreviations, its exits and its wording of errors would each have to be turned off.

Names of keys and options that have another name now: they still work, and are said to be old.
"""

import dataclasses
import os
import typing
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from maxbatch.config import schema
from maxbatch.config.declare import FileName
from maxbatch.config.find import closest, read_argument, shown
from maxbatch.config.load import plugins_of, say_old_name
from maxbatch.config.registry import declared_keys
from maxbatch.config.value import convert, holds_text
from maxbatch.errors import UserError

Own = TypeVar("Own")
HELP = ("--help", "-help", "-h", "help")


@dataclasses.dataclass(frozen=True)
class Key:
  """An argument `name=value`, read as a key of the configuration of its type is."""

  meaning: str
  example: str
  """For --help, a name with a value."""


@dataclasses.dataclass(frozen=True)
class Flag:
  """A bool that `--name` sets."""

  meaning: str
  old_name: str = ""
  """What it was called, which still sets it."""


@dataclasses.dataclass(frozen=True)
class File:
  """The name of a file, `--name FILE` or `--name=FILE`; empty where it is not given."""

  meaning: str
  example: str
  """For messages, a name."""
  before: str = ""
  """What it was called."""


@dataclasses.dataclass(frozen=True)
class Command(Generic[Own]):
  """What a command is called, does and takes."""

  name: str
  """`maxbatch NAME` runs it."""
  about: str
  """For --help, between the usage and the command's own arguments; may be empty."""
  own: type[Own]
  """Its own arguments: a dataclass with defaults, every field annotated."""
  usage: str = "config=FILE"
  """What must be given."""
  takes_keys: bool = True
  """Whether what is not its own is the configuration's."""
  leaves_files: bool = False
  """Whether its work is in files: then it has succeeded even if nobody has read what it printed."""


@dataclasses.dataclass(frozen=True)
class Arguments(Generic[Own]):
  """A command line, parsed."""

  own: Own
  configuration: tuple[str, ...]
  """The other arguments, as `load_config` takes them."""


def wants_help(arguments: Sequence[str]) -> bool:
  """Returns whether the command should print its help instead of running."""
  return any(argument in HELP for argument in arguments)


def parse(command: Command[Own], arguments: Sequence[str]) -> Arguments[Own]:
  """Separates the command's own arguments from the configuration's; of two of a name the later wins.

  Raises:
    UserError: an option lacks its file, a key has a wrong value, or a name is misspelt.
  """
  own = {one.name: one for one in declared(command)}
  files = [(one, one.kind) for one in own.values() if isinstance(one.kind, File)]
  renamed = {kind.before: one.name for one, kind in files if kind.before}
  flags = [(one, one.kind) for one in own.values() if isinstance(one.kind, Flag)]
  old = {kind.old_name: one.name for one, kind in flags if kind.old_name}
  given: dict[str, object] = {}
  rest: list[str] = []
  remaining = iter(arguments)
  for argument in remaining:
    name, equals, text = argument.partition("=")
    if name in old:
      say_old_name(name, old[name])
    one = own.get(old.get(name, name))
    if name in renamed:
      raise UserError(f"{name} is called {renamed[name]} now; --help says what it does")
    if one is None:
      _check_name(name, list(own), arguments)
      rest.append(argument)
    elif isinstance(one.kind, Key) and not equals:
      rest.append(argument)  # load_config says how a key is written.
    elif isinstance(one.kind, Key):
      given[one.attribute] = convert(read_argument(name, text, holds_text(one.type)), one.type)
    elif isinstance(one.kind, File):
      path = text if equals else next(remaining, "")
      _check_file(name, path, one.kind.example, is_apart=not equals)
      given[one.attribute] = os.path.expanduser(path)
    elif equals:
      raise UserError(f"{argument}: {name} takes no value; write {name}")
    else:
      given[one.attribute] = True
  return Arguments(command.own(**given), tuple(rest))


@dataclasses.dataclass(frozen=True)
class Declared:
  """One argument of a command."""

  name: str
  """As it is written: `num_hosts` or `--json`."""
  attribute: str
  type: object
  kind: Key | Flag | File


def declared(command: Command) -> Iterator[Declared]:
  """Returns the command's own arguments, as its dataclass declares them."""
  for field in dataclasses.fields(command.own):
    notes = typing.get_args(field.type)
    kind = next(one for one in notes if isinstance(one, Key | Flag | File))
    name = field.name if isinstance(kind, Key) else f"--{field.name}"
    yield Declared(name, field.name, field.type, kind)


def _check_name(name: str, own: Sequence[str], arguments: Sequence[str]) -> None:
  """Refuses what is most likely one of the command's own names, written wrongly."""
  is_option = name.startswith("-")
  if name in schema.fields():
    return
  known = [one for one in own if one.startswith("-") == is_option]
  near = closest(name, known if is_option else [*known, "config", *schema.fields()])
  if near in known and name not in declared_keys(plugins_of(arguments)):
    what, lists = ("option", "--help") if is_option else ("key", "--help all")
    raise UserError(
      f"command line: there is no {what} {name!r}. Did you mean {near}? {lists} lists every {what}."
    )


def _check_file(name: str, path: str, example: str, *, is_apart: bool) -> None:
  """Refuses the name of a file that is none; `is_apart`: it is an argument of its own."""
  if not path or (is_apart and ("=" in path or path.startswith("--"))):
    raise UserError(f"{name} {path}: name a file; for example {name} {example}")
  if not FileName().holds(path):
    raise UserError(
      f"{name} {shown(path)}: this must be {FileName().words}; for example {name} {example}"
    )
