"""What --help prints: every key of base.yml with its type, its default and the comment above it."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from maxbatch.config import schema
from maxbatch.config.find import config_path, model_names, packaged_names
from maxbatch.config.value import describe

_WIDTH = 100
_HEADING = re.compile(r"# --- (.+?) -+")
_KEY = re.compile(r"(\w+): *(.*)")


@dataclasses.dataclass(frozen=True)
class Documented:
  """One key as base.yml explains it."""

  heading: str
  key: str
  default: str
  comments: tuple[str, ...]


def wants_help(arguments: Sequence[str]) -> bool:
  """Whether the command should print its help instead of running."""
  return any(argument in ("--help", "-help", "-h", "help") for argument in arguments)


def help_text(command: str, options: Mapping[str, str] = MappingProxyType({})) -> str:
  """The help of `command` (such as `python -m maxbatch.train`), at most 100 columns wide.

  `options`: what it takes besides keys, with what each does.
  """
  lines = [*_opening(command), *(f"  {option}  {what}" for option, what in options.items())]
  heading = ""
  for entry in documented_keys():
    if entry.heading != heading:
      heading = entry.heading
      lines += ["", heading.capitalize()]
    lines += _key_lines(entry)
  return "\n".join(lines)


def documented_keys() -> list[Documented]:
  """The keys of base.yml in its order, each with its heading and the comments right above it."""
  found: list[Documented] = []
  heading, comments = "", ()
  for line in config_path("base").read_text(encoding="utf-8").splitlines():
    if title := _HEADING.fullmatch(line):
      heading, comments = title[1], ()
    elif line.startswith("# "):
      comments = (*comments, line[2:])
    elif pair := _KEY.fullmatch(line):
      found.append(Documented(heading, pair[1], pair[2], comments))
      comments = ()
    else:
      comments = ()
  return found


def _opening(command: str) -> Iterator[str]:
  yield f"Usage: {command} config=FILE [key=value ...]"
  yield ""
  yield from textwrap.wrap(
    f"FILE is a path, or comes with maxbatch: {', '.join(packaged_names())}. In your own file, "
    "`base_config: base` takes every other key from base.yml. Later wins: base.yml, the file of "
    "model_name, your file, the command line. Values are YAML, exact numbers also fractions (1/3). "
    "Below, each key with its default.",
    _WIDTH,
  )
  yield from textwrap.wrap(f"Models for model_name: {', '.join(model_names())}.", _WIDTH)


def _key_lines(entry: Documented) -> Iterator[str]:
  annotation = schema.fields()[entry.key][1].type
  yield f"  {entry.key}={entry.default}  ({describe(annotation)})"
  indent = " " * 6
  yield from textwrap.wrap(
    " ".join(entry.comments), _WIDTH, initial_indent=indent, subsequent_indent=indent
  )
