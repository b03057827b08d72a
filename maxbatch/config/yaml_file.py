"""A configuration file as entries: flat keys, each with its YAML node and its place.

Values stay YAML nodes here: only their key's type says how the text is to be read (0.29 is 29/100
for an exact key, and 3e-4 is a number although YAML 1.1 reads it as text).
"""

import dataclasses
from pathlib import Path

import yaml

from maxbatch.errors import UserError


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
    """The value as it was written, shortened to what fits in a message."""
    if isinstance(self.node, yaml.ScalarNode):
      return self.node.value
    return "[...]" if isinstance(self.node, yaml.SequenceNode) else "{...}"

  def assigned(self, value: object) -> str:
    """`key: value` or `key=value`, as one writes it in that place."""
    return f"{self.key}{'=' if self.where == COMMAND_LINE else ': '}{value}"


COMMAND_LINE = "command line"
TEXT_TAG = "tag:yaml.org,2002:str"


def read_file(path: Path) -> dict[str, Entry]:
  """The entries of the YAML file at `path`, by key.

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
  """The entry of a `key=text` argument; `text` is YAML.

  Keys that hold text take it as it stands (spaces, colons and # included) unless all of it is in
  quotes: YAML would drop `# note` and the last space of `prompt=def `.

  Raises:
    UserError: the text is empty where a value is needed, or not YAML.
  """
  node = _quoted_or_literal(text) if holds_text else _argument_node(key, text)
  return Entry(key, node, COMMAND_LINE, Path())


def _argument_node(key: str, text: str) -> yaml.Node:
  try:
    node = yaml.compose(text, yaml.SafeLoader)
  except yaml.YAMLError as error:
    raise UserError(f"{COMMAND_LINE}: {key}={text}: {_plain_words(error)}") from error
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


def _root_node(path: Path, text: str) -> yaml.Node | None:
  try:
    return yaml.compose(text, yaml.SafeLoader)
  except yaml.MarkedYAMLError as error:
    line = _error_line(error)
    shown = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
    raise UserError(f"{path}:{line}: {_plain_words(error)}\n  {shown}") from error
  except yaml.YAMLError as error:
    raise UserError(f"{path}: {_plain_words(error)}") from error


def _entry(path: Path, key_node: yaml.Node, value_node: yaml.Node) -> Entry:
  where = f"{path}:{_line(key_node)}"
  if not isinstance(key_node, yaml.ScalarNode):
    raise UserError(f"{where}: a key must be a name, such as `steps: 400`.")
  return Entry(key_node.value, value_node, where, path.parent)


def _line(node: yaml.Node) -> int:
  return node.start_mark.line + 1


def _error_line(error: yaml.MarkedYAMLError) -> int:
  # The parser notices an open quote or bracket only at the end; people look for where it opened.
  opened = "quoted scalar" in (error.context or "") or "flow" in (error.context or "")
  mark = error.context_mark if opened else error.problem_mark
  mark = mark or error.problem_mark
  return 1 if mark is None else mark.line + 1


_PLAIN_WORDS = {
  "mapping values are not allowed": "a second `: ` in one line; put the value in quotes.",
  "could not find expected ':'": "expected `key: value`, with a space after the colon.",
  r"found character '\t'": "a tab stands where YAML wants spaces.",
  "quoted scalar": "a quote is opened and never closed.",
  "flow sequence": "a list is opened with [ and not closed; write [1, 2, 3].",
  "flow mapping": "a mapping is opened with { and not closed; write {name: 1}.",
  "expected <block end>": "this line does not line up with the ones above; start keys in column 1.",
  "a single document": "a second `---` document; a configuration is one document.",
  "unacceptable character": "a control character; remove it.",
  "special characters are not allowed": "a control character; remove it.",
  "undefined alias": "a value that starts with * must be in quotes.",
  "alias": "a value that starts with * must be in quotes.",
  "anchor": "a value that starts with & must be in quotes.",
  "cannot start any token": "a value that starts with @, `, % or a comma must be in quotes.",
}


def _plain_words(error: yaml.YAMLError) -> str:
  text = str(error)
  for found, meaning in _PLAIN_WORDS.items():
    if found in text:
      return f"not valid YAML: {meaning}"
  return f"not valid YAML: {text.splitlines()[0]}. Write `key: value`, one a line."
