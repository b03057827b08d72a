"""python -m maxbatch.advise config=… model_name=… total_tokens=…: which batch, and what follows."""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Annotated

from maxbatch.advice.advice import Advice, Planned, advise, as_dict, layout, timed
from maxbatch.advice.asked import Asked, Wishes, ask
from maxbatch.advice.explain import explained
from maxbatch.advice.measured import measured_by
from maxbatch.advice.place import place_named
from maxbatch.advice.report import report
from maxbatch.advice.written import configuration
from maxbatch.batch.plan import plan_batches
from maxbatch.batch.topology import Topology
from maxbatch.command_line.arguments import Arguments, Command, File, Flag, Key
from maxbatch.command_line.output_file import check_output, write_output
from maxbatch.command_line.run import run_command
from maxbatch.command_line.signals import leave
from maxbatch.config.allowed import (
  CountOrZeroOrUnset,
  DevicesOrNone,
  FileName,
  NonNegativeFloat,
  Range,
)
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.hardware.counted_devices import count_devices

_OPTIONS = ("json", "explain", "write")
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
    NonNegativeFloat, Key("in any currency", "price_per_chip_hour=1.2")
  ] = 0.0
  from_run: Annotated[
    str,
    FileName(),
    Key("a run whose noise scale and critical batch count", "from_run=runs/small"),
  ] = ""
  final_loss: Annotated[
    NonNegativeFloat, Key("nats per token at the end, for the rules that ask", "final_loss=2.1")
  ] = 0.0
  rate_found_at: Annotated[
    CountOrZeroOrUnset,
    Key("the batch in tokens for which learning_rate was found", "rate_found_at=524288"),
  ] = 0
  ramp: Annotated[bool, Key("let the batch grow; false: constant", "ramp=false")] = True
  num_devices: Annotated[
    DevicesOrNone, Key("without a slice: devices that divide the batch", "num_devices=64")
  ] = 0
  json: Annotated[bool, Flag("the same as JSON")] = False
  explain: Annotated[bool, Flag("every rule: formula, units, range, source, caveat")] = False
  write: Annotated[str, File("the configuration; advice.yml if not given", "my_advice.yml")] = ""


COMMAND = Command(
  "advise",
  """\
Which batch for this model, these tokens and this slice: the published rules with their ranges, what
they say together, the ramp, learning rate and weight decay, the microbatch and mesh that fit and are
fastest, steps, days and cost, on half and twice the chips too. Nothing is compiled, no device is
touched. Writes advice.yml, which python -m maxbatch.train config=advice.yml takes.
""",
  AdviseArguments,
  "config=FILE total_tokens=NUMBER [compile_topology=SLICE]",
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _advise)


def _advise(arguments: Arguments[AdviseArguments]) -> None:
  own = arguments.own
  file = own.write or "advice.yml"
  check_output("--write", file)
  keys = [_whole(argument) for argument in arguments.configuration]
  advice, planned = _answer(keys, own)
  text = configuration(advice.keys, keys, _command(arguments))
  write_output("--write", file, text.encode())
  if own.json:
    print(json.dumps(as_dict(advice, planned), indent=2))
    return
  print(report(advice, planned))
  if own.explain:
    print(f"\n{explained(advice.asked.training)}")
  print(f"\n{_next_steps(advice.asked, file, explain=own.explain)}")


def _answer(keys: Sequence[str], own: AdviseArguments) -> tuple[Advice, Planned]:
  """The advice, and the plan that the advised configuration makes as any run does."""
  config = load_config(keys)
  place = place_named(config.compile.compile_topology, config.compile.compile_topology_num_slices)
  wishes = Wishes(
    data_overhead=own.data_overhead,
    deadline_days=own.deadline_days,
    price_per_chip_hour=own.price_per_chip_hour,
    final_loss=own.final_loss,
    rate_found_at=max(own.rate_found_at, 0),
    ramp=own.ramp,
  )
  asked = ask(config, wishes, place, _mesh(config, own.num_devices), _given(config, keys))
  advice = advise(asked, measured_by(own.from_run, asked.tokens))
  advised = load_config([*keys, *map(_argument, advice.keys.items())])
  return advice, timed(advice, plan_batches(advised.batch, advised.run, layout(advice)))


def _whole(argument: str) -> str:
  """total_tokens=140e9 as the whole number that it means."""
  found = _WITH_EXPONENT.fullmatch(argument)
  return f"{found[1]}={float(found[2]):.0f}" if found else argument


def _mesh(config: Config, num_devices: int) -> Topology:
  """Of the configuration, for where no slice divides the batch."""
  return count_devices(config, num_devices).layout


def _given(config: Config, keys: Sequence[str]) -> frozenset[str]:
  """Keys on the command line, and those that a file gives another value than base.yml."""
  named = {argument.partition("=")[0] for argument in keys}
  default, now = to_flat_dict(load_config(["config=base"])), to_flat_dict(config)
  return frozenset(named | {key for key, value in now.items() if value != default[key]})


def _argument(item: tuple[str, object]) -> str:
  return f"{item[0]}={item[1]}"


def _command(arguments: Arguments[AdviseArguments]) -> str:
  """For the first line of the file."""
  given, default = dataclasses.asdict(arguments.own), dataclasses.asdict(AdviseArguments())
  asked = [key for key in given if key not in _OPTIONS and given[key] != default[key]]
  return " ".join([*arguments.configuration, *(f"{key}={given[key]}" for key in asked)])


def _next_steps(asked: Asked, file: str, *, explain: bool) -> str:
  place = f" {' '.join(map(_argument, asked.place.keys.items()))}" if asked.place else ""
  lines = [
    f"Written to {file}. Next:",
    f"  python -m maxbatch.plan config={file}{place}",
    f"  python -m maxbatch.train config={file}",
  ]
  if asked.place:
    lines[2:2] = [f"  python -m maxbatch.train config={file} compile_only=true \\", f"   {place}"]
  if not explain:
    lines.append("--explain says where every rule is from, and what speaks against it.")
  return "\n".join(lines)


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
