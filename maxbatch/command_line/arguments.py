"""The command line of every command: `key=value`, and options with two dashes.

A command declares what it takes besides the configuration's keys as a frozen dataclass, whose fields
are annotated with `Key`, `Flag` or `File`; `parse` reads them, and --help shows them.
argparse is not used: `key=value` means nothing to it, so that our own reading of keys would stay,
and its abbreviations, its exits and its wording of errors would each have to be turned off.

Names of keys and options that have another name now: they still work, and are said to be old.
"""

import dataclasses
import os
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from maxbatch.config import declare, schema
from maxbatch.config.declare import FileName
from maxbatch.config.find import (
  closest,
  did_you_mean,
  model_names,
  packaged_names,
  read_argument,
  shown,
)
from maxbatch.config.load import plugins_of, say_old_name
from maxbatch.config.registry import declared_keys
from maxbatch.config.schema import Documented, documented, documented_keys, sections
from maxbatch.config.value import convert, describe, holds_text
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
  before_threads: Callable[[Sequence[str]], None] = lambda arguments: None
  """What must come before its process has any thread."""


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


MOST_USED = (
  *("run_name", "base_output_directory", "steps", "model_name", "dataset_path"),
  *("max_target_length", "batch_size", "micro_batch_size", "gradient_accumulation_steps"),
  *("learning_rate", "num_simulated_devices", "ici_fsdp_parallelism", "validate_only"),
  "compile_only",
)
_ALL = "all"
_WIDTH = 100


def help_text(command: Command, arguments: Sequence[str] = ()) -> str:
  """Returns what --help prints: usage, the command's own arguments, the keys that most runs set, and
  the topics of all others; with a topic after --help its keys, with `all` every key.

  Raises:
    UserError: unknown topic.
  """
  topic = _topic(arguments) if command.takes_keys else ""
  if topic and topic != _ALL:
    return "\n".join(_keys(topic)).strip()
  lines = [*_usage(command)]
  if topic:
    lines += [*_opening(), *_keys(topic), *_of_plugins(arguments)]
  elif command.takes_keys:
    lines += [*_opening(), "", "Keys that most runs set"]
    by_name = {entry.key: entry for entry in documented_keys()}
    lines += [line for key in MOST_USED for line in key_lines(by_name[key])]
    lines += ["", "Other keys, by topic; --help TOPIC shows them, --help all every key", *_topics()]
    lines += _of_plugins(arguments)
  return "\n".join(lines).rstrip()


def _topic(arguments: Sequence[str]) -> str:
  """Returns the word after --help; empty where there is none."""
  asked = next((number for number, one in enumerate(arguments) if one in HELP), len(arguments))
  after = [*arguments[asked + 1 : asked + 2], ""][0]
  if not after or "=" in after or after.startswith("-"):
    return ""
  if after not in (*sections(), _ALL):
    known = f"{', '.join(sections())}, or {_ALL} for every key"
    raise UserError(
      f"--help {after}: unknown topic.{did_you_mean(after, sections())} Topics: {known}"
    )
  return after


def _topics() -> Iterator[str]:
  """Yields a line for each section of the configuration."""
  width = max(map(len, sections())) + 2
  for name, section in sections().items():
    about = f"{section.__doc__ or section.heading} ({len(declare.declared(section))} keys)"
    yield from _wrapped(about, f"  {name.ljust(width)}")


def _keys(topic: str) -> Iterator[str]:
  for name, section in sections().items():
    if topic in (name, _ALL):
      yield from ("", section.heading.capitalize())
      for entry in documented(section, section.heading):
        yield from key_lines(entry)


def _of_plugins(arguments: Sequence[str]) -> Iterator[str]:
  try:
    plugins = plugins_of(arguments)
  except UserError as error:
    yield from ("", f"The keys of plug-ins cannot be shown: {error}")
    return
  for keys, plugin in {plugin.keys: plugin for plugin in reversed(plugins)}.items():
    yield from ("", f"Keys of {plugin.given}")
    for entry in documented(keys, plugin.given):
      yield from key_lines(entry)


def _usage(command: Command) -> Iterator[str]:
  """Returns a line or two of usage, then the command's own arguments and their meanings."""
  own = list(declared(command))
  options = [f"[{_shown(one)}]" for one in own if not isinstance(one.kind, Key)]
  keys = ["[key=value ...]"] if command.takes_keys else []
  line = " ".join([command.usage, *keys, *options])
  yield from _wrapped(line, f"Usage: maxbatch {command.name} ")
  yield ""
  yield from command.about.splitlines()
  width = max((len(_shown(one)) for one in own), default=0) + 4
  for one in own:
    yield from _wrapped(one.kind.meaning, f"  {_shown(one)}".ljust(width))
  if command.about or own:
    yield ""


def _shown(argument: Declared) -> str:
  """Returns an argument as it is given: `num_hosts=8`, `--json`, `--plot FILE`."""
  if isinstance(argument.kind, Key):
    return argument.kind.example
  return argument.name + (" FILE" if isinstance(argument.kind, File) else "")


def _wrapped(text: str, start: str) -> list[str]:
  """Wraps a text; the first line begins with `start`, and the others are indented by its width."""
  indent = " " * len(start)
  return textwrap.wrap(
    text, _WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
  )


def _opening() -> Iterator[str]:
  yield from textwrap.wrap(
    f"FILE is a path, or comes with maxbatch: {', '.join(packaged_names())}. In your own file, "
    "`base_config: base` takes every other key from base.yml. Later wins: base.yml, the file of "
    "model_name, your file, the command line. Values are YAML, exact numbers also fractions (1/3).",
    _WIDTH,
  )
  yield from textwrap.wrap(f"Models for model_name: {', '.join(model_names())}.", _WIDTH)


def key_lines(entry: Documented) -> Iterator[str]:
  """Yields the lines that explain a key: name and default, type, and below them its help."""
  indent = " " * 6
  head = f"  {entry.key}={entry.default}  ({describe(entry.type)})"
  yield from textwrap.wrap(head, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
  yield from textwrap.wrap(entry.help, _WIDTH, initial_indent=indent, subsequent_indent=indent)
