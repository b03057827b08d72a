"""What a person is told when a run cannot go on, and the exit code that goes with it."""


class UserError(Exception):
  """A mistake in the configuration or the input; the command prints it and exits with 2.

  The message names the keys, their values, the rule, and a value that works.
  """


class TrainingDivergedError(Exception):
  """The loss or a gradient is no longer finite; the command prints it and exits with 3."""


EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
