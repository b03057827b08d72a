"""python -m maxbatch.train_rl config=… [key=value …]: trains a language model by reinforcement."""

import dataclasses
import sys
from collections.abc import Sequence

from maxbatch.command_line.arguments import Arguments, Command
from maxbatch.command_line.run import run_command
from maxbatch.config.load import load_config
from maxbatch.hardware.processes import leave_together, refusing_together
from maxbatch.modes.run_rl import run_rl, sum_up_rl
from maxbatch.run_folder.paths import RunFolder


@dataclasses.dataclass(frozen=True)
class TrainRLArguments:
  """There are only the configuration's keys."""


COMMAND = Command(
  "train_rl",
  """\
Samples completions of prompts, rewards them, and trains the policy on them by GRPO: first, where
warm_start_steps says so, on demonstrations of a built-in task. The same command goes on with a run
that was stopped.
""",
  TrainRLArguments,
  leaves_files=True,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _run)


def _run(arguments: Arguments[TrainRLArguments]) -> None:
  with refusing_together(arguments.configuration):
    config = load_config(arguments.configuration)
    run_rl(config)
    sum_up_rl(config.run.run_name, RunFolder.of(config.run))


if __name__ == "__main__":
  leave_together(main(sys.argv[1:]))
