"""How a host may read its rows, from the smallest setting to the largest. No jax here."""

import dataclasses
import math
from collections.abc import Iterator

from maxbatch.config.schema import DataConfig


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
  """What reads, and how far ahead; smaller ones take fewer processes, then threads, then memory."""

  worker_count: int = 0
  """`grain_worker_count`; 0: threads read."""
  num_threads: int = 1
  """`grain_num_threads`, which worker processes have none of."""
  buffer_size: int = 2
  """Loads ahead: `grain_prefetch_buffer_size`, or `grain_per_worker_buffer_size`."""

  @property
  def cpus(self) -> int:
    """Cores of a host that it keeps busy: those that read, and one that feeds the devices."""
    return max(self.worker_count, self.num_threads) + 1

  @property
  def num_loads_ahead(self) -> int:
    """Loads that a host has in memory, the one that is being used among them."""
    return max(self.worker_count, 1) * self.buffer_size + 1

  def keys(self) -> dict[str, int]:
    """The keys of the configuration that make a run read so."""
    buffer = "grain_per_worker_buffer_size" if self.worker_count else "grain_prefetch_buffer_size"
    return {
      "grain_worker_count": self.worker_count,
      "grain_num_threads": self.num_threads,
      buffer: self.buffer_size,
    }


@dataclasses.dataclass(frozen=True)
class Measured:
  """What one process reads with a setting, as fast as it can."""

  setting: Setting
  samples_per_load: int
  samples_per_second: float
  first_seconds: float
  """Until the first load is there: workers start, files are opened."""
  slowest_seconds: float
  """The longest that one load made the reader wait after that."""


def setting_of(data: DataConfig) -> Setting:
  """What the configuration has."""
  if data.grain_worker_count:
    return Setting(data.grain_worker_count, 1, data.grain_per_worker_buffer_size)
  return Setting(0, data.grain_num_threads, data.grain_prefetch_buffer_size)


def settings_to_measure(given: Setting, num_cores: int) -> list[Setting]:
  """The configuration's, then workers and threads up to the cores, then other buffers.

  What matters most comes first: time may not suffice for all.
  """
  counts = list(_doubled(num_cores))
  found = [given, Setting(), *(Setting(count) for count in counts)]
  found += [Setting(0, count, max(2, count)) for count in counts]
  found += [Setting(buffer_size=size) for size in (1, 4)]
  return list(dict.fromkeys(found))


def _doubled(most: int) -> Iterator[int]:
  """1, 2, 4 … up to `most`."""
  yield from (2**power for power in range(int(math.log2(max(most, 1))) + 1))
