"""How every command runs and ends: its help, its exit code, and what it says on standard error."""

import signal
import sys
from collections.abc import Callable, Sequence

from maxbatch.command_line.arguments import Arguments, Command, Own, parse, wants_help
from maxbatch.command_line.help import help_text
from maxbatch.command_line.signals import INTERRUPTED, EndingSignals, Interrupted
from maxbatch.command_line.streams import EnduringStreams
from maxbatch.errors import (
  EXIT_DIVERGED,
  EXIT_ROWS,
  EXIT_USER_ERROR,
  ProcessFailedError,
  RowsError,
  SaidByAnotherError,
  TrainingDivergedError,
  UserError,
)

EXIT_NO_READER = 128 + signal.SIGPIPE
"""As a shell has it for a program that SIGPIPE ends."""


def run_command(
  command: Command[Own], arguments: Sequence[str], work: Callable[[Arguments[Own]], object]
) -> int:
  """Prints the help if asked for, else parses the arguments and does the work.

  Returns:
    The exit code: 0, or that of what ended the work, said in a sentence and without a traceback.
  """
  only_prints = not command.leaves_files or wants_help(arguments)
  with EnduringStreams() as streams:
    exit_code = _exit_code(command, arguments, work)
    failure = streams.failure()
    if exit_code or not failure:
      return exit_code
    if only_prints and isinstance(failure, BrokenPipeError):
      return EXIT_NO_READER
    kind = "error" if only_prints else "warning"
    print(
      f"{kind}: standard output cannot be written ({failure.strerror})",
      file=sys.stderr,
    )
    return EXIT_USER_ERROR if only_prints else 0


def _exit_code(
  command: Command[Own], arguments: Sequence[str], work: Callable[[Arguments[Own]], object]
) -> int:
  try:
    with EndingSignals():
      if wants_help(arguments):
        print(help_text(command, arguments))
      else:
        work(parse(command, arguments))
      sys.stdout.flush()
  except SaidByAnotherError:
    return EXIT_USER_ERROR
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USER_ERROR
  except TrainingDivergedError as error:
    print(f"stopped: {error}", file=sys.stderr)
    return EXIT_DIVERGED
  except RowsError as error:
    print(f"stopped: {error}", file=sys.stderr)
    return EXIT_ROWS
  except ProcessFailedError as error:
    return error.exit_code
  except Interrupted as interrupted:
    print(INTERRUPTED, file=sys.stderr)
    return interrupted.exit_code
  return 0
