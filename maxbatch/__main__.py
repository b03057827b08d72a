"""maxbatch COMMAND …: all commands under one name; python -m maxbatch.COMMAND is the same."""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from maxbatch.command_line.run import EnduringStreams
from maxbatch.config.find import did_you_mean
from maxbatch.errors import EXIT_USER_ERROR

COMMANDS = {
  "train": "trains a language model; or only validates or compiles its step",
  "train_rl": "trains by reinforcement learning (GRPO)",
  "plan": "prints every batch size of a run, on any number of devices, at once",
  "advise": "says which batch, ramp, learning rate and mesh for a model, tokens and a slice",
  "sample": "writes texts with a checkpoint",
  "convert": "makes a run of a Hugging Face model, or such a model of a run",
  "report": "writes a page about a run, or several over each other",
  "runs": "lists the runs in a folder, their progress, and how to continue them",
  "pipeline": "draws, checks and costs a pipeline schedule",
  "critical_batch": "measures up to which batch training loses nothing",
  "input_analyzer": "measures whether the data keep up with the step, and what to set",
  "keys": "finds configuration keys by a word of their name or meaning",
}
"""In the order of --help, each with what it does."""
_HELP = ("--help", "-h", "help")


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the commands, or becomes `python -m maxbatch.COMMAND`; returns the exit code of the former.

  The process is replaced, and imports nothing of the command before: signals, the working directory as
  a place of modules, and the command that a run records are those of `python -m`.
  """
  if "_ARGCOMPLETE" in os.environ:
    _become("command_line.completion", list(COMMANDS))
  name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
  if name == "help" and rest:
    name, rest = rest[0], ["--help", *rest[1:]]
  with EnduringStreams():
    if name in _HELP or not name:
      print(_help_text())
      return 0 if name else EXIT_USER_ERROR
    if name == "--version":
      print(f"maxbatch {_version()}")
      return 0
    if name not in COMMANDS:
      print(f"error: {_unknown(name)}", file=sys.stderr)
      return EXIT_USER_ERROR
  _become(name, rest)


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
  os.execv(sys.executable, [sys.executable, "-m", f"maxbatch.{module}", *arguments])


def _help_text() -> str:
  width = max(map(len, COMMANDS)) + 2
  lines = [f"  {name.ljust(width)}{about}" for name, about in COMMANDS.items()]
  usage = ["Usage: maxbatch COMMAND [argument ...]", "", *lines]
  return "\n".join([*usage, "", "maxbatch COMMAND --help explains one."])


def _version() -> str:
  try:
    return importlib.metadata.version("maxbatch")
  except importlib.metadata.PackageNotFoundError:
    return "(its version is known once it is installed)"


def _unknown(name: str) -> str:
  if "=" in name:
    return f"{name} is a key, and a command comes first; for example maxbatch train {name}"
  return (
    f"there is no command {name!r}.{did_you_mean(name, COMMANDS)} Commands: {', '.join(COMMANDS)}"
  )


if __name__ == "__main__":
  sys.exit(main())
