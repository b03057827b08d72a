"""Text for a terminal: long lines broken between words, headings that stand out.

Elsewhere, in a pipe or a file, lines stay whole and plain, to be searched and compared.
"""

import re
import shutil
import sys
import textwrap

from maxbatch.command_line.color import colored

_LABEL_COLUMNS = 30
"""Where the second column of a line begins at the latest."""
_GAP = re.compile(r"(?<=\S)\s{2,}(?=\S)")
_LABEL = re.compile(r"\S+(?: \S+)*?(?=  )")


def for_screen(text: str) -> str:
  """The text as a terminal shows it best; elsewhere as it is.

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
