"""The smallest setting that keeps up with the step, by arithmetic alone.

A loading host must read the samples that it loads per step as often as there are steps, times a
margin: reading is slower while others use the same disk or cores, and a buffer that is empty once
never fills if reading is only just as fast as the step.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from maxbatch.batch.host_loads import (
  check_loads,
  host_loads,
  planned_redistribution,
  with_load_factor,
)
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.input_analysis.measure import Measured, Setting

_MOST_LOADS = 1000
"""Ahead. A single load that took longer than so many steps says nothing about the others."""


@dataclasses.dataclass(frozen=True)
class Loading:
  """So many hosts read for all."""

  num_hosts: int
  factor: Fraction
  """`expansion_factor_real_data`."""
  samples_per_step: int
  """Samples of the host that reads most."""
  samples_per_load: int
  """Likewise, of one load."""
  num_rounds: int
  """Exchanges between hosts before each step."""


@dataclasses.dataclass(frozen=True)
class Bounds:
  """What a recommendation has to keep to."""

  margin: float
  """Times what the step consumes."""
  step_seconds: float
  row_bytes: int
  """Bytes of one sample in memory."""
  load_bytes: float
  """That a host may have in loads at once."""


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """What to set, and whether it suffices."""

  setting: Setting
  loading: Loading
  samples_per_second: float
  needed_per_second: float
  """That the busiest loading host must read, without the margin."""
  keeps_up: bool
  """With the margin."""

  @property
  def ratio(self) -> float:
    """Speed of reading as a multiple of the step's."""
    return self.samples_per_second / self.needed_per_second


def loading_options(plan: BatchPlan, num_hosts: int, *, streamed: bool) -> list[Loading]:
  """Returns half of the hosts, a quarter and so on: the numbers of loading hosts, from one to all.

  Only that of the configuration where it names the hosts.
  """
  if plan.loading_hosts:
    return [_loading(plan, num_hosts)]
  powers = (2**power for power in range(num_hosts.bit_length()))
  factors = dict.fromkeys([*(factor for factor in powers if factor < num_hosts), num_hosts])
  plans = [with_load_factor(plan, Fraction(factor)) for factor in factors]
  options = [_loading(one, num_hosts) for one in plans if _can_load(one, streamed=streamed)]
  return options[::-1]


def _can_load(plan: BatchPlan, *, streamed: bool) -> bool:
  try:
    check_loads(plan, streamed=streamed)
  except UserError:
    return False
  return True


def _loading(plan: BatchPlan, num_hosts: int) -> Loading:
  loads = host_loads(plan, num_hosts)
  most, factor = max(load.samples for load in loads), plan.expansion_factor_real_data
  return Loading(
    num_hosts=sum(load.num_hosts for load in loads if load.samples),
    factor=factor,
    samples_per_step=most,
    samples_per_load=math.ceil(most * factor),
    num_rounds=len(planned_redistribution(plan, num_hosts).rounds),
  )


def recommend(
  measured: Sequence[Measured], options: Sequence[Loading], bounds: Bounds
) -> Recommendation:
  """Recommends the smallest setting that keeps up, and with it the fewest loading hosts.

  If none keeps up: the fastest, with all hosts loading.
  """
  for one in sorted(measured, key=lambda one: one.setting):
    for loading in options:
      result = _recommendation(one, loading, bounds)
      size = host_bytes(result.setting, loading, bounds.row_bytes)
      if result.keeps_up and size <= bounds.load_bytes:
        return result
  fastest = max(measured, key=lambda one: one.samples_per_second)
  return _recommendation(fastest, options[-1], bounds)


def _recommendation(one: Measured, loading: Loading, bounds: Bounds) -> Recommendation:
  needed = loading.samples_per_step / bounds.step_seconds
  keeps_up = one.samples_per_second >= bounds.margin * needed
  return Recommendation(
    # Where reading is slower than the step, a buffer is empty however long it is.
    setting=_buffered(one, loading, bounds) if keeps_up else one.setting,
    loading=loading,
    samples_per_second=one.samples_per_second,
    needed_per_second=needed,
    keeps_up=keeps_up,
  )


def _buffered(one: Measured, loading: Loading, bounds: Bounds) -> Setting:
  """Returns the setting with loads ahead for as long as the slowest took, and one more.

  Each thread has a load under way.
  """
  # A load that is larger than those that were measured is slow once, not in each of its parts.
  more = max(loading.samples_per_load - one.samples_per_load, 0) / one.samples_per_second
  slowest = one.slowest_seconds + more
  ahead = math.ceil(slowest / (bounds.step_seconds * float(loading.factor))) + 1
  per_worker = math.ceil(ahead / max(one.setting.worker_count, 1))
  size = min(max(per_worker, one.setting.num_threads), _MOST_LOADS)
  return dataclasses.replace(one.setting, buffer_size=size)


def host_bytes(setting: Setting, loading: Loading, row_bytes: int) -> int:
  """Returns the bytes of the loads that a host has at once."""
  return setting.num_loads_ahead * loading.samples_per_load * row_bytes


@dataclasses.dataclass(frozen=True)
class Slurm:
  """The values of a job script."""

  nodes: int
  tasks_per_node: int
  cpus_per_task: int

  def lines(self) -> Iterator[str]:
    yield f"#SBATCH --nodes={self.nodes}"
    yield f"#SBATCH --ntasks-per-node={self.tasks_per_node}"
    yield f"#SBATCH --cpus-per-task={self.cpus_per_task}"


def slurm(setting: Setting, num_hosts: int, tasks_per_node: int) -> Slurm:
  """Returns a task for each of the run's processes, with a core for each thread or worker that is
  busy. Raises UserError: the processes do not divide over nodes."""
  if num_hosts % tasks_per_node:
    near = max(count for count in range(1, tasks_per_node) if num_hosts % count == 0)
    raise UserError(
      f"tasks_per_node={tasks_per_node} must divide the {num_hosts} processes of the run; for example "
      f"tasks_per_node={near}"
    )
  return Slurm(num_hosts // tasks_per_node, tasks_per_node, setting.cpus)
