"""The whole analysis of one configuration, within a budget of time."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator

import numpy as np

from maxbatch.config.schema import Config, DataConfig
from maxbatch.core.plan import BatchPlan
from maxbatch.data.input_report import input_report
from maxbatch.data.placement import RowPlacement
from maxbatch.data.reading import ReadOrder
from maxbatch.hardware.devices import Target
from maxbatch.hardware.memory import machine_bytes
from maxbatch.hardware.sharding import make_mesh, sharding
from maxbatch.input_analysis.measure import measure
from maxbatch.input_analysis.need import Need
from maxbatch.input_analysis.recommend import Bounds, loading_options, recommend, slurm
from maxbatch.input_analysis.report import InputAnalysis
from maxbatch.input_analysis.sample import rows_to_measure
from maxbatch.input_analysis.settings import Measured, Setting, setting_of, settings_to_measure
from maxbatch.input_analysis.stages import Stage, stages, transfer
from maxbatch.training.build import streams

_LOAD_BYTES = 64 * 2**20
"""Of the loads that are measured; a rate needs no larger ones."""
_MEMORY_SHARE = 0.25
"""Of a host's memory that loads may take."""
_MOST_SECONDS = 4.0
"""For one setting."""


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked."""

  config: Config
  plan: BatchPlan
  num_hosts: int
  tasks_per_node: int
  margin: float
  target: Target | None
  """The devices that are here; None: others."""


class _Budget:
  """Seconds for measurements, and the clock that they are measured with."""

  def __init__(self, seconds: float, clock: Callable[[], float]):
    self.clock, self._deadline = clock, clock() + seconds

  @property
  def seconds_left(self) -> float:
    """Until all of them are over."""
    return max(self._deadline - self.clock(), 0.0)


def analyze(
  request: Request,
  need: Need,
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> InputAnalysis:
  """Measures what there is time for, and recommends.

  Args:
    request: what is asked.
    need: what the step consumes.
    seconds: for all measurements together, more than 0.
    clock: in seconds.

  Raises:
    UserError: the data or the keys cannot be used.
  """
  config, plan, budget = request.config, request.plan, _Budget(seconds, clock)
  options = loading_options(plan, request.num_hosts, streamed=streams(config))
  found = input_report(config.data, plan, request.num_hosts)
  began = clock()
  with rows_to_measure(
    config.data, plan.max_target_length, found, budget.seconds_left / 4
  ) as sampled:
    open_seconds = clock() - began
    order = ReadOrder(sampled.rows, config.data.data_shuffle_seed)
    row_bytes = sum(array.nbytes for array in order(_one()).values())
    size = max(1, min(options[-1].samples_per_step, _LOAD_BYTES // row_bytes))
    costs = list(_stages(request, budget, order, size))
    measured, left_out = _settings(config.data, budget, order, size)
  bounds = Bounds(request.margin, need.step_seconds, row_bytes, _MEMORY_SHARE * machine_bytes())
  best = recommend(measured, options, bounds)
  return InputAnalysis(
    run_name=config.run.run_name,
    need=need,
    bounds=bounds,
    num_hosts=request.num_hosts,
    num_cores=os.cpu_count() or 1,
    input_function=found,
    open_seconds=open_seconds,
    stages=tuple(costs),
    measured=tuple(measured),
    left_out=tuple(left_out),
    options=tuple(options),
    found=best,
    slurm=slurm(best.setting, request.num_hosts, request.tasks_per_node),
    notes=tuple(_notes(request, sampled.note)),
  )


def _one() -> np.ndarray:
  return np.zeros(1, np.int64)


def _stages(request: Request, budget: _Budget, order: ReadOrder, size: int) -> Iterator[Stage]:
  """On the host, and to the devices if they are here."""
  yield from stages(order, size, min(1.0, budget.seconds_left / 10), budget.clock)
  if request.target is not None:
    shape = (1, request.plan.micro_batch_to_train, request.plan.max_target_length)
    mesh = make_mesh(request.plan.topology, request.target.devices)
    place = RowPlacement(sharding((None, "batch", None), shape, mesh), row_dim=1, num_rows=shape[1])
    yield transfer(order, place, min(1.0, budget.seconds_left / 10))


def _settings(
  data: DataConfig, budget: _Budget, order: ReadOrder, size: int
) -> tuple[list[Measured], list[Setting]]:
  """What there is time for, one setting at least, and what is left out."""
  left = settings_to_measure(setting_of(data), os.cpu_count() or 1)
  found: list[Measured] = []
  while left and (budget.seconds_left > 0 or not found):
    seconds = min(_MOST_SECONDS, budget.seconds_left / len(left) / 2)
    found.append(measure(order, left.pop(0), size, seconds, budget.clock))
  return found, left


def _notes(request: Request, sample: str) -> Iterator[str]:
  if sample:
    yield sample
  if request.target is None:
    yield "the devices are not here: bringing rows to them is not measured; reading is, on this machine"
