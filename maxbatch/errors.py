"""Errors that end a run with a message instead of a traceback, and their exit codes."""


class UserError(Exception):
  """A mistake in the configuration or the input. The command prints it and exits with code 2.

  The message names the keys, their values, the rule, and a value that works.
  """


class TrainingDivergedError(Exception):
  """The loss or a gradient is not finite. The command prints it and exits with code 3."""


class RowsError(Exception):
  """A row did not reach its device as it was read. The command prints it and exits with code 5."""


EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
EXIT_ROWS = 5
