"""python -m maxbatch.train config=… [key=value …]: trains a language model."""

import sys
from collections.abc import Sequence

from maxbatch.command_line.exit import exit_code
from maxbatch.command_line.help import help_text, wants_help
from maxbatch.command_line.signals import leave
from maxbatch.config.load import load_config
from maxbatch.modes.compile_only import is_run, prepare_only
from maxbatch.modes.run import run

COMMAND = "python -m maxbatch.train"
_FORGET = "--forget"
_OPTIONS = {
  _FORGET: "choose micro_batch_size=auto and num_pipeline_microbatches=-1 anew instead of taking what "
  "is remembered"
}


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  if wants_help(arguments):
    print(help_text(COMMAND, _OPTIONS))
    return 0
  return exit_code(lambda: _run_or_prepare(arguments))


def _run_or_prepare(arguments: Sequence[str]) -> None:
  forget = _FORGET in arguments
  config = load_config([argument for argument in arguments if argument != _FORGET])
  if is_run(config):
    run(config, forget=forget)
  else:
    prepare_only(config, forget=forget)


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
