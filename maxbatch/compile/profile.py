"""What a trace of steps says: the longest operations, and the time of each part of the model.

The trace names operations as the compiled program does, whose text says to which part of the model
each belongs. Loops and branches are left out: their time is that of the operations inside.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from maxbatch.estimate import hlo
from maxbatch.estimate.costs import program_costs
from maxbatch.estimate.scopes import OTHER

_NUM_LARGEST = 20
_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_OPERATION = re.compile(r"%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Operation:
  """One operation of the program, in all traced steps."""

  name: str
  scope: str
  count: float
  """Executions in a step of one device."""
  seconds: float
  """Seconds of these."""


@dataclasses.dataclass(frozen=True)
class StepProfile:
  """Where the time of a traced step went, on the devices of this process."""

  num_steps: int
  num_devices: int
  operations: Sequence[Operation]
  """The longest first."""

  def by_scope(self) -> dict[str, float]:
    """Returns seconds of a step by part of the model, the longest first."""
    results = collections.defaultdict[str, float](float)
    for one in self.operations:
      results[one.scope] += one.seconds
    return dict(_descending(results))

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values."""
    return {
      "steps": self.num_steps,
      "devices": self.num_devices,
      "seconds_by_scope": self.by_scope(),
      "largest": [dataclasses.asdict(one) for one in self.operations[:_NUM_LARGEST]],
    }


def step_profile(folder: Path, text: str, num_steps: int) -> StepProfile | None:
  """Reads the latest trace in a folder; None if it has no operation of the program.

  Args:
    folder: where jax's profiler has written.
  """
  scopes = {one.name: one.scope or OTHER for one in program_costs(hlo.parse(text))}
  module = _MODULE.match(text)
  seconds, counts = collections.defaultdict[str, float](float), collections.Counter[str]()
  devices = set[object]()
  for name, duration, device in _events(folder, module[1] if module else ""):
    if name in scopes:
      seconds[name] += duration
      counts[name] += 1
      devices.add(device)
  if not devices:
    return None
  each = num_steps * len(devices)
  operations = [
    Operation(name, scopes[name], counts[name] / each, total / each)
    for name, total in _descending(seconds)
  ]
  return StepProfile(num_steps, len(devices), operations)


def _descending(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
  return sorted(seconds.items(), key=lambda pair: -pair[1])


def _events(folder: Path, module: str) -> Iterator[tuple[str, float, object]]:
  """Yields name, seconds and device of every operation executed in a program of this name."""
  files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
  if not files:
    return
  for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
    is_device = plane.name.startswith("/device:")
    for line in plane.lines:
      if is_device and "Ops" not in line.name:
        continue
      for event in line.events:
        stats = dict(event.stats)
        name = _OPERATION.match(str(stats.get("hlo_op", event.name if is_device else "")))
        if name and str(stats.get("hlo_module", module)).startswith(module):
          device = stats.get("device_ordinal", plane.name)
          yield name[1], event.duration_ns / 1e9, device
