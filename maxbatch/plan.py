"""python -m maxbatch.plan config=… [key=value …]: what a run would do, on any devices, at once."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from maxbatch.batch.host_loads import host_loads
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.plan import plan_batches
from maxbatch.batch.plan_plot import plot
from maxbatch.batch.solve import given_sizes, solve_num_devices
from maxbatch.batch.topology import Topology, topology
from maxbatch.command_line.help import help_text, wants_help
from maxbatch.command_line.signals import end_with_reader
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.errors import EXIT_USER_ERROR, UserError
from maxbatch.hardware.tpu_slices import slice_named
from maxbatch.modes.plan_report import PlanReport
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.unused_keys import check_unused
from maxbatch.plots.figure import check_picture_file, render
from maxbatch.tuning.candidates import is_open, offered, sizes_of

COMMAND = "python -m maxbatch.plan"
HELP = f"""\
Usage: {COMMAND} config=FILE [key=value ...] [--json] [--plot FILE]

Prints every batch size, who loads what, every phase of the batch schedule, and what limits it,
without touching a device. The devices are num_simulated_devices unless you name others:
  compile_topology=v5e-256       a TPU slice by name: v4-…, v5p-…, v5e-…, v6e-…
  compile_topology_num_slices=2  as many of them
  num_devices=100000             any number; -1: derived from batch_size and micro_batch_size
  num_hosts=12500                the hosts these devices belong to
  --json                         the same as JSON
  --plot FILE                    draws batch and learning rate over the samples, as FILE.svg,
                                 FILE.png or FILE.pdf
"""
_OWN_KEYS = ("num_devices", "num_hosts")
_SIZE_KEYS = ("batch_size", "global_batch_to_train", "tokens_per_step", "per_device_batch_size")
_SIZE_KEYS += ("micro_batch_size", "gradient_accumulation_steps", "batch_schedule")


@dataclasses.dataclass(frozen=True)
class Request:
  """The command line, taken apart."""

  config: Config
  own: dict[str, str]
  as_json: bool
  plot_file: str | None


@dataclasses.dataclass(frozen=True)
class Devices:
  """How many devices, in how many slices, on how many hosts."""

  num_devices: int
  num_slices: int
  num_hosts: int


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  if wants_help(arguments):
    print(HELP)
    print(help_text(COMMAND).partition("\n\n")[2])
    return 0
  try:
    request = read_request(arguments)
    report = make_report(request.config, find_devices(request.config, request.own))
    if request.plot_file is not None:
      _write_plot(report, request.plot_file, request.config.run.run_name)
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USER_ERROR
  print(json.dumps(report.as_dict(), indent=2) if request.as_json else report)
  return 0


def read_request(arguments: Sequence[str]) -> Request:
  """Separates what belongs to this command from the configuration.

  Raises:
    UserError: an option lacks its file, or the configuration has a mistake.
  """
  own: dict[str, str] = {}
  rest, as_json, plot_file = [], False, None
  remaining = iter(arguments)
  for argument in remaining:
    key, equals, value = argument.partition("=")
    if argument == "--json":
      as_json = True
    elif key == "--plot":
      plot_file = value if equals else next(remaining, "")
    elif key in _OWN_KEYS:
      own[key] = value
    else:
      rest.append(argument)
  if plot_file is not None:
    check_picture_file("--plot", plot_file, "batch")
  return Request(load_config(rest), own, as_json, plot_file)


def find_devices(config: Config, own: dict[str, str]) -> Devices:
  """The devices that are asked for.

  Raises:
    UserError: the keys contradict each other or are no whole numbers.
  """
  name, slices = config.compile.compile_topology, config.compile.compile_topology_num_slices
  if name:
    if "num_devices" in own:
      raise UserError(
        f"compile_topology={name} already says how many devices there are; "
        f"leave out num_devices={own['num_devices']}"
      )
    named = slice_named(name).times(slices)
    return Devices(named.num_devices, slices, _positive(own, "num_hosts", named.num_hosts))
  if own.get("num_devices") == "-1":
    count = solve_num_devices(given_sizes(config.batch))
  else:
    count = _positive(own, "num_devices", config.mesh.num_simulated_devices)
  if count == 0:
    raise UserError(
      "num_simulated_devices=0 means the devices that are there, and a plan looks at none; for "
      "example num_devices=8 or compile_topology=v5e-8"
    )
  return Devices(count, slices, _positive(own, "num_hosts", 1))


def make_report(config: Config, devices: Devices) -> PlanReport:
  """Plans the run on these devices.

  Raises:
    UserError: something in the configuration does not work.
  """
  layout = topology(config.mesh, devices.num_devices, devices.num_slices)
  plan = plan_batches(config.batch, config.run, layout)
  check_unused(config.pipeline)
  has_pipeline = config.pipeline.pipeline_schedule != "none"
  flat, unset = to_flat_dict(config), (-1, [])
  return PlanReport(
    plan=plan,
    rate=learning_rate(config.optimizer, plan, config.run.schedule_unit),
    loads=host_loads(plan, devices.num_hosts),
    given=[f"{key}={flat[key]}" for key in _SIZE_KEYS if flat[key] not in unset],
    choice=_choice(config, layout),
    pipeline=pipeline_of(config, layout, plan) if has_pipeline else None,
  )


def _choice(config: Config, layout: Topology) -> str:
  """What a run would choose its microbatch from; empty if there is nothing to choose.

  Raises:
    UserError: other keys leave no choice.
  """
  if not is_open(config.batch):
    return ""
  return offered(config.batch, sizes_of(config, layout))


def _positive(own: dict[str, str], key: str, default: int) -> int:
  text = own.get(key, str(default))
  if not text.replace("_", "").isdecimal() or (key in own and int(text) < 1):
    raise UserError(f"{key}={text} must be a whole number, at least 1; for example {key}=8")
  return int(text)


def _write_plot(report: PlanReport, file: str, run_name: str) -> None:
  path = pathlib.Path(file)
  try:
    path.write_bytes(render(plot(report.plan, report.rate, run_name), path.suffix))
  except OSError as error:
    raise UserError(f"--plot {file}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
  end_with_reader()
  sys.exit(main(sys.argv[1:]))
