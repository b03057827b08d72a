"""How far reading is ahead of the step, and with how many threads."""

import dataclasses

from maxbatch.config.schema import DataConfig


@dataclasses.dataclass(frozen=True)
class ReadAhead:
  """Loads that are read before they are asked for; it changes none of them."""

  num_threads: int = 1
  """Without worker processes: loads that are read at once."""
  prefetch_buffer_size: int = 2
  """Without worker processes: loads that wait, or are being read."""
  per_worker_buffer_size: int = 2
  """Loads that wait in each worker process."""


AS_USUAL = ReadAhead()


def read_ahead(data: DataConfig) -> ReadAhead:
  """What the keys say."""
  return ReadAhead(
    data.grain_num_threads, data.grain_prefetch_buffer_size, data.grain_per_worker_buffer_size
  )
