"""The advised configuration as a file, which any command takes as config=advice.yml."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

HEAD = "# Advice of maxbatch: "
_HERE_ONLY = ("config", "compile_topology", "compile_topology_num_slices")
"""Keys of the question that say where, not what: a run finds its devices itself."""
_WHY = {
  "steps": "The budget: whole microbatches of the tokens that were asked for.",
  "schedule_unit": "Steps of a ramp differ in size: intervals and schedules count samples.",
  "batch_size": "The batch, at the end of a ramp, and how it is divided.",
  "batch_schedule": "The ramp: [from sample, samples of a step].",
  "learning_rate": "The optimizer at this batch.",
}


def configuration(
  advised: Mapping[str, object],
  asked: Mapping[str, object],
  base: str,
  command: Sequence[str],
) -> str:
  """The file: what was asked for by hand, then what is advised, each group with its reason.

  Args:
    advised: keys and values.
    asked: keys that were set by hand, with their values.
    base: the configuration that they change, a name or a file.
    command: all that was asked, for the first line.
  """
  lines = [HEAD + " ".join(" ".join(command).split()), f"base_config: {_base(base)}"]
  own = [key for key in asked if key not in _HERE_ONLY and key not in advised]
  lines += ["# As asked."] if own else []
  lines += [f"{key}: {_value(asked[key])}" for key in own]
  for key, value in advised.items():
    if key in _WHY:
      lines.append(f"# {_WHY[key]}")
    lines.append(f"{key}: {_value(value)}")
  return "\n".join(lines) + "\n"


def _base(name: str) -> str:
  """A shipped file by its name, any other by its whole path: the advice may lie elsewhere."""
  path = Path(name).expanduser()
  return _value(str(path.absolute()) if path.is_file() else name)


def _value(value: object) -> str:
  """In one line; text is quoted where it could be read as something else."""
  dumped = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
  return dumped.removesuffix("\n").removesuffix("\n...")
