"""maxbatch train config=… [key=value …]: trains a language model."""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, NoReturn

from maxbatch.batch.from_config import check_supervised, given_sizes
from maxbatch.command_line.arguments import Arguments, Command, Flag
from maxbatch.command_line.run import run_command
from maxbatch.command_line.signals import SUPERVISOR
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.heap import share_one_heap
from maxbatch.hardware.messages import await_order
from maxbatch.hardware.processes import leave_together, located, refusing_together
from maxbatch.modes.compile_only import prepare_only
from maxbatch.modes.method import Purpose
from maxbatch.modes.prepare import purpose_of
from maxbatch.modes.run import check_learned, run
from maxbatch.modes.run_log import RunLog


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


COMMAND = Command("train", "", TrainArguments, leaves_files=True, before_threads=share_one_heap)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _run_or_prepare)


def _run_or_prepare(arguments: Arguments[TrainArguments]) -> None:
  with refusing_together(arguments.configuration):
    config = load_config(arguments.configuration)
    check_supervised(config.rl)
    config = supervise(config, arguments.configuration)
    if purpose_of(config, arguments.configuration) is Purpose.RUN:
      check_learned(*run(config, retune=arguments.own.retune))
    else:
      prepare_only(config, retune=arguments.own.retune)


def supervise(config: Config, arguments: Sequence[str]) -> Config:
  """Replaces this process by a supervisor where elastic=true asks for one, and it has none yet.

  Returns: The configuration, where it has one with what the supervisor says, for which it waits.

  Args:
    config: of the run.
    arguments: the keys of the command line.

  Raises:
    UserError: the batch depends on the devices, or the others are not found.
  """
  if not config.distributed.elastic:
    return config
  check_keeps_batch(config)
  if config.compile.validate_only or config.compile.compile_only:
    return config
  if SUPERVISOR not in os.environ:
    _become_supervisor(config, arguments)
  keys = await_order()
  RunLog.ended = time.time()  # Until now it has only waited.
  return load_config([*arguments, *keys])


def check_keeps_batch(config: Config) -> None:
  """Checks, for a run that goes on with fewer devices, that its batch does not depend on how many.

  Raises:
    UserError: it does, or the run saves nothing.
  """
  if not config.checkpoint.enable_checkpointing:
    raise UserError(
      "elastic=true enable_checkpointing=false: when all copies in memory are lost, a run goes on from "
      "its last checkpoint; enable_checkpointing=true"
    )
  if config.batch.enable_rampup_batch_size:
    raise UserError(
      "elastic=true enable_rampup_batch_size=true: that ramp-up counts samples per device, so other "
      "devices would mean another batch; for example batch_schedule_type=linear with batch_size, "
      "batch_size_start and batch_schedule_length"
    )
  if given_sizes(config.batch).batch is None and not config.batch.batch_schedule:
    raise UserError(
      "elastic=true needs batch_size, which stays when there are fewer devices; per_device_batch_size "
      "alone would mean another batch then. For example batch_size=256"
    )


def _become_supervisor(config: Config, arguments: Sequence[str]) -> NoReturn:
  """Replaces this process by a supervisor (hardware/supervisor.py), which starts it again and again.

  Raises:
    UserError: neither keys and variables nor the cluster say where the other supervisors are, or this process
      is not this command's.
  """
  if not set(arguments) <= set(sys.orig_argv):
    raise UserError(
      "elastic=true needs a process of its own, which is started again: run `maxbatch train`, or set "
      "elastic=false to train in this process"
    )
  stated = located(config)
  if stated.several and (
    stated.address is None or None in (stated.num_processes, stated.process_id)
  ):
    raise UserError(
      f"elastic=true {stated.sign}: supervisors find each other by coordinator_address=HOST:PORT, "
      "num_processes=… and process_id=…; give those that no variable gives, for example "
      "coordinator_address=$(hostname):1234 on all hosts, of the first one"
    )
  place = {
    "coordinator_address": stated.address or "",
    "num_processes": stated.num_processes or 1,
    "process_id": stated.process_id or 0,
  }
  # As it was started, with options of Python before the module.
  own = [one for one in sys.orig_argv[1:] if one.partition("=")[0] not in place]
  command = [*own, *(f"{key}={value}" for key, value in place.items())]
  sys.stdout.flush()
  os.execv(sys.executable, [sys.executable, "-m", "maxbatch.hardware.supervisor", *command])


if __name__ == "__main__":
  leave_together(main(sys.argv[1:]))
