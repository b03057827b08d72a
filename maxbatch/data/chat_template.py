"""Chat templates as programs that end: Jinja in a sandbox that counts what they do.

A template comes with a tokenizer, from whoever made it. In each rendering its loops and calls take so
many turns at most, and what they write and compute has a largest size: counts, and no clock, so that the same
conversation is always rendered, or always refused.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maxbatch.config.registry import library

_MOST_TURNS = 10**6
_MOST_ELEMENTS = 10**7
"""Of a text or list."""
_MOST_BITS = 10**4
"""Of a number."""
_MOST_INDENT = 100
_TURNS_OF_A_CALL = 10
_WIDE = re.compile(r"[%:][^%:a-zA-Z]*(\*|\d{5})")
"""A text's format with a width of its own, which takes Python up to a minute."""
_ASKED_BY = "use_chat_template=true"
_FAILURES = (
  ArithmeticError,
  AttributeError,
  LookupError,
  MemoryError,
  RecursionError,
  TypeError,
  ValueError,
)
"""Errors of programs, which templates are, beside Jinja's own."""


class TemplateFailedError(Exception):
  """The chat template refuses a conversation, or fails; the message says why."""


class TurnCounter:
  """The turns that a rendering has left."""

  def __init__(self) -> None:
    """Counts from the most there are."""
    self._left = _MOST_TURNS

  def reset(self) -> None:
    """Gives the next rendering as many."""
    self._left = _MOST_TURNS

  def take(self, count: int = 1) -> None:
    """Counts some; raises ValueError if there are no more."""
    self._left -= count
    if self._left < 0:
      raise ValueError(f"its loops and calls take more than {_MOST_TURNS:,} turns")

  def counted(self, items: Iterable[Any]) -> Iterator[Any]:
    """Yields what a loop goes over, a turn each."""
    for item in items:
      self.take()
      yield item

  def range(self, *ends: int) -> range:
    """Returns Jinja's range; all of its numbers count, as filters go over them too."""
    numbers = range(*ends)
    self.take(len(numbers))
    return numbers


def compiled_template(text: str, **functions: Callable[..., Any]) -> "ChatTemplate":
  """Compiles a template, with more functions that it can call. Raises jinja2's TemplateSyntaxError."""
  turns = TurnCounter()
  environment = _sandbox()(
    turns, trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  # As chat templates are written for, of which transformers set the custom.
  environment.filters |= {"tojson": _to_json, "format": _formatted}
  environment.globals |= {"raise_exception": _raise, "range": turns.range, **functions}
  del environment.globals["lipsum"]  # Random words, as many as one asks for.
  tree = _limits()().visit(environment.parse(text))
  return ChatTemplate(environment.from_string(tree), turns)


class ChatTemplate:
  """A compiled template."""

  def __init__(self, template: Any, turns: TurnCounter):
    """Takes Jinja's, and what counts its turns."""
    self._template, self._turns = template, turns

  def render(self, **values: Any) -> str:
    """Returns a text. Raises TemplateFailedError: the template refuses, fails or does not end."""
    self._turns.reset()
    try:
      text = self._template.render(**values)
      _check_elements("it renders", len(text))
      return text
    except (library("jinja2", _ASKED_BY).TemplateError, *_FAILURES) as error:
      raise TemplateFailedError(str(error) or type(error).__name__) from error


@functools.cache
def _sandbox() -> Any:
  """Returns the class of environments, whose library is installed only where templates are used."""
  runtime = library("jinja2.runtime", _ASKED_BY)

  class Sandbox(library("jinja2.sandbox", _ASKED_BY).ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, turns: TurnCounter, **options: Any):
      super().__init__(**options)
      self.turns, self.counted = turns, turns.counted

    def call(self, context: Any, called: Any, /, *given: Any, **named: Any) -> Any:
      if called in (self.counted, _concatenated):  # By `_limits`, and no call of the template's.
        return called(*given)
      self.turns.take(_TURNS_OF_A_CALL)
      if isinstance(called, runtime.LoopContext) and given:
        given = (self.counted(given[0]), *given[1:])
      return super().call(context, called, *given, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
      _check_size(operator, left, right)
      return super().call_binop(context, operator, left, right)

    concatenated = staticmethod(_concatenated)

    def format_string(self, s: str, *given: Any, **named: Any) -> str:
      _check_format(s)
      return super().format_string(s, *given, **named)

  return Sandbox


@functools.cache
def _limits() -> Any:
  """Returns the class that puts what counts into a template: around what loops go over, and for ~."""
  nodes = library("jinja2.nodes", _ASKED_BY)

  def call(name: str, given: list[Any], line: int) -> Any:
    # An attribute, which no variable of the template can stand before.
    return nodes.Call(nodes.EnvironmentAttribute(name), given, [], None, None, lineno=line)

  class Limits(library("jinja2.visitor", _ASKED_BY).NodeTransformer):
    def visit_For(self, node: Any) -> Any:
      self.generic_visit(node)
      node.iter = call("counted", [node.iter], node.lineno)
      return node

    def visit_Concat(self, node: Any) -> Any:
      self.generic_visit(node)
      return call("concatenated", node.nodes, node.lineno)

  return Limits


def _concatenated(*parts: object) -> str:
  texts = list(map(str, parts))
  _check_elements("~ gives", sum(map(len, texts)))
  return "".join(texts)


def _check_size(operator: str, left: Any, right: Any) -> None:
  """Raises ValueError: a sum, product or power of more elements or digits than anybody needs."""
  if operator == "%":
    _check_format(left)
    return
  sizes = [len(each) if isinstance(each, str | list | tuple) else each for each in (left, right)]
  if not all(isinstance(each, int) for each in sizes):
    return
  if [left, right] != sizes:
    _check_elements(f"{operator} gives", sum(sizes) if operator == "+" else math.prod(sizes))
  elif operator != "+":
    bits, others = (abs(each).bit_length() for each in sizes)
    if (bits + others if operator == "*" else bits * abs(right)) > _MOST_BITS:
      raise ValueError(f"{operator} gives a number of more than {_MOST_BITS:,} bits")


def _check_format(text: object) -> None:
  if isinstance(text, str) and _WIDE.search(text):
    raise ValueError("it formats to a width of five digits or more")


def _check_elements(how: str, count: int) -> None:
  if count > _MOST_ELEMENTS:
    raise ValueError(f"{how} more than {_MOST_ELEMENTS:,} characters or elements")


def _formatted(text: object, *given: object, **named: object) -> str:
  _check_format(str(text))
  return str(text) % (named or given)


def _to_json(value: object, indent: int | None = None) -> str:
  """Returns JSON as templates expect it: not escaped for HTML. Raises ValueError: no usual indent."""
  if isinstance(indent, int) and indent > _MOST_INDENT:
    raise ValueError(f"tojson(indent={indent}) is more than {_MOST_INDENT}")
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
  """Refuses a conversation; templates call it."""
  raise ValueError(message)
