"""maxbatch input_analyzer config=… [key=value …]: does my data keep up with the step?"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import jax

from maxbatch.batch.from_config import check_supervised, plan_batches
from maxbatch.batch.host_loads import check_loads, host_loads, loading_hosts
from maxbatch.command_line.arguments import Arguments, Command, File, Flag, Key
from maxbatch.command_line.output_file import write_output
from maxbatch.command_line.run import run_command
from maxbatch.command_line.screen import note
from maxbatch.command_line.signals import leave
from maxbatch.compile import cache
from maxbatch.config.declare import DevicesOrUnset, FileName, Hosts, Positive, Range
from maxbatch.config.load import load_config, without_effect
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import shared_error
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.hardware.sharding import make_mesh, num_processes
from maxbatch.hardware.topologies import count_devices
from maxbatch.input_analysis.analyze import Request, analyze
from maxbatch.input_analysis.measure import Setting
from maxbatch.input_analysis.need import Need, estimated, from_metrics, from_report, measured
from maxbatch.input_analysis.recommend import slurm
from maxbatch.input_analysis.report import InputAnalysis, input_charts
from maxbatch.modes.pretraining import resolve_micro_batch_size
from maxbatch.plots.page import check_picture_file, picture
from maxbatch.training.build import streams


@dataclasses.dataclass(frozen=True)
class AnalyzerArguments:
  """Beside the configuration's keys; 0 and empty: not given."""

  run_metrics: Annotated[
    str,
    FileName(),
    Key("what the step consumes, from a run's folder or metrics.jsonl", "run_metrics=runs/mine"),
  ] = ""
  compile_report: Annotated[
    str,
    FileName(),
    Key("the same from a compile report", "compile_report=runs/mine/compile_report.json"),
  ] = ""
  num_devices: Annotated[
    DevicesOrUnset,
    Key(
      "of the run, with run_metrics or compile_report, where they are not here", "num_devices=64"
    ),
  ] = 0
  num_hosts: Annotated[Hosts, Key("processes of the run; 0: as the devices say", "num_hosts=8")] = 0
  tasks_per_node: Annotated[
    Positive, Key("processes of the run on one node", "tasks_per_node=8")
  ] = 1
  margin: Annotated[
    float,
    Range(low=1, high=100),
    Key("times what the step consumes that reading must reach", "margin=1.5"),
  ] = 1.5
  seconds: Annotated[
    float,
    Range(low=1, high=86_400),
    Key("for all of it; half of them are left where compiling takes longer", "seconds=60"),
  ] = 60.0
  json: Annotated[bool, Flag("the same as JSON")] = False
  plot: Annotated[str, File("draws it, as a page", "input.html", before="--svg")] = ""


COMMAND = Command(
  "input_analyzer",
  """\
Measures how many samples per second the data of this configuration give, stage by stage and with
other numbers of workers, threads and loads ahead, beside what the step consumes: measured here, or
estimated for compile_topology, or from a run's metrics or a compile report. Prints the smallest
setting that keeps up with a margin, as lines for the configuration and for SLURM.
""",
  AnalyzerArguments,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _analyze)


def _analyze(arguments: Arguments[AnalyzerArguments]) -> None:
  own, config = arguments.own, load_config(arguments.configuration)
  check_supervised(config.rl)
  note(without_effect(config))
  if own.plot:
    check_picture_file("--plot", own.plot, "input")
  began = time.perf_counter()
  request, need = _prepare(config, own)
  # Compiling the step may have taken all of it.
  seconds = max(own.seconds - (time.perf_counter() - began), own.seconds / 2)
  analysis = analyze(request, need, seconds)
  _check(arguments.configuration, analysis, request)
  print(json.dumps(analysis.as_dict(), indent=2) if own.json else analysis)
  if own.plot:
    drawn = picture(f"Input of {analysis.run_name}", input_charts(analysis))
    write_output("--plot", own.plot, drawn)


def _prepare(config: Config, own: AnalyzerArguments) -> tuple[Request, Need]:
  """Returns the run's devices and hosts, here or not, and what its step consumes.

  Raises:
    UserError: keys that exclude each other, or sizes that do not work.
  """
  if own.run_metrics and own.compile_report:
    raise UserError(
      f"run_metrics={own.run_metrics} and compile_report={own.compile_report}: one of them says what "
      "the step consumes; leave out the other"
    )
  is_known = bool(own.run_metrics or own.compile_report)
  if own.num_devices and not is_known:
    raise UserError(
      f"num_devices={own.num_devices} names devices that this machine does not have, so no step can be timed; "
      "give run_metrics or compile_report too, or compile_topology instead, for example "
      "compile_topology=v5e-256"
    )
  if is_known:
    devices = count_devices(config, own.num_devices, own.num_hosts)
    plan = _planned(
      config, plan_batches(config.batch, config.run, devices.layout, config.optimizer)
    )
    given = own.run_metrics
    need = from_metrics(given, plan) if given else from_report(own.compile_report, plan)
    return _request(config, plan, devices.num_hosts, own, None), need
  target = find_devices(config)
  _check_alone()
  cache.enable(config.compile.jax_cache_dir)
  config, plan = resolve_micro_batch_size(config, target)
  plan = _planned(config, plan)
  num_hosts = own.num_hosts or num_processes(make_mesh(target.layout, target.devices))
  if config.compile.compile_topology:
    return _request(config, plan, num_hosts, own, None), estimated(config, target)
  request = _request(config, plan, num_hosts, own, target)
  return request, measured(config, plan, target, min(4.0, own.seconds / 8))


def _request(
  config: Config, plan: BatchPlan, num_hosts: int, own: AnalyzerArguments, target: Target | None
) -> Request:
  """Returns the request. Raises UserError for hosts that devices or nodes do not divide over."""
  slurm(Setting(), num_hosts, own.tasks_per_node)
  host_loads(plan, num_hosts)
  return Request(config, plan, num_hosts, own.tasks_per_node, own.margin, target)


def _planned(config: Config, plan: BatchPlan) -> BatchPlan:
  """Plans, and checks the loads. Raises UserError if one is no whole number of samples."""
  check_loads(plan, streamed=streams(config))
  return plan


def _check_alone() -> None:
  if jax.process_count() > 1:
    raise shared_error(
      f"input_analyzer measures one process, and {jax.process_count()} have joined; start it once, "
      f"on one host, for example with num_hosts={jax.process_count()}"
    )


def _check(given: Sequence[str], analysis: InputAnalysis, request: Request) -> None:
  """Applies what is recommended, as a run would. Raises UserError if it does not work."""
  keys = [f"{name}={value}" for name, value in analysis.keys.items()]
  config = load_config([*given, *keys])
  plan = plan_batches(config.batch, config.run, request.plan.topology, config.optimizer)
  check_loads(plan, streamed=streams(config))
  assert len(loading_hosts(plan, request.num_hosts)) in (0, analysis.found.loading.num_hosts)


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
