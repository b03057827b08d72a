"""maxbatch advise config=… model_name=… total_tokens=…: which batch, and what follows.

maxbatch advise RUN: what to change in that run now, and what it saves.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import yaml

from maxbatch.advice.advice import Advice, Planned, advise, as_dict, layout, timed
from maxbatch.advice.asked import MESH_KEYS, Place, Wishes, ask, check_scope, place_named
from maxbatch.advice.batch_size import measured_by
from maxbatch.advice.charts import charts
from maxbatch.advice.compiled import compile_sizes, compiled_summary
from maxbatch.advice.explained import explained
from maxbatch.advice.post_training import advise_post_training
from maxbatch.advice.post_training import report as post_training_report
from maxbatch.advice.prices import prices
from maxbatch.advice.report import report
from maxbatch.advice.run_advice import lines, run_advice
from maxbatch.advice.words import wrapped
from maxbatch.batch.from_config import is_rl, plan_batches
from maxbatch.command_line.arguments import Arguments, Command, File, Flag, Key
from maxbatch.command_line.output_file import check_output, write_output
from maxbatch.command_line.run import run_command
from maxbatch.command_line.signals import leave
from maxbatch.config.declare import (
  CountOrZeroOrUnset,
  DevicesOrNone,
  FileName,
  NonNegative,
  NonNegativeFloat,
  Range,
)
from maxbatch.config.find import shown, user_path
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.topologies import count_devices
from maxbatch.plots.page import check_picture_file, picture
from maxbatch.run_folder.history import is_run, read_history

_HEAD = "# Advice of maxbatch: "
_HERE_ONLY = (
  "config",
  "compile_topology",
  "compile_topology_num_slices",
  "compile_topology_network_gbps",
)
"""Keys of the question that say where, not what: a run finds its devices itself."""
_WHY = {
  "steps": "The budget: the requested tokens, in whole microbatches.",
  "schedule_unit": "Steps of a ramp differ in size: intervals and schedules count samples.",
  "batch_size": "The batch, at the end of a ramp, and how it is divided.",
  "batch_schedule": "The ramp: [from sample, samples of a step].",
  "learning_rate": "The optimizer at this batch.",
}
_OPTIONS = ("json", "explain", "explore", "plot", "write")
_MESH = ("remat_policy", "num_pipeline_microbatches", *MESH_KEYS)
_WITH_EXPONENT = re.compile(r"(total_tokens|total_samples)=(\d+(?:\.\d+)?[eE]\+?\d{1,2})")


@dataclasses.dataclass(frozen=True)
class AdviseArguments:
  """Beside the configuration's keys; 0 and empty: not given."""

  data_overhead: Annotated[
    float,
    Range(low=0.001, high=100),
    Key("x: data may be (1 + x) times what small batches take", "data_overhead=0.2"),
  ] = 0.2
  deadline_days: Annotated[
    NonNegativeFloat, Key("says whether the run ends in time, and what would", "deadline_days=20")
  ] = 0.0
  price_per_chip_hour: Annotated[
    float,
    Range(low=0, high=1e6),
    Key("of compile_topology, in any currency, instead of the table's", "price_per_chip_hour=1.2"),
  ] = 0.0
  prices: Annotated[
    str, FileName(), Key("a table of your own prices, as JSON", "prices=prices.json")
  ] = ""
  compare_with: Annotated[
    str, Key("the same training on other slices or GPUs", "compare_with=h100-128,b200-64")
  ] = ""
  from_run: Annotated[
    str,
    FileName(),
    Key("a run whose noise scale and critical batch count", "from_run=runs/small"),
  ] = ""
  final_loss: Annotated[
    float,
    Range(low=0.1, high=20, also=0),
    Key("nats per token at the end, for the rules that ask", "final_loss=2.1"),
  ] = 0.0
  rate_found_at: Annotated[
    CountOrZeroOrUnset,
    Key("the batch in tokens at which learning_rate was tuned", "rate_found_at=524288"),
  ] = 0
  ramp: Annotated[bool, Key("let the batch grow; false: constant", "ramp=false")] = True
  completions: Annotated[
    NonNegative,
    Key("of reinforcement learning: prompts × completions of a step", "completions=1024"),
  ] = 0
  num_devices: Annotated[
    DevicesOrNone, Key("without a slice: devices that divide the batch", "num_devices=64")
  ] = 0
  json: Annotated[bool, Flag("the same as JSON")] = False
  explain: Annotated[bool, Flag("every rule: formula, units, range, source, caveat")] = False
  explore: Annotated[
    bool, Flag("then compile every microbatch for the slice, which takes minutes")
  ] = False
  plot: Annotated[str, File("draws time against data, and the rules, as a page", "advice.html")] = (
    ""
  )
  write: Annotated[str, File("the configuration; advice.yml if not given", "my_advice.yml")] = ""


COMMAND = Command(
  "advise",
  """\
Which batch for this model, these tokens and this slice or these GPUs: the published rules with their ranges, what
they say together, the ramp, learning rate and weight decay, the microbatch and mesh that fit and are
fastest, steps, days and cost, on half and twice the chips and on others too. Nothing is compiled, no device is
touched. Writes advice.yml, which maxbatch train config=advice.yml takes.

With a run's folder, maxbatch advise RUN: what to change in it now, by its own noise scale, step times,
waits and restarts, in a few lines.
""",
  AdviseArguments,
  "config=FILE total_tokens=NUMBER [compile_topology=SLICE]",
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _advise)


def _advise(arguments: Arguments[AdviseArguments]) -> None:
  own = arguments.own
  if any("=" not in one for one in arguments.configuration):
    _advise_run(arguments)
    return
  file = own.write or "advice.yml"
  check_output("--write", file, _HEAD.encode())
  if own.plot:
    check_picture_file("--plot", own.plot, "advice")
  keys = [_whole(argument) for argument in arguments.configuration]
  config = load_config(keys)
  if is_rl(config.rl):
    _advise_post_training(arguments, config)
    return
  named = [key.partition("=")[0] for key in keys]
  check_scope(config, named)
  _check_options(own)
  if own.completions:
    raise UserError(
      f"completions={own.completions} apply to reinforcement learning, which num_generations turns "
      "on; for example num_generations=8"
    )
  advice, planned = _answer(config, keys, own)
  write_output("--write", file, _written(advice.keys, config, keys, arguments))
  if own.plot:
    write_output("--plot", own.plot, picture(config.model.model_name, charts(advice)))
  if own.json:
    print(json.dumps(as_dict(advice, planned), indent=2))
    return
  print(report(advice, planned))
  if own.explain:
    print(f"\n{explained(advice.asked.training)}")
  if own.explore:
    print(flush=True)
    compiled = compile_sizes(file, advice)
    exact = {**advice.keys, "micro_batch_size": compiled.micro_batch_size}
    write_output("--write", file, _written(exact, config, keys, arguments))
    print(f"\n{compiled_summary(compiled, advice)}")
  print(f"\n{_next_steps(advice, file, named, explain=own.explain)}")


def _advise_run(arguments: Arguments[AdviseArguments]) -> None:
  """Prints what to change in a run that has trained some steps."""
  [*others, given] = sorted(arguments.configuration, key=lambda one: "=" not in one)
  own = dataclasses.replace(arguments.own, json=False)
  if others or own != AdviseArguments():
    raise UserError(
      f"{shown(given)}: advice about a run takes its folder alone, and --json; for example maxbatch "
      "advise runs/first_run"
    )
  if not is_run(user_path(given)):
    raise UserError(
      f"{shown(given)}: that is not a run's folder, and keys are key=value; for example maxbatch advise "
      "runs/first_run"
    )
  findings = run_advice(read_history(user_path(given)))
  if arguments.own.json:
    print(json.dumps([dataclasses.asdict(one) for one in findings], indent=2))
    return
  print("\n".join(lines(findings)))


def _check_options(own: AdviseArguments) -> None:
  if own.json and (own.explain or own.explore):
    raise UserError(
      "--json includes every rule and is printed before anything is compiled; leave out --explain "
      "and --explore"
    )


def _advise_post_training(arguments: Arguments[AdviseArguments], config: Config) -> None:
  own, keys = arguments.own, arguments.configuration
  if own.compare_with or own.prices:
    raise UserError(
      "compare_with and prices apply to supervised training; leave them out, or num_generations=-1"
    )
  if own.explore or own.plot:
    raise UserError(
      "--explore and --plot apply to supervised training; leave them out, or num_generations=-1"
    )
  _check_options(own)
  advice = advise_post_training(config, own.completions, _place(config), own.from_run)
  file = own.write or "advice.yml"
  write_output("--write", file, _written(advice.keys, config, keys, arguments))
  if own.json:
    print(json.dumps(advice.as_dict(), indent=2))
    return
  print(post_training_report(advice))
  if own.explain:
    print(f"\n{explained(None)}")
  print(f"\nWritten to {file}. Next:\n  maxbatch plan config={file}")
  print(f"  maxbatch train_rl config={file}")


def _place(config: Config) -> Place | None:
  keys = config.compile
  network = keys.compile_topology_network_gbps
  return place_named(keys.compile_topology, keys.compile_topology_num_slices, network)


def _answer(config: Config, keys: Sequence[str], own: AdviseArguments) -> tuple[Advice, Planned]:
  """Returns the advice, and the plan that the advised configuration makes as any run does."""
  place = _place(config)
  wishes = Wishes(
    data_overhead=own.data_overhead,
    deadline_days=own.deadline_days,
    price_per_chip_hour=own.price_per_chip_hour,
    final_loss=own.final_loss,
    rate_found_at=max(own.rate_found_at, 0),
    ramp=own.ramp,
  )
  places = [place, *_elsewhere(place, own.compare_with)] if place else []
  if own.compare_with and place is None:
    raise UserError(
      f"compare_with={shown(own.compare_with)} compares with the slice of compile_topology, and none "
      "is given; for example compile_topology=v5p-256"
    )
  mesh, table = _mesh(config, place, own.num_devices), prices(own.prices)
  asked = ask(config, wishes, places, mesh, _given(config, keys), table)
  advice = advise(asked, measured_by(own.from_run, asked.tokens))
  advised = load_config([*keys, *map(_argument, advice.keys.items())])
  plan = plan_batches(advised.batch, advised.run, layout(advice), advised.optimizer)
  return advice, timed(advice, plan)


def _elsewhere(place: Place, names: str) -> list[Place]:
  """Returns the other places, each once.

  Raises:
    UserError: one is no slice, or the one that is asked about.
  """
  results: list[Place] = []
  for name in filter(None, (name.strip() for name in names.split(","))):
    try:
      one = place_named(name, 1)
    except UserError as error:
      raise UserError(str(error).replace("compile_topology=", "compare_with=")) from None
    if one is None or one == place or one in results:
      raise UserError(f"compare_with={shown(names)}: {name} is compared already; name it once")
    results.append(one)
  return results


def _whole(argument: str) -> str:
  """Returns total_tokens=140e9 as the whole number that it means."""
  result = _WITH_EXPONENT.fullmatch(argument)
  return f"{result[1]}={float(result[2]):.0f}" if result else argument


def _mesh(config: Config, place: Place | None, num_devices: int) -> Topology:
  """Returns a mesh that divides the batch: the configuration's where no slice is named, whose
  meshes are all tried."""
  if place is None:
    return count_devices(config, num_devices).layout
  if num_devices:
    raise UserError(
      f"compile_topology={place.name} already says how many devices there are; leave out "
      f"num_devices={num_devices}"
    )
  return Topology({"data": place.devices_per_slice}, {"data": place.slices})


def _given(config: Config, keys: Sequence[str]) -> frozenset[str]:
  """Returns keys on the command line, and those that a file gives another value than base.yml."""
  named = {argument.partition("=")[0] for argument in keys}
  default, now = to_flat_dict(load_config(["config=base"])), to_flat_dict(config)
  return frozenset(named | {key for key, value in now.items() if value != default.get(key)})


def _argument(item: tuple[str, object]) -> str:
  return f"{item[0]}={item[1]}"


def _written(
  advised: Mapping[str, object],
  config: Config,
  keys: Sequence[str],
  arguments: Arguments[AdviseArguments],
) -> bytes:
  """Returns the file, with what was asked for by hand."""
  given, default = dataclasses.asdict(arguments.own), dataclasses.asdict(AdviseArguments())
  own = [f"{key}={given[key]}" for key in given if given[key] != default.get(key)]
  asked = [one for one in own if one.partition("=")[0] not in _OPTIONS]
  named = dict(key.split("=", 1) for key in keys)
  values = to_flat_dict(config)
  by_hand = {key: values[key] for key in named if key in values}
  command = [*arguments.configuration, *asked]
  return configuration(advised, by_hand, named["config"], command).encode(errors="surrogateescape")


def _next_steps(advice: Advice, file: str, named: Collection[str], *, explain: bool) -> str:
  asked = advice.asked
  place = [f"    {' '.join(map(_argument, asked.place.keys.items()))}"] if asked.place else []
  more = " \\" if place else ""
  lines = [f"Written to {file}. Next:", f"  maxbatch plan config={file}{more}", *place]
  if place:
    lines += [f"  maxbatch train config={file} compile_only=true{more}", *place]
  lines.append(f"  maxbatch train config={file}")
  now = to_flat_dict(asked.config)
  replaced = [
    key for key in _MESH if key in named and str(advice.keys.get(key, now[key])) != str(now[key])
  ]
  if replaced:
    lines += wrapped(
      f"Replaced from your request: {' '.join(f'{k}={now[k]}' for k in replaced)}", ""
    )
  if not explain:
    lines.append("--explain prints the source of every rule and what speaks against it.")
  return "\n".join(lines)


def configuration(
  advised: Mapping[str, object],
  asked: Mapping[str, object],
  base: str,
  command: Sequence[str],
) -> str:
  """Returns the file: what was asked for by hand, then what is advised, each group with its reason.

  Args:
    asked: keys that were set by hand, with their values.
    base: the configuration that they change, a name or a file.
    command: all that was asked, for the first line.
  """
  lines = [_HEAD + " ".join(" ".join(command).split()), f"base_config: {_base(base)}"]
  own = [key for key in asked if key not in _HERE_ONLY and key not in advised]
  lines += ["# As requested."] if own else []
  lines += [f"{key}: {_value(asked[key])}" for key in own]
  for key, value in advised.items():
    if key in _WHY:
      lines.append(f"# {_WHY[key]}")
    lines.append(f"{key}: {_value(value)}")
  return "\n".join(lines) + "\n"


def _base(name: str) -> str:
  """Names a shipped file by its name, any other by its whole path: the advice may lie elsewhere."""
  path = user_path(name)
  return _value(str(path.absolute()) if path.is_file() else name)


def _value(value: object) -> str:
  """Writes a value in one line; text is quoted where it could be read as something else."""
  dumped = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
  return dumped.removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
