"""What a run's Python work costs at 4,096 hosts and 102,400 devices, without having them.

    python scripts/scale.py

Everything is measured that grows with hosts, devices, phases or steps, at two sizes: seconds, the
peak of Python's memory, and how much more calls of Python the larger size takes. What the devices
do, and what jax does for them, is not in it.
"""

import dataclasses
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.host_loads import host_loads, load_factor, planned_redistribution
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.row_plan import StepTable, dispatches
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.mixture import SampleStream
from maxbatch.hardware import agreement
from maxbatch.hardware.topologies import count_devices
from maxbatch.plan import make_report
from maxbatch.run_folder.metrics import MetricsLog


@dataclasses.dataclass(frozen=True)
class Size:
  """How large a run is."""

  hosts: int
  steps: int
  phases: int
  records: int
  """Steps in metrics.jsonl."""
  devices_per_host: int = 25

  @property
  def devices(self) -> int:
    """Of all hosts."""
    return self.hosts * self.devices_per_host


SMALL = Size(hosts=64, steps=100_000, phases=10, records=1_000)
LARGE = Size(hosts=4096, steps=100_000_000, phases=1_000, records=100_000)


def config_of(size: Size, *more: str) -> Config:
  """A run with one sample on each device and 4 microbatches, on that many devices."""
  keys = ["per_device_batch_size=1", "gradient_accumulation_steps=4", f"steps={size.steps}"]
  return load_config(["config=base", *keys, *more])


def plan_of(size: Size, *more: str) -> BatchPlan:
  """The plan of that run."""
  config = config_of(size, *more)
  return plan_batches(config.batch, config.run, topology(config.mesh, size.devices))


def ramp_of(size: Size) -> BatchPlan:
  """The same with a batch that grows by a microbatch in each of its phases."""
  points = [[10 * n, (n + 1) * size.devices] for n in range(size.phases)]
  return plan_of(
    size,
    f"batch_schedule={json.dumps(points)}",
    "batch_schedule_unit=steps",
    "batch_size=-1",
    "gradient_accumulation_steps=-1",
  )


Work = Callable[[Size], Callable[[], object]]
"""Prepares a piece of work for a size, and returns it."""


def _plan(size: Size) -> Callable[[], object]:
  config, layout = config_of(size), topology(config_of(size).mesh, size.devices)
  return lambda: plan_batches(config.batch, config.run, layout)


def _ramp(size: Size) -> Callable[[], object]:
  return lambda: str(ramp_of(size))


def _report(size: Size) -> Callable[[], object]:
  config = config_of(size)
  devices = count_devices(config, size.devices, size.hosts)
  return lambda: json.dumps(make_report(config, devices).as_dict())


def _pipeline(size: Size) -> Callable[[], object]:
  stages = min(64, size.hosts // 16)
  config = config_of(
    size,
    f"ici_pipeline_parallelism={stages}",
    "pipeline_schedule=1f1b",
    f"base_num_decoder_layers={stages}",
    f"num_pipeline_microbatches={stages}",
    f"per_device_batch_size={stages}",
  )
  devices = count_devices(config, size.devices, size.hosts)
  return lambda: str(make_report(config, devices))


def _loads(size: Size) -> Callable[[], object]:
  plan = plan_of(size, "expansion_factor_real_data=4")
  return lambda: host_loads(plan, size.hosts)


def _hand_over(size: Size) -> Callable[[], object]:
  """Devices in fours share their rows."""
  plan = plan_of(size, "expansion_factor_real_data=4", "ici_tensor_parallelism=4")
  return lambda: planned_redistribution(plan, size.hosts).slots


def _row_table(size: Size) -> Callable[[], object]:
  plan = ramp_of(size)
  factor = load_factor(plan, streamed=False)

  def table() -> object:
    (segment,) = dispatches(plan, Position(0, 0), streamed=False)
    steps = StepTable(segment.steps, segment.micro_batch)
    return len(steps.load_bounds(factor))

  return table


def _last_step(size: Size) -> Callable[[], object]:
  """The rows of one host, at the end of the run, and their places in the shuffled stream."""
  plan = ramp_of(size)
  (segment,) = dispatches(plan, Position(0, 0), streamed=False)
  table = StepTable(segment.steps, segment.micro_batch)
  stream, columns = SampleStream(2**32 - 1, 0), np.arange(size.devices_per_host)
  return lambda: stream(table.samples(len(table) - 1, columns)[: size.devices_per_host])


def _rate(size: Size) -> Callable[[], object]:
  config, plan = config_of(size), ramp_of(size)
  rate, last = learning_rate(config.optimizer, plan, "steps"), plan.steps - 1
  return lambda: (rate(Position(last, plan.samples_at(last))), plan.starting_at(plan.end()))


def _agreement(size: Size) -> Callable[[], object]:
  """What each process does when one of all has another key."""
  values = dict(to_flat_dict(config_of(size))) | {f"file {n}": "0123456789ab" for n in range(300)}

  def gathered(value: Any) -> list[Any]:
    texts = [json.dumps(value)] * (size.hosts - 1)
    other = "another" if isinstance(value, str) else ["host", ["steps=1 instead of 2"]]
    return [*map(json.loads, texts), other]

  patches = {"gather": gathered, "broadcast_one_to_all": lambda value: value}
  patches["shared_error"] = agreement.UserError

  def check() -> object:
    with mock.patch.multiple(agreement, **patches):
      try:
        agreement.check_alike(values)
      except agreement.UserError as error:
        return str(error)
    return ""

  return check


def _records(size: Size) -> Callable[[], object]:
  """What a start reads of the steps before: all, up to where the run goes on."""
  folder = Path(tempfile.mkdtemp())
  record = {"samples": 1, "tokens": 1, "loss": 2.345678, "grad_norm": 1.2345678, "seconds": 0.12345}
  lines = (json.dumps({"step": step} | record) + "\n" for step in range(size.records))
  (folder / "metrics.jsonl").write_text("".join(lines))

  def read() -> object:
    with MetricsLog(folder, size.records) as log:
      return log.last_step

  return read


WORKS: dict[str, Work] = {
  "plan_batches: every size": _plan,
  "a ramp of all phases, printed": _ramp,
  "`maxbatch plan --json`": _report,
  "the same with a pipeline": _pipeline,
  "host_loads, a quarter of the hosts reading": _loads,
  "who sends which rows to whom": _hand_over,
  "row plan of the whole run": _row_table,
  "a host's rows of the last step": _last_step,
  "rate and plan at the last step": _rate,
  "naming the host with another key": _agreement,
  "metrics.jsonl when a run resumes": _records,
}


def calls(work: Callable[[], object]) -> int:
  """How many functions of Python and C the work calls: what it costs on any machine."""
  count = 0

  def note(frame: FrameType, event: str, argument: object) -> None:
    nonlocal count
    del frame, argument
    count += event in ("call", "c_call")

  sys.setprofile(note)
  try:
    work()
  finally:
    sys.setprofile(None)
  return count


def _seconds(work: Callable[[], object]) -> float:
  times = []
  for _ in range(3):
    began = time.perf_counter()
    work()
    times.append(time.perf_counter() - began)
  return min(times)


def _peak_bytes(work: Callable[[], object]) -> int:
  tracemalloc.start()
  try:
    work()
    return tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


def main() -> None:
  """Prints the table."""
  print("| work | small, s | large, s | large, MB | calls, large / small |")
  print("|---|---|---|---|---|")
  for name, work in WORKS.items():
    small, large = work(SMALL), work(LARGE)
    seconds, megabytes = (_seconds(small), _seconds(large)), _peak_bytes(large) / 1e6
    growth = calls(large) / calls(small)
    print(
      f"| {name} | {seconds[0]:.2g} | {seconds[1]:.2g} | {megabytes:.2g} | {growth:,.3g} |",
      flush=True,
    )


if __name__ == "__main__":
  main()
