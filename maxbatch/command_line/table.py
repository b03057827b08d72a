"""Tables, sections and sizes in reports: the same text in a terminal, a pipe and a file.

Written here and not by `rich`, which flax would bring: it fits tables to the width of a console, 80
columns in a pipe, by folding or cutting their cells, and these lines stay whole to be searched and
compared. What it would replace is `in_columns`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

GIB = 2**30


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
