"""One value, from YAML node to the Python type its key declares, or an error that says what works.

Numbers are read from the text as written: a Fraction never passes through binary floating point.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from fractions import Fraction

import yaml

from maxbatch.config.declare import Example, FileName, Range, RelativePath
from maxbatch.config.find import Entry, closest, shown
from maxbatch.core.keys import plain_number
from maxbatch.errors import UserError

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
# Exponents stay below 1000: a larger one is a typing mistake, and exact would fill the memory.
_DECIMAL = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]{1,3})?")
_RATIO = re.compile(r"[-+]?[0-9][0-9_]*\s*/\s*0*[1-9][0-9_]*")
_BOOLEANS = {"true": True, "false": False}
_YAML_TAG = "tag:yaml.org,2002:"
_TAGS = {f"{_YAML_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}
# Plain text that YAML 1.1 takes for something else: 2026-01-02, << and =.
_TAGS |= {f"{_YAML_TAG}{name}" for name in ("timestamp", "merge", "value")}

_LONGEST_NUMBER = 100
"""Characters of a number as written; Python refuses to read or print those of thousands."""
_LARGEST_DENOMINATOR = 10**50
_Note = typing.TypeVar("_Note")


class _WrongTypeError(Exception):
  """The text is not a value of the type; the message is one that would be, if one is near."""


@dataclasses.dataclass(frozen=True)
class _Kind:
  """How one Python type is read from a scalar, and how --help and messages call it."""

  words: str
  phrase: str
  read: Callable[[yaml.ScalarNode], object]
  example: str


class _Type:
  """A key's type, taken apart: `Annotated[type, Range(…)] | Literal[words] | Dataclass`."""

  def __init__(self, annotation: object) -> None:
    self.words: tuple[str, ...] = ()
    """What may stand there besides numbers."""
    self.structures: Sequence[type] = ()
    """Dataclasses that may, by their names."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
      annotation, literal, *self.structures = typing.get_args(annotation)
      self.words = typing.get_args(literal)
    self._notes: Sequence[object] = ()
    if typing.get_origin(annotation) is typing.Annotated:
      annotation, *self._notes = typing.get_args(annotation)
    self.bare = typing.cast(type, annotation)
    self.range = self.note(Range)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    self.choices: tuple[object, ...] = arguments if origin is typing.Literal else ()
    self.items: tuple[object, ...] = arguments if origin is tuple else ()
    """The types of a list's items; `...` after the one of all."""

  def note(self, kind: type[_Note]) -> _Note | None:
    """Returns what the type is annotated with of this kind."""
    return next((note for note in self._notes if isinstance(note, kind)), None)

  def ranged(self, words: str) -> str:
    """Returns words for the type, and its range."""
    return words if self.range is None else f"{words}, {self.range}"

  def of_items(self, words: Callable[[object], str]) -> str:
    """Returns the types of a list's items in words."""
    parts = self.items
    return words(parts[0]) if parts[-1] is Ellipsis else f"[{', '.join(map(words, parts))}]"


def convert(entry: Entry, annotation: object) -> object:
  """Returns the value of `entry` as `annotation` demands.

  Raises:
    UserError: wrong type, outside the range, not among the choices, or text with NUL.
  """
  demanded, node = _Type(annotation), entry.node
  if isinstance(node, yaml.ScalarNode) and node.value in demanded.words:
    return node.value
  if (structured := _structured(entry, demanded)) is not None:
    return structured
  try:
    value = _read(node, demanded)
  except _WrongTypeError as wrong:
    raise UserError(_type_message(entry, annotation, str(wrong))) from None
  if isinstance(value, str):
    _check_text(entry, demanded.note(FileName), value)
  if demanded.range is not None and not demanded.range.holds(typing.cast(float, value)):
    raise UserError(_range_message(entry, demanded, demanded.range, typing.cast(float, value)))
  return value


def _check_text(entry: Entry, rule: FileName | None, value: str) -> None:
  """Refuses a text that is no name where one is needed, and NUL, which no file's name has."""
  if rule is not None and not rule.holds(value):
    raise UserError(
      f"{entry.where}: {entry.assigned(shown(value))}: {entry.key} must be {rule.words}. "
      f"A value that works: {entry.assigned(rule.nearest(value))}"
    )
  if "\0" in value:
    # No path can hold the character, nor can the command line.
    raise UserError(
      f"{entry.where}: {entry.key} must be text without NUL characters (\\0). "
      f"A value that works: {entry.assigned(value.replace(chr(0), ''))}"
    )


def describe(annotation: object) -> str:
  """Returns the type in words for --help: `whole number, at least 1, or -1`."""
  one = _Type(annotation)
  if one.choices:
    return " | ".join(map(_choice, one.choices))
  words = f"list: {one.of_items(describe)}" if one.items else one.ranged(_KINDS[one.bare].words)
  return " | ".join([words, *one.words, *map(_name, one.structures)])


def _phrase(annotation: object) -> str:
  """Returns the type in words for messages."""
  one = _Type(annotation)
  if one.choices:
    return f"one of {', '.join(map(_choice, one.choices))}"
  words = one.of_items(_phrase) if one.items else one.ranged(_KINDS[one.bare].phrase)
  words = f"a list, each {words}" if one.items else words
  return ", or ".join([words, *one.words, *map(_name, one.structures)])


def holds_text(annotation: object) -> bool:
  """Returns whether keys of this type take their text as it stands."""
  return _Type(annotation).bare is str


def plain(value: object) -> object:
  """Returns `value` as YAML can hold it, such that `convert` gives the same value back."""
  if isinstance(value, tuple):
    return [plain(item) for item in value]
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = {name: plain(part) for name, part in dataclasses.asdict(value).items()}
    return {_name(type(value)): fields}
  return plain_number(value) if isinstance(value, Fraction) else value


def _name(structure: type) -> str:
  return structure.__name__.lower()


def _structured(entry: Entry, demanded: _Type) -> object | None:
  """Returns the dataclass that is meant by its name alone, or by `{name: {field: value}}`."""
  node = entry.node
  for structure in demanded.structures:
    if isinstance(node, yaml.ScalarNode) and node.value == _name(structure):
      return structure()
    if isinstance(node, yaml.MappingNode):
      return structure(**_fields(entry, structure, node))
  return None


def _fields(entry: Entry, structure: type, node: yaml.MappingNode) -> dict[str, object]:
  types, name = {each.name: each.type for each in dataclasses.fields(structure)}, _name(structure)
  inner = node.value[0][1] if [key.value for key, _ in node.value] == [name] else None
  if not isinstance(inner, yaml.MappingNode) or any(
    not isinstance(key, yaml.ScalarNode) or key.value not in types for key, _ in inner.value
  ):
    raise UserError(
      f"{entry.given}: {entry.key} must be {name} or {{{name}: {{{next(iter(types))}: 1}}}}, with any "
      f"of {', '.join(types)}"
    )
  path = f"{entry.key}.{name}"
  return {
    key.value: convert(
      dataclasses.replace(entry, key=f"{path}.{key.value}", node=value), types[key.value]
    )
    for key, value in inner.value
  }


def _read(node: yaml.Node, demanded: _Type) -> object:
  if demanded.choices:
    return _read_choice(node, demanded.choices)
  if demanded.items:
    return _read_list(node, demanded.items)
  kind = _KINDS[demanded.bare]
  if not isinstance(node, yaml.ScalarNode) or node.tag not in _TAGS:
    raise _WrongTypeError(kind.example)
  return kind.read(node)


def _read_choice(node: yaml.Node, choices: tuple[object, ...]) -> object:
  written = node.value if isinstance(node, yaml.ScalarNode) else None
  for choice in choices:
    if str(choice) == written:
      return choice
  raise _WrongTypeError(closest(str(written), map(str, choices)) or str(choices[0]))


def _read_list(node: yaml.Node, types: tuple[object, ...]) -> tuple[object, ...]:
  """Reads a list, whose items may be lists: of one type, or as many items as there are types."""
  is_list = isinstance(node, yaml.SequenceNode)
  parts = node.value if is_list else [node]
  if types[-1] is Ellipsis:
    types = types[:1] * len(parts)
  elif len(parts) != len(types):
    raise _WrongTypeError("[]")
  try:
    items = tuple(_read_item(part, each) for part, each in zip(parts, types, strict=True))
  except _WrongTypeError as wrong:
    raise _WrongTypeError(f"[{wrong}]") from None
  if not is_list:
    raise _WrongTypeError(f"[{node.value}]" if len(node.value) <= _LONGEST_NUMBER else "[]")
  return items


def _read_item(node: yaml.Node, annotation: object) -> object:
  demanded = _Type(annotation)
  value, name = _read(node, demanded), demanded.note(FileName)
  if demanded.range is not None and not demanded.range.holds(typing.cast(float, value)):
    raise _WrongTypeError(_clamped(demanded.range, typing.cast(float, value), str(value)))
  if isinstance(value, str) and ("\0" in value or (name is not None and not name.holds(value))):
    raise _WrongTypeError('""')
  return value


def _number_text(node: yaml.ScalarNode, example: str) -> str:
  if len(node.value) > _LONGEST_NUMBER:
    raise _WrongTypeError(example)
  # 400 in quotes is text by YAML's rules; guessing otherwise would hide a mistake.
  if node.style in ("'", '"', "|", ">"):
    near = node.value if _DECIMAL.fullmatch(node.value) else example
    raise _WrongTypeError(near)
  return node.value


def _read_bool(node: yaml.ScalarNode) -> bool:
  text = node.value.lower()
  if node.style is None and text in _BOOLEANS and node.value in (text, text.title(), text.upper()):
    return _BOOLEANS[text]
  raise _WrongTypeError("false" if text in ("false", "no", "off", "n", "0") else "true")


def _read_int(node: yaml.ScalarNode) -> int:
  text = _number_text(node, "1")
  if _INTEGER.fullmatch(text) and len(text) < 100:
    return int(text)
  is_number = _DECIMAL.fullmatch(text) and _underscores_separate_digits(text)
  near = str(round(Fraction(text))) if is_number else "1"
  raise _WrongTypeError(near if len(near) < 25 else "1")


def _read_float(node: yaml.ScalarNode) -> float:
  text = _number_text(node, "0.1")
  if not _DECIMAL.fullmatch(text) or not _underscores_separate_digits(text):
    raise _WrongTypeError("0.1")
  value = float(text)
  underflow = value == 0 and Fraction(text) != 0
  if math.isinf(value) or underflow:
    raise _WrongTypeError("0.1")
  return value


def _read_fraction(node: yaml.ScalarNode) -> Fraction:
  # Quotes are allowed here: "1/3" is as natural to write as 1/3.
  try:
    return exact_number(node.value)
  except ValueError:
    raise _WrongTypeError("1/2") from None


def exact_number(text: str) -> Fraction:
  """Returns the number that `2`, `0.25`, `1e3` or `1/3` is.

  Raises:
    ValueError: it is none, or longer than anybody means.
  """
  is_number = _DECIMAL.fullmatch(text) or _RATIO.fullmatch(text)
  if len(text) > _LONGEST_NUMBER or not is_number or not _underscores_separate_digits(text):
    raise ValueError(text)
  value = Fraction("".join(text.replace("_", "").split()))
  if value.denominator > _LARGEST_DENOMINATOR:
    raise ValueError(text)
  return value


def _underscores_separate_digits(text: str) -> bool:
  return re.search(r"(?<![0-9])_|_(?![0-9])", text) is None


def _read_str(node: yaml.ScalarNode) -> str:
  if node.tag == f"{_YAML_TAG}null":
    raise _WrongTypeError('""')
  return node.value


_KINDS: dict[type, _Kind] = {
  bool: _Kind("true or false", "true or false", _read_bool, "true"),
  int: _Kind("whole number", "a whole number", _read_int, "1"),
  float: _Kind("number", "a finite number", _read_float, "0.1"),
  Fraction: _Kind("exact number", "a number such as 2, 0.25 or 1/3", _read_fraction, "1/2"),
  str: _Kind("text", "text", _read_str, '""'),
}


def _type_message(entry: Entry, annotation: object, near: str) -> str:
  demanded = _Type(annotation)
  if demanded.range is not None and _DECIMAL.fullmatch(near):
    near = _clamped(demanded.range, float(near), near)
  example = demanded.note(Example)
  if demanded.note(RelativePath):
    example = Example(RelativePath().nearest(""))
  near = closest(entry.text, demanded.words) or (example.text if example else near)
  given = entry.given if entry.text else f"{entry.where}: {entry.key} has no value"
  return (
    f"{given}: {entry.key} must be {_phrase(annotation)}. "
    f"A value that works: {entry.assigned(near)}"
  )


def _choice(choice: object) -> str:
  return str(choice) or '""'


def _range_message(entry: Entry, demanded: _Type, interval: Range, value: float) -> str:
  if interval.exceeded_by(value):
    # Not as a value that works: a machine that counts so far may lack the memory for it.
    return f"{entry.given}: {entry.key} must be at most {interval.limit:,}"
  if interval.off and value <= 0:
    return (
      f"{entry.given}: {entry.key} must be {', or '.join([str(interval), *demanded.words])}. "
      f"A value that works: {entry.assigned(interval.off)}"
    )
  near = _clamped(interval, value, entry.text)
  return (
    f"{entry.given}: {entry.key} must be {interval}. "
    f"The nearest value that works: {entry.assigned(near)}"
  )


def _clamped(interval: Range, value: float, text: str) -> str:
  if interval.holds(value):
    return text
  also = interval.also if interval.offers_also else None
  allowed = [edge for edge in (interval.low, interval.high, also) if edge is not None]
  # Exact: a long whole number, or a fraction of two, does not fit in a float.
  near = min(allowed, key=lambda edge: abs(Fraction(edge) - Fraction(value)))
  return str(int(near) if near == int(near) else near)
