"""Text for a terminal: long lines broken between words, headings that stand out, colors.

Elsewhere, in a pipe or a file, lines stay whole and plain, to be searched and compared.
"""

import os
import re
import shutil
import sys
import textwrap
from typing import Literal

Color = Literal["red", "green", "yellow", "blue", "bold", "faint"]

_CODES: dict[Color, str] = {
  "red": "31", "green": "32", "yellow": "33", "blue": "34", "bold": "1", "faint": "2"
}  # fmt: skip

_LABEL_COLUMNS = 30
"""Where the second column of a line begins at the latest."""
_GAP = re.compile(r"(?<=\S)\s{2,}(?=\S)")
_LABEL = re.compile(r"\S+(?: \S+)*?(?=  )")


def colored(text: str, color: Color) -> str:
  """Returns the text for standard output; plain if that is no terminal, or NO_COLOR (no-color.org) is set."""
  if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
    return text
  return f"\x1b[{_CODES[color]}m{text}\x1b[0m"


def printable(text: str) -> str:
  """Returns text of others, such as a model's, with escapes for all that would move a terminal's cursor,
  but line breaks and tabs."""
  escaped = (
    character
    if character.isprintable() or character in "\n\t"
    else character.encode("unicode_escape").decode()
    for character in text
  )
  return "".join(escaped)


def for_screen(text: str) -> str:
  """Returns the text as a terminal shows it best; elsewhere as it is.

  A heading above indented lines, and the label of a line, are bold. A line that is too long goes on below
  where its second column begins; a word that is longer than a line, such as a path, stays whole.
  """
  if not sys.stdout.isatty():
    return text
  columns = shutil.get_terminal_size().columns
  lines = text.split("\n")
  shown: list[str] = []
  for line, below in zip(lines, [*lines[1:], ""], strict=True):
    first, *rest = _broken(line, columns)
    label = _LABEL.match(first)
    bold = len(first) if below.startswith(" ") and not first.startswith(" ") else 0
    bold = label.end() if label else bold
    shown += [colored(first[:bold], "bold") + first[bold:] if bold else first, *rest]
  return "\n".join(shown)


def _broken(line: str, columns: int) -> list[str]:
  if len(line) <= columns:
    return [line]
  gaps = [gap.end() for gap in _GAP.finditer(line[:_LABEL_COLUMNS])]
  indent = gaps[-1] if gaps else len(line) - len(line.lstrip()) + 2
  return textwrap.wrap(
    line,
    columns,
    subsequent_indent=" " * indent,
    break_long_words=False,
    break_on_hyphens=False,
    replace_whitespace=False,
  )
