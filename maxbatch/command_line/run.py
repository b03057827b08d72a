"""How every command runs and ends: its help, its exit code, and what it says on standard error.

Standard output and error that may fail, while a command goes on.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TextIO

from maxbatch.command_line.arguments import Arguments, Command, Own, help_text, parse, wants_help
from maxbatch.command_line.signals import INTERRUPTED, EndingSignals, Interrupted
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

if TYPE_CHECKING:
  from _typeshed import ReadableBuffer


class EnduringStreams:
  """A context in which printing raises nothing when a pipe, a disk or a terminal fails.

  What cannot be written is dropped: a reader that goes away must not take hours of training with
  it. Streams that something else has put in the place of the process's own stay as they are.
  """

  def __enter__(self) -> Self:
    self._before = sys.stdout, sys.stderr
    self._output = None
    if sys.stdout is sys.__stdout__:
      self._output = _Descriptor(_number_of(sys.stdout))
      sys.stdout = _text(self._output, sys.stdout)
    if sys.stderr is sys.__stderr__:
      sys.stderr = _text(_Descriptor(_number_of(sys.stderr)), sys.stderr)
    return self

  def __exit__(self, *_: object) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout, sys.stderr = self._before

  def failure(self) -> OSError | None:
    """Returns why some of the standard output was dropped until now; None if all was written."""
    sys.stdout.flush()
    return self._output.failure if self._output else None


class _Descriptor(io.FileIO):
  """Where a file descriptor leads now, whatever is put in its place; what cannot go there is dropped."""

  def __init__(self, number: int) -> None:
    super().__init__(os.dup(number), "wb")
    self.failure: OSError | None = None

  def write(self, content: "ReadableBuffer", /) -> int:
    try:
      written = super().write(content)
    except OSError as error:
      self.failure, written = error, None
    return memoryview(content).nbytes if written is None else written


def _text(descriptor: _Descriptor, like: TextIO | None) -> io.TextIOWrapper:
  """Returns a stream with another's settings, in which × and → may become question marks."""
  buffered = io.BufferedWriter(descriptor)
  if not isinstance(like, io.TextIOWrapper):
    return io.TextIOWrapper(buffered, errors="replace")
  return io.TextIOWrapper(
    buffered,
    encoding=like.encoding,
    errors="replace",
    line_buffering=like.line_buffering,
    write_through=like.write_through,
  )


def _number_of(stream: TextIO | None) -> int:
  """Returns the stream's file descriptor; one that drops everything if the stream was closed."""
  if stream is not None:
    return stream.fileno()
  # The numbers 0 to 2 are taken first: else the next file to be opened, perhaps metrics.jsonl, would
  # get that of standard error, and with it what XLA writes there.
  number = 0
  while number <= 2:
    number = os.open(os.devnull, os.O_RDWR)
  return number


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
    print(f"{kind}: cannot write to standard output ({failure.strerror})", file=sys.stderr)
    return EXIT_USER_ERROR if only_prints else 0


def _exit_code(
  command: Command[Own], arguments: Sequence[str], work: Callable[[Arguments[Own]], object]
) -> int:
  command.before_threads(arguments)
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
  except (TrainingDivergedError, RowsError) as error:
    print(f"stopped: {error}", file=sys.stderr)
    return EXIT_ROWS if isinstance(error, RowsError) else EXIT_DIVERGED
  except ProcessFailedError as error:
    return error.exit_code
  except Interrupted as interrupted:
    print(INTERRUPTED, file=sys.stderr)
    return interrupted.exit_code
  return 0
