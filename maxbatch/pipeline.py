"""maxbatch pipeline config=… [key=value …]: the timetable of a pipeline, at once."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from maxbatch.batch.from_config import check_supervised, plan_batches
from maxbatch.command_line.arguments import Arguments, Command, File, Key
from maxbatch.command_line.output_file import check_output, write_output
from maxbatch.command_line.run import run_command
from maxbatch.command_line.screen import note
from maxbatch.command_line.signals import leave
from maxbatch.config.declare import DevicesOrUnset
from maxbatch.config.load import load_config, without_effect
from maxbatch.config.schema import Config, replaced
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.hardware.topologies import count_devices
from maxbatch.pipeline_parallel.csv_file import from_csv, to_csv
from maxbatch.pipeline_parallel.drawings import chrome_trace, timetable_chart
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.report import NOT_MEASURED, PipelineReport, comparison
from maxbatch.pipeline_parallel.schedule import (
  SCHEDULES,
  Timetable,
  assign_slots,
  schedule_named,
  timetable,
)
from maxbatch.pipeline_parallel.simulator import run
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.plots.page import check_picture_file, picture
from maxbatch.training.residual_bytes import residual_bytes

_NO_TIMETABLE = (
  "pipeline_schedule=none has no timetable; for example pipeline_schedule=1f1b shows one."
)


@dataclasses.dataclass(frozen=True)
class PipelineArguments:
  """Beside the configuration's keys; num_devices 0: not given."""

  num_devices: Annotated[
    DevicesOrUnset,
    Key("any number; -1: derived from batch_size and micro_batch_size", "num_devices=64"),
  ] = 0
  csv: Annotated[
    str, File("writes the timetable, a row for each tick and stage", "pipeline.csv")
  ] = ""
  check: Annotated[
    str,
    File("reads such a file instead of the schedule, and names its first fault", "pipeline.csv"),
  ] = ""
  plot: Annotated[str, File("draws it, as a page", "pipeline.html", before="--svg")] = ""
  trace: Annotated[
    str, File("writes it for chrome://tracing and ui.perfetto.dev", "pipeline.json")
  ] = ""


COMMAND = Command(
  "pipeline",
  """\
Prints which stage computes which microbatch when, how much of the time is idle, what every stage
keeps, and the same for the other schedules, without touching a device. What
pipeline_saved_activations=residuals keeps is found by tracing the model, which takes seconds.
The devices are num_simulated_devices, or those of compile_topology, or a number:
""",
  PipelineArguments,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _show)


def _show(arguments: Arguments[PipelineArguments]) -> None:
  own, config = arguments.own, load_config(arguments.configuration)
  check_supervised(config.rl)
  # Without a schedule all are compared, as the section's keys say.
  note(without_effect(replaced(config, {"pipeline_schedule": "gpipe"})))
  if own.plot:
    check_picture_file("--plot", own.plot, "pipeline")
  layout = count_devices(config, own.num_devices).layout
  plan = plan_batches(config.batch, config.run, layout, config.optimizer)
  if config.pipeline.pipeline_schedule == "none":
    _refuse_files(own)
    print(comparison(config, plan), _NO_TIMETABLE, NOT_MEASURED, sep="\n\n")
    return
  pipeline = pipeline_of(config, layout, plan)
  report = make_report(config, plan, pipeline, own.check)
  _write_files(report, own)
  print(report)


def make_report(config: Config, plan: BatchPlan, pipeline: Pipeline, file: str) -> PipelineReport:
  """Makes the timetable, or reads it from `file`, and measures it.

  Raises:
    UserError: the timetable that was read has a fault, or the model does not come in parts.
  """
  table = _checked(file, pipeline) if file else timetable(pipeline.schedule, pipeline.shape)
  source = f"{pipeline.schedule}, as {file} has it" if file else pipeline.schedule
  # Only where it is asked for: tracing the model takes seconds.
  kept = residual_bytes(config, plan, pipeline) if pipeline.stash == "residuals" else None
  return PipelineReport(config, plan, pipeline, table, run(table), source, kept)


def _refuse_files(own: PipelineArguments) -> None:
  """Refuses to read or write a file where there is no timetable."""
  given = {"--csv": own.csv, "--check": own.check, "--plot": own.plot, "--trace": own.trace}
  for option, file in given.items():
    if file:
      raise UserError(
        f"{option} needs a schedule, but pipeline_schedule=none; for example "
        f"pipeline_schedule=1f1b (known: {', '.join(SCHEDULES)})"
      )


def _checked(file: str, pipeline: Pipeline) -> Timetable:
  """Returns the timetable in a file, held to the rules and to what its schedule may keep."""
  path = Path(file)
  try:
    # A pipe that a shell makes, `--check <(…)`, has a writer.
    if path.is_fifo() and not file.startswith("/dev/"):
      raise UserError(f"--check {file}: this is a pipe, not a file; name a CSV file")
    text = path.read_text(encoding="utf-8")
  except OSError as error:
    raise UserError(f"--check {file}: cannot be read: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise UserError(f"--check {file}: not a text file in UTF-8 (byte {error.start})") from error
  table = from_csv(text, pipeline.shape, file)
  outcome = run(table, schedule_named(pipeline.schedule).limits(pipeline.shape))
  if outcome.fault:
    raise UserError(f"{file}: {outcome.fault}")
  return table if table.has_slots else assign_slots(table)


def _write_files(report: PipelineReport, own: PipelineArguments) -> None:
  table, title = report.table, report.source
  kinds: list[tuple[str, str, Callable[[], bytes]]] = [
    ("--csv", own.csv, lambda: to_csv(table).encode()),
    ("--plot", own.plot, lambda: picture(title, [timetable_chart(table, title)])),
    ("--trace", own.trace, lambda: chrome_trace(table, title).encode()),
  ]
  files = [(option, file, content()) for option, file, content in kinds if file]
  for each in files:
    check_output(*each)
  for each in files:
    write_output(*each)


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
