"""How every command runs and ends: its help, its exit code, and what it says on standard error."""

import io
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

from maxbatch.command_line.arguments import Arguments, Command, Own, parse, wants_help
from maxbatch.command_line.help import help_text
from maxbatch.command_line.signals import INTERRUPTED, EndingSignals, Interrupted
from maxbatch.errors import EXIT_DIVERGED, EXIT_USER_ERROR, TrainingDivergedError, UserError

EXIT_NO_READER = 128 + signal.SIGPIPE
"""As a shell has it for a program that SIGPIPE ends."""


def run_command(
  command: Command[Own], arguments: Sequence[str], work: Callable[[Arguments[Own]], object]
) -> int:
  """Prints the help if asked for, else parses the arguments and does the work.

  Returns:
    The exit code: 0, or that of what ended the work, said in a sentence and without a traceback.
  """
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="replace")  # × and → must not end a run on a terminal without them
  try:
    with EndingSignals():
      if wants_help(arguments):
        print(help_text(command))
      else:
        work(parse(command, arguments))
      sys.stdout.flush()
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USER_ERROR
  except TrainingDivergedError as error:
    print(f"stopped: {error}", file=sys.stderr)
    return EXIT_DIVERGED
  except Interrupted as interrupted:
    print(INTERRUPTED, file=sys.stderr)
    return interrupted.exit_code
  except BrokenPipeError:
    if _has_reader():
      raise  # Another pipe: that of a worker process, or a socket.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_NO_READER
  return 0


def _has_reader() -> bool:
  """Whether somebody still reads standard output; not so once `head` has its lines."""
  output = select.poll()
  output.register(sys.stdout.fileno(), select.POLLOUT)
  return not any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))
