"""What --help prints: the command's arguments, and the configuration's keys by topic."""

import textwrap
from collections.abc import Iterator, Sequence

from maxbatch.command_line.arguments import HELP, Command, Declared, File, Key, declared
from maxbatch.config.declare import declared as declared_keys
from maxbatch.config.find import did_you_mean, model_names, packaged_names
from maxbatch.config.load import plugins_of
from maxbatch.config.schema import Documented, documented, documented_keys, sections
from maxbatch.config.value import describe
from maxbatch.errors import UserError

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
    about = f"{section.__doc__ or section.heading} ({len(declared_keys(section))} keys)"
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
