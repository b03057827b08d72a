"""The advised configuration as a file, which any command takes as config=advice.yml."""

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


def configuration(advised: Mapping[str, object], arguments: Sequence[str], command: str) -> str:
  """The file: what was asked for by hand, then what is advised, each group with its reason.

  Args:
    advised: keys and values.
    arguments: key=value, of the question's configuration.
    command: all that was asked, for the first line.
  """
  given = dict(argument.split("=", 1) for argument in arguments)
  lines = [HEAD + command, f"base_config: {_base(given['config'])}"]
  own = [key for key in given if key not in _HERE_ONLY and key not in advised]
  if own:
    lines += ["# As asked."]
  lines += [f"{key}: {given[key] or _quoted(given[key])}" for key in own]
  for key, value in advised.items():
    if key in _WHY:
      lines.append(f"# {_WHY[key]}")
    lines.append(f"{key}: {_value(value)}")
  return "\n".join(lines) + "\n"


def _base(name: str) -> str:
  """A shipped file by its name, any other by its whole path: the advice may lie elsewhere."""
  path = Path(name).expanduser()
  return _quoted(str(path.absolute())) if path.is_file() else _quoted(name)


def _value(value: object) -> str:
  return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
  return yaml.safe_dump(text, default_style='"', width=10_000).strip()
