"""python -m maxbatch.pipeline config=… [key=value …]: the timetable of a pipeline, at once."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from maxbatch.batch.plan import plan_batches
from maxbatch.batch.topology import topology
from maxbatch.command_line.help import help_text, wants_help
from maxbatch.command_line.signals import end_with_reader
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.errors import EXIT_USER_ERROR, UserError
from maxbatch.pipeline_parallel.chrome_trace import chrome_trace
from maxbatch.pipeline_parallel.csv_file import from_csv, to_csv
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.plot import plot
from maxbatch.pipeline_parallel.report import NOT_MEASURED, PipelineReport, comparison
from maxbatch.pipeline_parallel.schedule import SCHEDULES, schedule_named, timetable
from maxbatch.pipeline_parallel.simulator import run
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.slots import with_slots
from maxbatch.pipeline_parallel.timetable import Timetable
from maxbatch.plan import find_devices
from maxbatch.plots.figure import check_picture_file, render
from maxbatch.training.residual_bytes import residual_bytes

COMMAND = "python -m maxbatch.pipeline"
HELP = f"""\
Usage: {COMMAND} config=FILE [key=value ...] [--csv FILE] [--svg FILE] [--trace FILE] [--check FILE]

Prints which stage computes which microbatch when, how much of the time is idle, what every stage
keeps, and the same for the other schedules, without touching a device. What pipeline_stash=residuals
keeps is found by tracing the model, which takes seconds.
The devices are num_simulated_devices, or those of compile_topology, or num_devices=64.
  --csv FILE    writes the timetable, a row for each tick and stage
  --check FILE  reads such a file instead of the schedule, and names its first fault
  --svg FILE    draws it, as FILE.svg, FILE.png or FILE.pdf
  --trace FILE  writes it for chrome://tracing and ui.perfetto.dev
"""
_OPTIONS = ("--csv", "--svg", "--trace", "--check")


@dataclasses.dataclass(frozen=True)
class Request:
  """The command line, taken apart: the configuration, num_devices, and files by option."""

  config: Config
  own: dict[str, str]
  files: dict[str, str]


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  if wants_help(arguments):
    print(HELP)
    print(help_text(COMMAND).partition("\n\n")[2])
    return 0
  try:
    request = read_request(arguments)
    if request.config.pipeline.pipeline_schedule == "none":
      print(_overview(request))
      return 0
    report = make_report(request)
    _write_files(report, request.files)
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USER_ERROR
  print(report)
  return 0


def read_request(arguments: Sequence[str]) -> Request:
  """Separates what belongs to this command from the configuration.

  Raises:
    UserError: an option lacks its file, or the configuration has a mistake.
  """
  files: dict[str, str] = {}
  own: dict[str, str] = {}
  rest = []
  remaining = iter(arguments)
  for argument in remaining:
    key, equals, value = argument.partition("=")
    if key in _OPTIONS:
      file = value if equals else next(remaining, "")
      if not file or (not equals and "=" in file):
        raise UserError(f"{key} {file}: name a file; for example {key} {_example(key)}")
      if key == "--svg":
        check_picture_file(key, file, "pipeline")
      files[key] = file
    elif key == "num_devices":
      own[key] = value
    else:
      rest.append(argument)
  return Request(load_config(rest), own, files)


def make_report(request: Request) -> PipelineReport:
  """Plans the batch and the pipeline, and makes or reads the timetable.

  Raises:
    UserError: something does not divide, or the timetable that was read has a fault.
  """
  config = request.config
  devices = find_devices(config, request.own)
  layout = topology(config.mesh, devices.num_devices, devices.num_slices)
  plan = plan_batches(config.batch, config.run, layout)
  pipeline = pipeline_of(config, layout, plan)
  file = request.files.get("--check")
  table = _checked(file, pipeline) if file else timetable(pipeline.schedule, pipeline.shape)
  source = f"{pipeline.schedule}, as {file} has it" if file else pipeline.schedule
  kept = None
  if pipeline.stash == "residuals":
    # Only where it is asked for: it imports jax, and the rest of the command does without.
    kept = residual_bytes(config, plan, pipeline)
  return PipelineReport(config, plan, pipeline, table, run(table), source, kept)


def _overview(request: Request) -> str:
  """What each schedule would do, where none is chosen."""
  if request.files:
    option = next(iter(request.files))
    raise UserError(
      f"{option} needs a schedule, but pipeline_schedule=none; for example pipeline_schedule=1f1b "
      f"(known: {', '.join(SCHEDULES)})"
    )
  config = request.config
  devices = find_devices(config, request.own)
  layout = topology(config.mesh, devices.num_devices, devices.num_slices)
  plan = plan_batches(config.batch, config.run, layout)
  example = "pipeline_schedule=none has no timetable; for example pipeline_schedule=1f1b shows one."
  return "\n\n".join([comparison(config, plan), example, NOT_MEASURED])


def _checked(file: str, pipeline: Pipeline) -> Timetable:
  """The timetable in a file, held to the rules and to what its schedule may keep."""
  try:
    text = Path(file).read_text(encoding="utf-8")
  except OSError as error:
    raise UserError(f"--check {file}: cannot be read: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise UserError(f"--check {file}: not a text file in UTF-8 (byte {error.start})") from error
  table = from_csv(text, pipeline.shape, file)
  outcome = run(table, schedule_named(pipeline.schedule).limits(pipeline.shape))
  if outcome.fault:
    raise UserError(f"{file}: {outcome.fault}")
  return table if table.has_slots else with_slots(table)


def _write_files(report: PipelineReport, files: dict[str, str]) -> None:
  title = report.source
  writers = {
    "--csv": lambda _: to_csv(report.table).encode(),
    "--svg": lambda file: render(plot(report.table, title), file.suffix),
    "--trace": lambda _: chrome_trace(report.table, title).encode(),
  }
  for option, write in writers.items():
    if option not in files:
      continue
    file = Path(files[option])
    try:
      file.write_bytes(write(file))
    except OSError as error:
      raise UserError(f"{option} {files[option]}: cannot be written: {error.strerror}") from error


def _example(option: str) -> str:
  return {"--svg": "pipeline.svg", "--trace": "pipeline.json"}.get(option, "pipeline.csv")


if __name__ == "__main__":
  end_with_reader()
  sys.exit(main(sys.argv[1:]))
