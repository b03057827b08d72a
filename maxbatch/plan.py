"""maxbatch plan config=… [key=value …]: what a run would do, on any devices, at once."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated

from maxbatch.advice.goodput import ExpectedGoodput, Times, expected, times_of
from maxbatch.batch.from_config import is_rl, plan_batches, sparse_experts
from maxbatch.batch.host_loads import check_loads, host_loads
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.plan_plot import plan_chart
from maxbatch.batch.rl_plan import RLPlan, in_samples, plan_rl
from maxbatch.command_line.arguments import Arguments, Command, File, Flag, Key
from maxbatch.command_line.output_file import write_output
from maxbatch.command_line.run import run_command
from maxbatch.command_line.screen import for_screen, note
from maxbatch.command_line.signals import leave
from maxbatch.config.declare import DevicesOrUnset, FileName, Hosts, Range
from maxbatch.config.find import shown
from maxbatch.config.keys.batch import Explore
from maxbatch.config.load import load_config, to_flat_dict, without_effect
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.topologies import CountedDevices, count_devices
from maxbatch.modes.plan_report import PlanReport
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.plots.page import check_picture_file, picture
from maxbatch.rl.candidates import rl_sizes_of, with_settled_pipeline
from maxbatch.tuning.candidates import (
  Candidate,
  asked,
  default_batch_note,
  is_open,
  listed,
  offer_of_auto,
  offered,
  sizes_of,
  with_default_batch,
)
from maxbatch.tuning.eval_candidates import asked_to_evaluate, eval_sizes_of, is_eval_open

_Seconds = Annotated[float, Range(low=0, high=1e7, also=-1, offers_also=False)]
_SIZE_KEYS = ("batch_size", "global_batch_to_train", "tokens_per_step", "per_device_batch_size")
_SIZE_KEYS += ("micro_batch_size", "gradient_accumulation_steps", "batch_schedule")
_SIZE_KEYS += ("num_generations",)


@dataclasses.dataclass(frozen=True)
class PlanArguments:
  """Beside the configuration's keys; 0: not given."""

  num_devices: Annotated[
    DevicesOrUnset,
    Key("any number; -1: derived from batch_size and micro_batch_size", "num_devices=100000"),
  ] = 0
  num_hosts: Annotated[Hosts, Key("the hosts these devices belong to", "num_hosts=12500")] = 0
  mtbf: Annotated[
    float,
    Range(low=1e-6, high=1e9, also=0),
    Key("hours between failures of one host: the goodput to expect, and when to save", "mtbf=6000"),
  ] = 0.0
  from_run: Annotated[
    str,
    FileName(),
    Key("a run whose saves, restarts and steps count for it", "from_run=runs/small"),
  ] = ""
  step_seconds: Annotated[_Seconds, Key("of a step, instead of the run's", "step_seconds=4")] = -1.0
  save_seconds: Annotated[
    _Seconds, Key("for which training waits while it saves", "save_seconds=20")
  ] = -1.0
  restart_seconds: Annotated[
    _Seconds, Key("from a failure to the first step, without compiling", "restart_seconds=300")
  ] = -1.0
  compile_seconds: Annotated[
    _Seconds, Key("in every restart; 0: the cache has it", "compile_seconds=0")
  ] = -1.0
  copy_seconds: Annotated[
    _Seconds, Key("to copy the state to another host's memory", "copy_seconds=0.5")
  ] = -1.0
  copy_restart_seconds: Annotated[
    _Seconds, Key("to the first step from such a copy, with compiling", "copy_restart_seconds=60")
  ] = -1.0
  json: Annotated[bool, Flag("the same as JSON")] = False
  plot: Annotated[
    str, File("draws batch and learning rate over the samples, as a page", "batch.html")
  ] = ""


COMMAND = Command(
  "plan",
  """\
Prints every batch size, who loads what, every phase of the batch schedule, and what limits it,
without touching a device. The devices are num_simulated_devices, or a TPU slice by its name
(compile_topology=v5e-256; compile_topology_num_slices=2 for several), or a number:
""",
  PlanArguments,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _plan)


def _plan(arguments: Arguments[PlanArguments]) -> None:
  own, config = arguments.own, load_config(arguments.configuration)
  note(without_effect(config))
  if own.plot:
    check_picture_file("--plot", own.plot, "batch")
  report = make_report(config, count_devices(config, own.num_devices, own.num_hosts))
  goodput = _goodput(own, config, report)
  offer = offer_of_auto(config, arguments.configuration)
  report = dataclasses.replace(report, offer=offer, goodput=goodput)
  if own.plot:
    chart = plan_chart(report.plan, report.rate)
    write_output("--plot", own.plot, picture(config.run.run_name, [chart]))
  print(json.dumps(report.as_dict(), indent=2) if own.json else for_screen(str(report)))


def _goodput(own: PlanArguments, config: Config, report: PlanReport) -> ExpectedGoodput | None:
  """Returns the goodput to expect with failures; None unless asked for.

  Raises:
    UserError: the times are not known, or given for nothing.
  """
  given = {field.name: getattr(own, field.name) for field in dataclasses.fields(Times)}
  named = [f"{name}={seconds:g}" for name, seconds in given.items() if seconds >= 0]
  named += [f"from_run={shown(own.from_run)}"] if own.from_run else []
  if not own.mtbf:
    if named:
      raise UserError(
        f"{named[0]} says what failures cost, and counts with mtbf; for example mtbf=6000"
      )
    return None
  checkpoint = config.checkpoint
  in_steps = checkpoint.enable_checkpointing and config.run.schedule_unit == "steps"
  period = checkpoint.checkpoint_period if in_steps else 0
  hosts = sum(load.num_hosts for load in report.loads)
  return expected(
    own.mtbf, times_of(given, own.from_run), max(period, 0) or None, [hosts] if hosts else []
  )


def make_report(config: Config, devices: CountedDevices) -> PlanReport:
  """Plans the run on these devices.

  Raises:
    UserError: something in the configuration does not work.
  """
  rl = plan_rl(config, devices.layout) if is_rl(config.rl) else None
  plan = (
    rl.batch_plan
    if rl
    else plan_batches(config.batch, config.run, devices.layout, config.optimizer)
  )
  check_loads(plan, streamed=config.batch.accumulation == "streamed")
  sizes = _sizes(config, devices.layout)
  flat, unset = to_flat_dict(config), (-1, [])
  return PlanReport(
    plan=plan,
    rate=learning_rate(config.optimizer, plan, config.run.schedule_unit),
    loads=[] if rl else host_loads(plan, devices.num_hosts),
    assumption=devices.assumption,
    given=[_given(config, key) for key in _SIZE_KEYS if flat[key] not in unset],
    choice="; ".join(
      filter(None, (_choice(config, sizes, devices.layout), _eval_choice(config, devices.layout)))
    ),
    sizes=sizes if isinstance(config.batch.micro_batch_size, Explore) else (),
    rl=rl,
    pipeline=_pipeline(config, devices.layout, plan, rl),
    sparse_experts=[] if rl else sparse_experts(config.model, plan),
  )


def _pipeline(
  config: Config, layout: Topology, plan: BatchPlan, rl: RLPlan | None
) -> Pipeline | None:
  """Returns the pipeline; of reinforcement learning what a run takes, which times nothing."""
  if config.pipeline.pipeline_schedule == "none":
    return None
  settled = with_settled_pipeline(in_samples(config, rl), rl)[0] if rl else config
  return pipeline_of(settled, layout, plan)


def _given(config: Config, key: str) -> str:
  if key == "micro_batch_size" and is_open(config.batch):
    return asked(config.batch)
  return f"{key}={to_flat_dict(config)[key]}"


def _sizes(config: Config, layout: Topology) -> Sequence[Candidate]:
  """Returns what a run would choose its microbatch from; nothing if there is nothing to choose.

  Raises:
    UserError: other keys leave no choice.
  """
  if not is_open(config.batch):
    return ()
  if is_rl(config.rl):
    return rl_sizes_of(config, layout)
  return sizes_of(with_default_batch(config, layout), layout)


def _choice(config: Config, sizes: Sequence[Candidate], layout: Topology) -> str:
  """Returns the same in words."""
  if not sizes:
    return ""
  divided = config if is_rl(config.rl) else with_default_batch(config, layout)
  line = offered(divided.batch, sizes)
  if divided == config:
    return line
  return f"{line}; {default_batch_note(divided.batch.batch_size, layout)}"


def _eval_choice(config: Config, layout: Topology) -> str:
  """Returns what the evaluation batch is chosen from, in words."""
  if is_rl(config.rl) or not is_eval_open(config.batch):
    return ""
  return listed(asked_to_evaluate(config.batch), eval_sizes_of(config, layout))


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
