"""The microbatch that a slice runs best with, and the smallest batch that nearly does, estimated."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from fractions import Fraction

from maxbatch.core.solve import per_device_size
from maxbatch.core.topology import Topology
from maxbatch.estimate.best_split import REMAT_POLICIES, BatchSplit, is_safe, meshes, simplest
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.compiled_steps import compiled_steps
from maxbatch.estimate.step_roofline import step_roofline
from maxbatch.estimate.step_work import RematPolicy, StepWork

_MANY = 64
"""Microbatches of a step after which what it does once no longer counts."""
_MOST_POWER = 12
_MOST_EXTRAPOLATED = 2
"""Times the tokens that a device had in any compiled step: far beyond, memory was off by a half."""
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
  work: StepWork,
  chip: Chip,
  devices_per_slice: int,
  num_slices: int = 1,
  share: float = 0.95,
  bias: float = 1.0,
) -> EffectiveBatch | None:
  """The fastest microbatch where the batch is open, and the smallest batch that is worth a slice.

  Args:
    work: the model and how it is trained.
    chip: one device.
    devices_per_slice: or of all devices, where there is one slice.
    num_slices: such sets of devices.
    share: of the highest tokens per second, from which on a batch counts as efficient.
    bias: speed as compiled over speed as estimated, of estimates that were the best of many. Estimates are
      multiplied by it, so that they stand fairly beside what was compiled.

  Returns:
    None where no microbatch fits, be it of one sample.
  """
  results = [
    one
    for mesh in meshes(work, devices_per_slice, num_slices)
    for one in _powers_of_two(work, chip, mesh, bias)
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
  efficient = [
    small for one in beside if (small := _fewest_microbatches(work, chip, one, enough, bias))
  ]
  least = min(one.batch for one in efficient)
  return EffectiveBatch(fastest, simplest([one for one in efficient if one.batch == least]))


def _powers_of_two(work: StepWork, chip: Chip, mesh: Topology, bias: float) -> Iterator[BatchSplit]:
  """Microbatches of 1, 2, 4, … samples per group that fit, with every policy, in steps of many."""
  for remat in REMAT_POLICIES:
    for power in range(_MOST_POWER):
      result = _split(work, chip, mesh, 2**power, _MANY, remat, bias)
      is_known = result.per_device * work.length <= _MOST_EXTRAPOLATED * most_compiled_tokens()
      if not is_safe(result.step, None) or not (is_known or power == 0):
        break
      yield result


@functools.cache
def most_compiled_tokens() -> int:
  """The most tokens that a microbatch had on one device, of the steps from which the rates are."""
  return max(
    int(step.length * Fraction(step.per_device)) for step in compiled_steps() if not step.chosen
  )


def _split(
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  rows: int,
  count: int,
  remat: RematPolicy,
  bias: float,
) -> BatchSplit:
  """A step of `count` microbatches of `rows` samples for each data-parallel group."""
  size = per_device_size(rows, mesh)
  step = step_roofline(work, chip, mesh, size, count, remat)
  if step.how == "estimated":
    step = dataclasses.replace(
      step,
      step_seconds=step.step_seconds / bias,
      microbatch_seconds=step.microbatch_seconds / bias,
      rest_seconds=step.rest_seconds / bias,
      utilisation=step.utilisation * bias,
      tokens_per_second=step.tokens_per_second * bias,
    )
  return BatchSplit(mesh, count * rows * mesh.num_batch_groups, size, count, remat, step)


def _fewest_microbatches(
  work: StepWork, chip: Chip, split: BatchSplit, enough: float, bias: float
) -> BatchSplit | None:
  """The split with as few microbatches as make so many tokens per second; None where none do."""
  step = split.step
  tokens = step.tokens_per_second * step.step_seconds / split.num_microbatches
  gained = tokens - enough * step.microbatch_seconds
  if gained <= 0:
    return None
  count = max(1, math.ceil(enough * step.rest_seconds / gained))
  rows = split.per_device * (split.mesh.shape["tensor"])
  return _split(work, chip, split.mesh, int(rows), count, split.remat, bias)
