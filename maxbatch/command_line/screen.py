"""Text for a terminal: long lines broken between words, headings that stand out, colors; tables.

Elsewhere, in a pipe or a file, lines stay whole and plain, to be searched and compared. Tables are
written here and not by `rich`, which flax would bring: it fits tables to the width of a console, 80
columns in a pipe, by folding or cutting their cells, and these lines stay whole to be searched and
compared. What it would replace is `in_columns`.
"""

import dataclasses
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
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
  """Escapes all in a text that would move a terminal's cursor, but line breaks and tabs."""
  return "".join(
    c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
  )


def note(lines: Iterable[str]) -> None:
  """Writes lines beside what a command prints, to standard error."""
  for line in lines:
    print(line, file=sys.stderr, flush=True)


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


MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of words under a head, as text (`lines`) or for a page's template."""

  head: Sequence[str]
  rows: Sequence[Sequence[str]]
  left: Collection[int] = ()
  """Columns that begin at the left in text; the others, of numbers, end at the right."""
  best: int = -1
  """The row that a page marks; -1: none."""

  def lines(self, indent: str = "  ") -> list[str]:
    """Returns a line for the head and each row.

    A row that ends early, with a remark in its last cell, keeps that cell out of the widths.
    """
    rows = [self.head, *self.rows]
    whole = [row for row in rows if len(row) == len(self.head)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return [(indent + in_columns(row, widths, self.left)).rstrip() for row in rows]


def in_columns(
  row: Sequence[str], widths: Sequence[int], left: Collection[int] = (), gap: str = "  "
) -> str:
  """Returns the cells of a row under those of others; the last one of a short row as it is."""
  cells = [
    cell.ljust(width) if place in left else cell.rjust(width)
    for place, (cell, width) in enumerate(zip(row, widths, strict=False))
  ]
  if len(row) < len(widths):
    cells[-1] = row[-1]
  return gap.join(cells).rstrip()


def section(title: str, lines: Iterable[str]) -> str:
  """Returns a title with lines below it, indented."""
  return "\n".join([title, *(f"  {line}" for line in lines)])


def figure(name: str, value: str, rest: str = "") -> str:
  """Returns a name, its value under other values, and what follows, such as the unit."""
  return f"{name:<26}{value:>10} {rest}".rstrip()


def gib(num_bytes: float, digits: str = ".3g") -> str:
  """Returns bytes in GiB, without the unit: `11.2`."""
  return f"{num_bytes / GIB:{digits}}"


def in_unit(num_bytes: float, largest: float, digits: str = ".3f") -> tuple[str, str]:
  """Returns bytes and their unit: MiB where the largest of their table is below 1/2 GiB."""
  size, unit = (GIB, "GiB") if largest >= GIB / 2 else (MIB, "MiB")
  return f"{num_bytes / size:{digits}}", unit


def gib_of(num_bytes: float, capacity_bytes: float) -> str:
  """Returns bytes beside those that there are: `11.2 of 15.75 GiB`."""
  return f"{gib(num_bytes)} of {gib(capacity_bytes, '.4g')} GiB"


def file_size(num_bytes: float) -> str:
  """Returns the size of files in powers of 1000: `3.1 MB`."""
  for unit in ("bytes", "kB", "MB", "GB"):
    if num_bytes < 1000:
      return f"{num_bytes:.3g} {unit}"
    num_bytes /= 1000
  return f"{num_bytes:,.3g} TB"
