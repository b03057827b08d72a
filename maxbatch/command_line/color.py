"""Color where a person looks at a terminal; elsewhere the words alone."""

import os
import sys
from typing import Literal

Color = Literal["red", "green", "yellow", "blue", "bold", "faint"]

_CODES: dict[Color, str] = {
  "red": "31", "green": "32", "yellow": "33", "blue": "34", "bold": "1", "faint": "2"
}  # fmt: skip


def colored(text: str, color: Color) -> str:
  """The text for standard output; plain if that is no terminal, or NO_COLOR (no-color.org) is set."""
  if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
    return text
  return f"\x1b[{_CODES[color]}m{text}\x1b[0m"
