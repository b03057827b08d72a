"""How a configuration key is declared: once, with its type, range, default, resume class and help.

A key is a field of a frozen dataclass, and the string below it is its help:

    top_k: Annotated[int, Range(low=1, high=64)] = key(2, FIXED)
    \"\"\"Experts that a token is sent to.\"\"\"

maxbatch's own are in config/keys/. A plug-in's are in its attribute `Keys` (config/registry.py): a class
in a class, or of a function what `with_keys` gives it.

The values that keys may have, beside their Python types: the types that the sections are made of.
"""

import ast
import dataclasses
import functools
import inspect
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, TypeVar


@dataclasses.dataclass(frozen=True)
class Range:
  """The closed interval a number must lie in; `also` names one value allowed outside it."""

  low: float | None = None
  high: float | None = None
  also: float | None = None
  offers_also: bool = True
  """Whether a message may offer `also`, which some keys need another key for."""
  limit: float | None = None
  """What a machine can hold: said only to who exceeds it."""
  off: str = ""
  """The word that is meant by 0 and less, if there is one."""

  def holds(self, value: float | Fraction) -> bool:
    """Returns whether `value` is allowed."""
    if self.also is not None and value == self.also:
      return True
    if self.exceeded_by(value):
      return False
    return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

  def exceeded_by(self, value: float | Fraction) -> bool:
    """Returns whether `value` is more than a machine can hold."""
    return self.limit is not None and value > self.limit

  def __str__(self) -> str:
    low = "" if self.low is None else f"at least {_digits(self.low)}"
    high = "" if self.high is None else f"at most {_digits(self.high)}"
    text = " and ".join(part for part in (low, high) if part)
    return text if self.also is None else f"{text}, or {_digits(self.also)}"


def _digits(edge: float) -> str:
  """Returns a whole number in full, else as short as it goes."""
  return str(edge) if isinstance(edge, int) else f"{edge:g}"


@dataclasses.dataclass(frozen=True)
class FileName:
  """A text that names a file or folder, or files by a glob: no longer than file systems take.

  ~ begins the name of a user's home folder; who has none is a typing mistake (./~name: such a file).
  """

  words: str = "a name that a file system can hold, ~ before the name of a user"

  def holds(self, value: str) -> bool:
    """Returns whether `value` is such a name."""
    encoded = value.encode(errors="replace")
    is_short = len(encoded) <= 4000 and all(len(part) <= 255 for part in encoded.split(b"/"))
    return is_short and not self._is_nobodys(value)

  def nearest(self, value: str) -> str:
    """Returns the beginning of `value`."""
    shorter = "/".join(part[:40] for part in value[:80].split("/"))
    return f"./{shorter}" if self._is_nobodys(shorter) else shorter

  def _is_nobodys(self, value: str) -> bool:
    return value.startswith("~") and os.path.expanduser(value) == value


@dataclasses.dataclass(frozen=True)
class RelativePath(FileName):
  """A text that names a folder inside another one: no step upwards, and no control character."""

  words: str = "the name of a folder inside another one, without .. and control characters"

  def holds(self, value: str) -> bool:
    """Returns whether `value` is such a name."""
    parts = value.split("/")
    short = all(len(part.encode(errors="replace")) <= 200 for part in parts) and len(parts) <= 8
    return short and value.isprintable() and not {"", ".", ".."} & set(parts)

  def nearest(self, value: str) -> str:
    """Returns what is left of `value` without what does not work in it."""
    printable = "".join(char if char.isprintable() else "_" for char in value)
    parts = [part[:40] for part in printable.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[:8]) or "my_run"


@dataclasses.dataclass(frozen=True)
class Address(FileName):
  """A text that names a port of a host, or nothing."""

  words: str = "HOST:PORT"
  longest: int = 253
  """Characters of a host's name."""

  def holds(self, value: str) -> bool:
    """Returns whether `value` is such an address."""
    host, _, port = value.rpartition(":")
    numbered = port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16
    return not value or (self._is_host(host) and numbered)

  def nearest(self, value: str) -> str:
    """Returns `value` with a port."""
    host = value.partition(":")[0]
    return f"{host if self._is_host(host) else 'localhost'}:1234"

  def _is_host(self, text: str) -> bool:
    name = re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", text, re.ASCII | re.IGNORECASE)
    return name is not None and len(text) <= self.longest


@dataclasses.dataclass(frozen=True)
class Registered:
  """A text that names something registered, or `module:attribute` of the user's (registry.py)."""


@dataclasses.dataclass(frozen=True)
class Example:
  """A value that works, for messages, where none can be made of what is wrong."""

  text: str


# A size, a count or an index on a device is an int32.
INT32 = 2**31 - 1
# JSON and floats count exactly so far: samples and tokens of whole runs.
EXACT = 2**53
# No machine has more, and a plan lists the hosts one by one.
DEVICES = 2**20
# More does not fit in a float32.
FLOAT32 = 3e38

Name = Annotated[str, Registered()]
Path = Annotated[str, FileName()]
Positive = Annotated[int, Range(low=1, limit=INT32)]
NonNegative = Annotated[int, Range(low=0, limit=INT32)]
PositiveOrUnset = Annotated[int, Range(low=1, limit=INT32, also=-1)]
Budget = Annotated[int, Range(low=1, limit=EXACT, also=-1, offers_also=False)]
CountOrUnset = Annotated[int, Range(low=1, limit=EXACT, also=-1)]
CountOrZeroOrUnset = Annotated[int, Range(low=0, limit=EXACT, also=-1)]
Exact = Annotated[Fraction, Range(low=0, limit=INT32)]
ExactOrUnset = Annotated[Fraction, Range(low=0, limit=INT32, also=-1)]
Weight = Annotated[Fraction, Range(low=0, limit=EXACT)]
DevicesOrUnset = Annotated[int, Range(low=1, limit=DEVICES, also=-1)]
DevicesOrNone = Annotated[int, Range(low=0, limit=DEVICES)]
Hosts = Annotated[int, Range(low=1, limit=DEVICES)]
Seconds = Annotated[int, Range(low=1, limit=1_000_000)]
Seed = Annotated[int, Range(low=0, high=2**32 - 1)]
"""jax takes the last 32 bits of a seed: beyond them another seed would give the same numbers."""
Probability = Annotated[float, Range(low=0, high=1)]
NucleusProbability = Annotated[float, Range(low=0.001, high=1)]
NonNegativeFloat = Annotated[float, Range(low=0, limit=FLOAT32)]
FloatFormat = Literal["float32", "bfloat16", "float16", "cbfloat16"]
Scale = Annotated[float, Range(low=2.0**-24, high=2.0**40)]
LossScale = Annotated[float, Range(low=2.0**-24, high=2.0**40, off="none")]
"""A scale of losses: powers of two are exact."""


Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable)
Resume = Literal["fixed", "changeable", "per start"]
"""What a resume may change."""
FIXED: Resume = "fixed"
"""Gives what is trained already its meaning: a resume with another value is refused, unless
allow_changed_resume=true."""
CHANGEABLE: Resume = "changeable"
"""Applies from the resume on, and what changed is printed key by key."""
PER_START: Resume = "per start"
"""Says what a start does beside training, and where; not compared."""


@dataclasses.dataclass(frozen=True)
class Besides:
  """All values but some."""

  excluded: tuple[object, ...]
  like: object
  """One of those that are left, for messages."""


def besides(*excluded: object, like: object) -> Besides:
  """Returns all values but `excluded`, of which `like` is one."""
  return Besides(excluded, like)


@dataclasses.dataclass(frozen=True)
class When:
  """A condition on other keys, without which a key has no effect."""

  alternatives: tuple[Mapping[str, object], ...]
  """Any of them will do: keys, each with the value that it must have, a list of such values, or
  Besides. A plug-in's name will do for any, as plug-ins read what they like."""
  refuses: bool = False
  """Whether a key without effect is refused, since the run would mean something else than its keys
  say; else it is named when the run begins."""


def when(*alternatives: Mapping[str, object], refuses: bool = False) -> When:
  """Returns a condition of a key (see `When`)."""
  return When(alternatives, refuses)


def key(default: Value, resume: Resume, *read_when: When, old_names: tuple[str, ...] = ()) -> Value:
  """Declares a key as a field of a frozen dataclass.

  Args:
    default: of the field's type, hashable.
    resume: FIXED, CHANGEABLE or PER_START.
    *read_when: conditions that must all hold for the key to be read; none: every run reads it.
    old_names: what one of maxbatch's was called; files and arguments may still use them.
  """
  metadata = {"resume": resume, "read_when": read_when, "old_names": old_names}
  field = dataclasses.field(default=default, metadata=metadata)
  return typing.cast(Value, field)


def with_keys(keys: type) -> Callable[[Function], Function]:
  """Declares the keys of a function, which is then given an instance as the argument `keys`.

  Args:
    keys: a frozen dataclass, whose fields are declared with `key`.
  """

  def declare(function: Function) -> Function:
    vars(function)["Keys"] = keys
    return function

  return declare


@dataclasses.dataclass(frozen=True)
class Key:
  """A declared key."""

  type: object
  """With its range: `Annotated[int, Range(low=1)]`."""
  default: object
  resume: Resume
  read_when: tuple[When, ...] = ()
  old_names: tuple[str, ...] = ()


PlugIns = tuple[tuple[str, object], ...]
"""Plug-ins that declare keys, as they are named, each with the values of its keys."""


@dataclasses.dataclass(frozen=True)
class Section:
  """A section of the configuration."""

  plugins: PlugIns = dataclasses.field(default=(), kw_only=True)
  """What this section's keys name, with keys of its own."""
  heading: ClassVar[str]
  """In base.yml and --help."""

  def __init_subclass__(cls, heading: str) -> None:
    """Notes the section's heading."""
    cls.heading = heading


@functools.cache
def declared(cls: type) -> Mapping[str, Key]:
  """Returns the keys that a dataclass declares, by name."""
  fields = [field for field in dataclasses.fields(cls) if "resume" in field.metadata]
  # Those of a module with `from __future__ import annotations` are text.
  is_text = any(isinstance(field.type, str) for field in fields)
  hints = typing.get_type_hints(cls, include_extras=True) if is_text else {}
  return types.MappingProxyType(
    {
      field.name: Key(
        hints.get(field.name, field.type),
        field.default,
        field.metadata["resume"],
        field.metadata["read_when"],
        field.metadata["old_names"],
      )
      for field in fields
    }
  )


@functools.cache
def helps(cls: type) -> Mapping[str, str]:
  """Returns the help of each key that a dataclass declares, in one line: the string below it.

  Without the source, as in an interactive session, there is none.
  """
  results: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    if dataclasses.is_dataclass(base):
      try:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
      except (OSError, TypeError):
        continue
      assert isinstance(body, ast.ClassDef)
      for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
          words = ast.literal_eval(below.value)
          results[ast.unparse(field.target)] = " ".join(words.split())
  return results
