"""The microbatch that a slice runs best with, and the smallest batch that nearly does, estimated."""

import dataclasses
import math
from collections.abc import Iterator

from maxbatch.core.solve import per_device_size
from maxbatch.core.topology import Topology
from maxbatch.estimate.best_split import (
  REMAT_POLICIES,
  BatchSplit,
  choosable,
  is_near_compiled,
  is_safe,
  meshes,
  simplest,
)
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.step_work import RematPolicy, StepWork

_MANY = 64
"""Microbatches of a step after which what it does once no longer counts."""
_MOST_POWER = 12
_AS_FAST = 0.99
"""What gains less than a percent is not worth its memory, and is further from what was compiled."""


@dataclasses.dataclass(frozen=True)
class EffectiveBatch:
  """What a slice does best, and from which batch on it nearly does."""

  fastest: BatchSplit
  """Microbatch, mesh and policy of about most tokens per second, in steps of many, with the least memory."""
  smallest: BatchSplit
  """The smallest batch that is nearly as fast on the same mesh, split as is fastest for it."""


def effective_batch(
  work: StepWork, chip: Chip, devices_per_slice: int, num_slices: int = 1, share: float = 0.95
) -> EffectiveBatch | None:
  """The fastest microbatch where the batch is open, and the smallest batch that is worth a slice.

  Args:
    work: the model and how it is trained.
    chip: one device.
    devices_per_slice: or of all devices, where there is one slice.
    num_slices: such sets of devices.
    share: of the highest tokens per second, from which on a batch counts as efficient.

  Returns:
    None where no microbatch fits, be it of one sample.
  """
  results = [
    one
    for mesh in meshes(work, devices_per_slice, num_slices)
    for one in _powers_of_two(work, chip, mesh)
  ]
  if not results:
    return None
  best = simplest(results)
  beside = [one for one in results if one.mesh == best.mesh]
  alike = [
    one for one in beside if one.step.tokens_per_second >= _AS_FAST * best.step.tokens_per_second
  ]
  fastest = min(alike, key=lambda one: one.step.peak_bytes)
  enough = share * fastest.step.tokens_per_second
  efficient = [small for one in beside if (small := _fewest_microbatches(work, chip, one, enough))]
  least = min(one.batch for one in efficient)
  return EffectiveBatch(fastest, simplest([one for one in efficient if one.batch == least]))


def _powers_of_two(work: StepWork, chip: Chip, mesh: Topology) -> Iterator[BatchSplit]:
  """Microbatches of 1, 2, 4, … samples per group that fit, with every policy, in steps of many."""
  for remat in REMAT_POLICIES:
    for power in range(_MOST_POWER):
      result = _split(work, chip, mesh, 2**power, _MANY, remat)
      if not is_safe(result.step, None) or not is_near_compiled(work, chip, result):
        break
      yield result


def _split(
  work: StepWork, chip: Chip, mesh: Topology, rows: int, count: int, remat: RematPolicy
) -> BatchSplit:
  """A step of `count` microbatches of `rows` samples for each data-parallel group."""
  size = per_device_size(rows, mesh)
  step = choosable(work, chip, mesh, size, count, remat)
  return BatchSplit(mesh, count * rows * mesh.num_batch_groups, size, count, remat, step)


def _fewest_microbatches(
  work: StepWork, chip: Chip, split: BatchSplit, enough: float
) -> BatchSplit | None:
  """The split with as few microbatches as make so many tokens per second; None where none do."""
  step = split.step
  tokens = step.tokens_per_second * step.step_seconds / split.num_microbatches
  gained = tokens - enough * step.microbatch_seconds
  if gained <= 0:
    return None
  count = max(1, math.ceil(enough * step.rest_seconds / gained))
  rows = split.batch // (split.num_microbatches * split.mesh.num_batch_groups)
  return _split(work, chip, split.mesh, rows, count, split.remat)
