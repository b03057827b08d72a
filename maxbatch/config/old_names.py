"""Names of keys and options that have another name now: they still work, and are said to be old."""

import functools
import sys


@functools.cache
def say_old_name(old: str, new: str) -> None:
  """Prints, once, on standard error, what an old name is called now."""
  print(f"note: {old} is called {new} now; the old name still works", file=sys.stderr, flush=True)
