"""Errors that end a run with a message instead of a traceback, and their exit codes."""

from collections.abc import Sequence


class UserError(ValueError):
  """A mistake in the configuration, the input or an argument. A command prints it and exits with 2.

  The message names the keys, their values, the rule, and a value that works.
  """


class SaidByAnotherError(UserError):
  """One that all processes have in common: process 0 prints it, the others end in silence."""


class TrainingDivergedError(Exception):
  """The loss or a gradient is not finite. The command prints it and exits with code 3."""


class RowsError(Exception):
  """A row did not reach its device as it was read. The command prints it and exits with code 5."""


class ProcessFailedError(Exception):
  """Another process of the run has failed or is gone; what is to be said about it has been said.

  All processes exit with `exit_code`: 4, or what ended the first one.
  """

  def __init__(self, message: str, exit_code: int):
    super().__init__(message)
    self.exit_code = exit_code


EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
EXIT_PROCESS_FAILED = 4
EXIT_ROWS = 5


def first_of(names: Sequence[str], most: int) -> str:
  """Returns the first few names for a message, and how many more there are."""
  shown, more = ", ".join(names[:most]), len(names) - most
  return f"{shown} and {more:,} more" if more > 0 else shown
