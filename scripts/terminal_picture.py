"""Makes an SVG of what a command printed, as docs/ shows it: a terminal of 120 columns.

    .venv/bin/maxbatch runs | .venv/bin/python scripts/terminal_picture.py runs.svg 'maxbatch runs'

Where lines are left out, the input has a line with `…` alone.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COLUMNS = 120
# Of another host, and a picture in a page loads nothing.
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main(file: str, command: str) -> None:
  """Draws the command and below it standard input."""
  console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
  console.print(Text(f"$ {command}", style="bold"))
  console.print(Text.from_ansi(sys.stdin.read()))
  Path(file).write_text(_FONTS.sub("", console.export_svg(title="maxbatch")))


if __name__ == "__main__":
  main(*sys.argv[1:])
