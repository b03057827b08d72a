"""How a configuration key is declared: once, with its type, range, default, resume class and help.

A key is a field of a frozen dataclass, and the string below it is its help:

    top_k: Annotated[int, Range(low=1, high=64)] = key(2, FIXED)
    \"\"\"Experts that a token is sent to.\"\"\"

maxbatch's own are in config/keys/. A plug-in's are in its attribute `Keys` (config/plugins.py): a class
in a class, or of a function what `with_keys` gives it.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, TypeVar

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


def key(default: Value, resume: Resume) -> Value:
  """Declares a key as a field of a frozen dataclass.

  Args:
    default: of the field's type, hashable.
    resume: FIXED, CHANGEABLE or PER_START.
  """
  field = dataclasses.field(default=default, metadata={"resume": resume})
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
      field.name: Key(hints.get(field.name, field.type), field.default, field.metadata["resume"])
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
