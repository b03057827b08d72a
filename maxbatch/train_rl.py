"""maxbatch train_rl config=… [key=value …]: trains a language model by reinforcement."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

from maxbatch.command_line.arguments import Arguments, Command, Flag
from maxbatch.command_line.run import run_command
from maxbatch.config.load import load_config
from maxbatch.hardware.heap import share_one_heap
from maxbatch.hardware.processes import leave_together, refusing_together
from maxbatch.modes.compile_only import prepare_only
from maxbatch.modes.method import Purpose
from maxbatch.modes.prepare import purpose_of
from maxbatch.modes.run import check_learned
from maxbatch.rl.method import GRPO
from maxbatch.rl.run import run_rl, sum_up_rl
from maxbatch.run_folder.paths import RunFolder
from maxbatch.train import supervise


@dataclasses.dataclass(frozen=True)
class TrainRLArguments:
  """Beside the configuration's keys."""

  retune: Annotated[
    bool,
    Flag(
      "choose micro_batch_size=auto again instead of using the remembered choices",
      old_name="--forget",
    ),
  ] = False


COMMAND = Command(
  "train_rl",
  """\
Samples completions of prompts, rewards them, and trains the policy on them by GRPO: first, where
warm_start_steps says so, on demonstrations of a built-in task. The same command continues a run
that was stopped.
""",
  TrainRLArguments,
  leaves_files=True,
  before_threads=share_one_heap,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _run)


def _run(arguments: Arguments[TrainRLArguments]) -> None:
  with refusing_together(arguments.configuration):
    config = supervise(load_config(arguments.configuration), arguments.configuration)
    if purpose_of(config, arguments.configuration) is not Purpose.RUN:
      prepare_only(config, retune=arguments.own.retune, method=GRPO)
      return
    check_learned(*run_rl(config, retune=arguments.own.retune))
    sum_up_rl(RunFolder.of(config.run))


if __name__ == "__main__":
  leave_together(main(sys.argv[1:]))
