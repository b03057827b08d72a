"""Where the threads of this process are."""

import sys
import threading
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def stacks() -> str:
  """The stack of every thread of Python, the innermost call last."""
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  return "\n".join(
    f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
    for ident, frame in sys._current_frames().items()
  )


def main_place() -> str:
  """The innermost line of this package that the main thread is in."""
  frame = sys._current_frames()[threading.main_thread().ident or 0]
  for call in reversed(traceback.extract_stack(frame)):
    path = Path(call.filename)
    if path.is_relative_to(_PACKAGE):
      return f"{path.relative_to(_PACKAGE.parent)}:{call.lineno} in {call.name}"
  return "outside of maxbatch"
