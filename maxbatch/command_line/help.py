"""What --help prints: every key with its type, its default and its help, as in base.yml."""

import textwrap
from collections.abc import Iterator, Sequence

from maxbatch.command_line.arguments import Command, Declared, File, Key, declared
from maxbatch.config.base_file import Documented, documented, documented_keys
from maxbatch.config.find import model_names, packaged_names
from maxbatch.config.load import plugins_of
from maxbatch.config.value import describe
from maxbatch.errors import UserError

_WIDTH = 100


def help_text(command: Command, arguments: Sequence[str] = ()) -> str:
  """Returns what --help prints: usage, the command's own arguments, and every configuration key, with
  those of the plug-ins that its arguments name."""
  lines = [*_usage(command)]
  if not command.takes_keys:
    return "\n".join(lines).rstrip()
  lines += _opening()
  heading = ""
  for entry in documented_keys():
    if entry.heading != heading:
      heading = entry.heading
      lines += ["", heading.capitalize()]
    lines += key_lines(entry)
  return "\n".join([*lines, *_of_plugins(arguments)])


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
  yield from _wrapped(line, f"Usage: python -m maxbatch.{command.name} ")
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
    "model_name, your file, the command line. Values are YAML, exact numbers also fractions (1/3). "
    "Below, each key with its default.",
    _WIDTH,
  )
  yield from textwrap.wrap(f"Models for model_name: {', '.join(model_names())}.", _WIDTH)


def key_lines(entry: Documented) -> Iterator[str]:
  """Yields the lines that explain a key: name and default, type, and below them its help."""
  indent = " " * 6
  head = f"  {entry.key}={entry.default}  ({describe(entry.type)})"
  yield from textwrap.wrap(head, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
  yield from textwrap.wrap(entry.help, _WIDTH, initial_indent=indent, subsequent_indent=indent)
