"""What a batch costs in data and steps, by the noise scale."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RelativeCost:
  """Data and steps that reaching the same loss takes, relative to a reference."""

  data: float
  steps: float


def cost(batch: float, noise_scale: float) -> RelativeCost:
  """Returns data and steps at `batch`, each relative to its minimum over all batch sizes.

  (steps − 1)·(data − 1) = 1: McCandlish et al. 2018, equation 2.11. A heuristic.

  Args:
    batch: samples per step, above 0.
    noise_scale: in samples, above 0.
  """
  size = batch / noise_scale
  return RelativeCost(data=1 + size, steps=1 + 1 / size)


def cost_of_change(batch: float, factor: float, noise_scale: float) -> RelativeCost:
  """Returns data and steps at a batch `factor` times as large, relative to those at `batch`."""
  # A batch `factor` times as large has the cost of this one at a noise scale that much smaller.
  before, after = cost(batch, noise_scale), cost(batch, noise_scale / factor)
  return RelativeCost(after.data / before.data, after.steps / before.steps)
