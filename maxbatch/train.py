"""maxbatch train config=… [key=value …]: trains a language model."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

from maxbatch.batch.from_config import check_supervised
from maxbatch.command_line.arguments import Arguments, Command, Flag
from maxbatch.command_line.run import run_command
from maxbatch.config.load import load_config
from maxbatch.hardware.processes import leave_together, refusing_together
from maxbatch.modes.compile_only import prepare_only
from maxbatch.modes.method import Purpose
from maxbatch.modes.prepare import purpose_of
from maxbatch.modes.run import check_learned, run


@dataclasses.dataclass(frozen=True)
class TrainArguments:
  """Beside the configuration's keys."""

  retune: Annotated[
    bool,
    Flag(
      "choose micro_batch_size=auto and num_pipeline_microbatches=-1 anew instead of taking what "
      "is remembered",
      old_name="--forget",
    ),
  ] = False


COMMAND = Command("train", "", TrainArguments, leaves_files=True)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _run_or_prepare)


def _run_or_prepare(arguments: Arguments[TrainArguments]) -> None:
  with refusing_together(arguments.configuration):
    config = load_config(arguments.configuration)
    check_supervised(config.rl)
    if purpose_of(config, arguments.configuration) is Purpose.RUN:
      check_learned(*run(config, retune=arguments.own.retune))
    else:
      prepare_only(config, retune=arguments.own.retune)


if __name__ == "__main__":
  leave_together(main(sys.argv[1:]))
