"""Fills the pages of docs/ that say what the code declares, while mkdocs builds the site (mkdocs.yml)."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from maxbatch.__main__ import COMMANDS
from maxbatch.config.schema import documented_keys
from maxbatch.config.value import describe


def on_page_markdown(markdown: str, **_: Any) -> str:
  """Puts the tables where a page asks for them."""
  for mark, lines in (("keys", _keys), ("commands", _commands)):
    if f"<!-- {mark} -->" in markdown:
      markdown = markdown.replace(f"<!-- {mark} -->", "\n".join(lines()))
  return markdown


def _keys() -> Iterator[str]:
  for heading, keys in groupby(documented_keys(), key=lambda one: one.heading):
    yield from (
      f"## {heading.capitalize()}",
      "",
      "| key | default | values | |",
      "|---|---|---|---|",
    )
    for one in keys:
      cells = (f"`{one.key}`", f"`{one.default}`", describe(one.type), one.help)
      yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _commands() -> Iterator[str]:
  yield from ("| command | |", "|---|---|")
  for name, about in COMMANDS.items():
    yield f"| `maxbatch {name}` | {about} |"
