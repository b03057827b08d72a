"""How fast one process reads with a setting: the run's own reader, asked as fast as it can answer."""

import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from maxbatch.batch.row_plan import Steps, StepTable
from maxbatch.data.read_ahead import ReadAhead
from maxbatch.data.reading import ReadOrder, StepReader
from maxbatch.input_analysis.settings import Measured, Setting

_FEWEST = 3
_MOST = 10**6


def measure(
  order: ReadOrder,
  setting: Setting,
  samples_per_load: int,
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> Measured:
  """Reads loads of the run's order of samples, from its first on.

  What was read ahead while the reader started is taken and not counted.

  Args:
    order: the rows, in the run's order.
    setting: who reads.
    samples_per_load: of one host.
    seconds: for the loads that are counted; there are at least three.
    clock: in seconds.

  Raises:
    UserError: reading fails.
  """
  reader = _reader(order, setting, samples_per_load)
  try:
    began = clock()
    next(reader)
    now = first = clock()
    waits: list[float] = []
    uncounted, limit = setting.num_loads_ahead, seconds
    while len(waits) < uncounted + _FEWEST or now - first < limit:
      next(reader)
      before, now = now, clock()
      waits.append(now - before)
      if len(waits) == uncounted:
        limit += now - first
    counted = waits[uncounted:]
  finally:
    reader.close()
  speed = samples_per_load * len(counted) / max(sum(counted), 1e-9)
  return Measured(setting, samples_per_load, speed, first - began, max(counted))


def _reader(order: ReadOrder, setting: Setting, samples_per_load: int) -> StepReader:
  steps = Steps([(range(0, _MOST * samples_per_load, samples_per_load), 1)])
  return StepReader(
    order,
    StepTable(steps, samples_per_load),
    np.arange(samples_per_load),
    1,
    Fraction(1),
    setting.worker_count,
    ahead=ReadAhead(setting.num_threads, setting.buffer_size, setting.buffer_size),
  )
