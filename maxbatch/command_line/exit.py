"""How a command that trains ends: its exit code, and what it says on standard error."""

import io
import sys
from collections.abc import Callable

from maxbatch.command_line.signals import INTERRUPTED, EndingSignals, Interrupted
from maxbatch.errors import EXIT_DIVERGED, EXIT_USER_ERROR, TrainingDivergedError, UserError


def exit_code(work: Callable[[], object]) -> int:
  """Does the work; 0, or the code of what ended it, with a sentence and no traceback."""
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="replace")  # × and → must not end a run on a terminal without them
  try:
    with EndingSignals():
      work()
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USER_ERROR
  except TrainingDivergedError as error:
    print(f"stopped: {error}", file=sys.stderr)
    return EXIT_DIVERGED
  except Interrupted as interrupted:
    print(INTERRUPTED, file=sys.stderr)
    return interrupted.exit_code
  return 0
