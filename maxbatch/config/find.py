"""Where configuration files are: by path, or by bare name among those that travel with maxbatch.

A configuration file as entries: flat keys, each with its YAML node and its place.

Values stay YAML nodes here: only their key's type says how the text is to be read (0.29 is 29/100
for an exact key, and 3e-4 is a number although YAML 1.1 reads it as text).
"""

import dataclasses
import difflib
import functools
import os
from collections.abc import Iterable
from pathlib import Path

import yaml
from yaml.reader import ReaderError

from maxbatch.errors import UserError

_LONGEST = 100
"""Characters of a value that a message shows."""
# What a syntax error means, for people who do not know YAML's grammar.
_MEANINGS = {
  "unknown escape character": "a \\ in double quotes begins an escape; use single quotes instead.",
  "quoted scalar": "a quote is opened and never closed.",
  "flow sequence": "a list is opened with [ and not closed; write [1, 2, 3].",
  "flow mapping": "a mapping is opened with { and not closed; write {name: 1}.",
  "mapping values are not allowed": "a second `: ` in one line; put the value in quotes.",
  "could not find expected ':'": "expected `key: value`, with a space after the colon.",
  r"character '\t'": "a tab where YAML needs spaces.",
  "<block end>": "text follows the end of a value; put the whole value in one pair of quotes.",
  "single document": "a second `---` document; a configuration is one document.",
  "special characters": "a control character; remove it.",
  "alias": "a value that starts with * must be in quotes.",
  "anchor": "a value that starts with & must be in quotes.",
  "cannot start any token": "a value that starts with @, `, % or a comma must be in quotes.",
  "nested too deeply": "brackets are nested too deeply.",
}
# What PyYAML says of an indented line depends on the line above it; the remedy is the same.
_INDENTATION = ("mapping values are not allowed", "<block end>")


def shown(text: str, longest: int = _LONGEST) -> str:
  """Returns a text as a message can hold it: shortened, and without control characters."""
  text = text if len(text) <= longest else f"{text[: longest - 3]}..."
  return text if text.isprintable() else ascii(text)


def user_path(name: str) -> Path:
  """Returns the path that a user's text names; ~ is the home folder, and ~NAME of nobody stays."""
  return Path(os.path.expanduser(name))


@dataclasses.dataclass(frozen=True)
class Entry:
  """One `key: value` of a file or `key=value` of the command line."""

  key: str
  node: yaml.Node
  where: str
  """`my.yml:3` or `command line`."""
  folder: Path
  """Paths in the value are relative to it."""

  @property
  def text(self) -> str:
    """Returns the value as it was written; lists and mappings shortened to fit in a message."""
    if isinstance(self.node, yaml.ScalarNode):
      quote = self.node.style if self.node.style in ("'", '"') else ""
      return f"{quote}{shown(self.node.value)}{quote}"
    return "[...]" if isinstance(self.node, yaml.SequenceNode) else "{...}"

  @property
  def given(self) -> str:
    """Returns place, key and value, as a message begins: `my.yml:3: steps: 0`."""
    return f"{self.where}: {self.assigned(self.text)}"

  def assigned(self, value: object) -> str:
    """Returns `key: value` or `key=value`, as one writes it in that place."""
    return f"{self.key}{'=' if self.where == COMMAND_LINE else ': '}{value}"


COMMAND_LINE = "command line"
TEXT_TAG = "tag:yaml.org,2002:str"


def read_file(path: Path) -> dict[str, Entry]:
  """Returns the entries of the YAML file at `path`, by key.

  Raises:
    UserError: the file cannot be read, is empty, is not a flat mapping or gives a key twice.
  """
  root = _root_node(path, _read_text(path))
  if root is None:
    raise UserError(f"{path}: the file is empty. Start it with `base_config: base`.")
  if not isinstance(root, yaml.MappingNode):
    raise UserError(
      f"{path}:{_line(root)}: expected lines of `key: value`, with a space after the colon, "
      "such as `steps: 400`."
    )
  entries: dict[str, Entry] = {}
  for key_node, value_node in root.value:
    entry = _entry(path, key_node, value_node)
    if entry.key in entries:
      first = entries[entry.key].where.rpartition(":")[2]
      raise UserError(
        f"{entry.where}: {entry.key} is given twice, in lines {first} and {_line(key_node)}; "
        "keep one of them."
      )
    entries[entry.key] = entry
  return entries


def read_argument(key: str, text: str, holds_text: bool) -> Entry:
  """Returns the entry of a `key=text` argument; `text` is YAML.

  Keys that hold text take it as it stands (spaces, colons and # included) unless all of it is in
  quotes: YAML would drop `# note` and the last space of `prompt=def `.

  Raises:
    UserError: the text is empty where a value is needed, or not YAML.
  """
  node = _quoted_or_literal(text) if holds_text else _argument_node(key, text)
  return Entry(key, node, COMMAND_LINE, Path())


def _argument_node(key: str, text: str) -> yaml.Node:
  try:
    node = _compose(text)
  except yaml.YAMLError as error:
    raise UserError(f"{COMMAND_LINE}: {key}={shown(text)}: {plain_words(error)}") from error
  if node is None:
    raise UserError(f"{COMMAND_LINE}: {key}={text} has no value; write one after the equals sign.")
  return node


def _quoted_or_literal(text: str) -> yaml.Node:
  if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
    try:
      return yaml.compose(text, yaml.SafeLoader) or yaml.ScalarNode(TEXT_TAG, text)
    except yaml.YAMLError:
      pass  # Quotes at both ends of what is not one quoted text, such as "a" or "b": as it stands.
  return yaml.ScalarNode(TEXT_TAG, text)


def _read_text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError as error:
    raise UserError(f"{path}: not a text file in UTF-8 (byte {error.start}).") from error
  except OSError as error:
    raise UserError(f"{path}: cannot be read: {error.strerror}.") from error


@functools.lru_cache(256)
def _compose(text: str) -> yaml.Node | None:
  """Returns what a text says; nobody changes it, and base.yml, the longest, is often read."""
  try:
    return yaml.compose(text, yaml.SafeLoader)
  except RecursionError as error:
    raise yaml.YAMLError("brackets are nested too deeply") from error


def _root_node(path: Path, text: str) -> yaml.Node | None:
  try:
    return _compose(text)
  except yaml.MarkedYAMLError as error:
    line = _error_line(error)
    shown = "".join(text.splitlines()[line - 1 : line])
    raise UserError(f"{path}:{line}: {plain_words(error, shown)}\n  {shown}") from error
  except ReaderError as error:
    line = text.count("\n", 0, error.position) + 1
    raise UserError(f"{path}:{line}: {plain_words(error)}") from error
  except yaml.YAMLError as error:
    raise UserError(f"{path}: {plain_words(error)}") from error


def _entry(path: Path, key_node: yaml.Node, value_node: yaml.Node) -> Entry:
  where = f"{path}:{_line(key_node)}"
  if not isinstance(key_node, yaml.ScalarNode):
    raise UserError(f"{where}: a key must be a name, such as `steps: 400`.")
  return Entry(key_node.value, value_node, where, path.parent)


def _line(node: yaml.Node) -> int:
  return node.start_mark.line + 1


def _error_line(error: yaml.MarkedYAMLError) -> int:
  # The parser notices an open quote or bracket, or a missing colon, only further down.
  context = error.context or ""
  began = any(part in context for part in ("quoted scalar", "flow", "simple key"))
  mark = (error.context_mark if began else None) or error.problem_mark
  return 1 if mark is None else mark.line + 1


def plain_words(error: yaml.YAMLError, line: str = "") -> str:
  """Returns the cause and the remedy of `error`, noticed in `line` of the file."""
  text = str(error)
  if isinstance(error, yaml.MarkedYAMLError):
    # Not str(error): that quotes the file, whose words could be taken for the cause.
    text = f"{error.context} {error.problem}"
  if line.startswith(" ") and any(part in text for part in _INDENTATION):
    return "not valid YAML: this line is indented; start every key in the first column."
  if "mapping values are not allowed" in text and line.count(": ") == 1:
    return "not valid YAML: the line above is not `key: value`; it needs a colon and a space."
  for result, meaning in _MEANINGS.items():
    if result in text:
      return f"not valid YAML: {meaning}"
  return "not valid YAML: expected lines of `key: value`, such as `steps: 400`."


_LONGEST_PATH = 1000
_PACKAGE = Path(__file__).resolve().parent.parent


def packaged_folder() -> Path:
  """Returns the folder of base.yml: inside an installed package, beside it in a source checkout."""
  installed = _PACKAGE / "configs"
  return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def packaged_names() -> list[str]:
  """Returns the bare names that `config=` and `base_config:` understand."""
  return _names(packaged_folder())


def model_names() -> list[str]:
  """Returns the names that `model_name` understands."""
  return _names(packaged_folder() / "models")


def config_path(name: str) -> Path:
  """Returns the file that a path or a packaged bare name (`base`) means, or raises UserError."""
  return _existing(f"config={shown(name, _LONGEST_PATH)}", _packaged(name) or user_path(name))


def base_config_path(name: str, child: Path, given: str) -> Path:
  """Returns the file that `base_config: name` means when written in the file `child`.

  A bare name is a packaged file, `base.yml` too where no other lies beside `child`; a path is
  relative to the folder of `child`. `given` starts the message when there is no such file.
  """
  beside = child.parent / user_path(name)
  is_other = os.path.isfile(beside) and beside.resolve() != child.resolve()
  packaged = _packaged(name) or (None if is_other else _packaged(name.removesuffix(".yml")))
  return _existing(given, packaged or beside)


def model_path(name: str, folder: Path, given: str) -> Path:
  """Returns what `model_name` means: a known name's file, another, or a Hugging Face folder.

  A path is relative to `folder` (that of the file that names it), else to the working directory.
  `given` starts the message when there is no such thing.
  """
  if name in model_names():
    return packaged_folder() / "models" / f"{name}.yml"
  given_path = user_path(name)
  paths = (folder / given_path, given_path)
  for path in paths:
    is_yaml = name.endswith((".yml", ".yaml")) and os.path.isfile(path)
    if is_yaml or os.path.isfile(path / "config.json"):
      return path
  if any(map(os.path.isdir, paths)):
    raise UserError(
      f"{given}: no such model: that folder has no config.json. Give a Hugging Face "
      "model's folder, which holds one beside the weights."
    )
  raise UserError(
    f"{given}: there is no such model.{did_you_mean(name, model_names())} "
    f"Known: {', '.join(model_names())}; or give the path of a .yml file, or of a folder with "
    "Hugging Face's config.json."
  )


def closest(name: str, known: Iterable[str]) -> str | None:
  """Returns the known name closest to `name`, or None if none is close."""
  lowered = {candidate.lower(): candidate for candidate in known}
  close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
  return lowered[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Returns ` Did you mean X?` for the known name closest to `name`, or nothing."""
  result = closest(name, known)
  return "" if result is None else f" Did you mean {result}?"


def _names(folder: Path) -> list[str]:
  return sorted(path.stem for path in folder.glob("*.yml"))


def _packaged(name: str) -> Path | None:
  return packaged_folder() / f"{name}.yml" if name in packaged_names() else None


def _existing(given: str, path: Path) -> Path:
  # Not Path.is_file, to which a name that is too long is an error.
  if os.path.isfile(path):
    return path
  what = "that is a folder, not a file" if os.path.isdir(path) else "there is no such file"
  raise UserError(
    f"{given}: {what}.{_file_hint(path)} "
    f"Give the path of a .yml file, or one that comes with maxbatch: {', '.join(packaged_names())}."
  )


def _file_hint(path: Path) -> str:
  if path.stem in model_names():
    return f" That is a model: write config=base model_name={path.stem}."
  if not os.path.isdir(path.parent):
    return did_you_mean(path.stem, packaged_names())
  beside = {other.stem: other for end in ("yml", "yaml") for other in path.parent.glob(f"*.{end}")}
  result = closest(path.stem, beside)
  return f" Did you mean {beside[result]}?" if result else did_you_mean(path.stem, packaged_names())
