"""Bcrit from the branches of a checkpoint: what each took to the loss that the worst ended with."""

from collections.abc import Sequence

import numpy as np

from maxbatch.batch.arithmetic import samples_of
from maxbatch.experiments.losses import Judged
from maxbatch.experiments.tradeoff import Tradeoff, fit_tradeoff, smooth_crossing

_FEWEST = 3
"""Branches, which two numbers are fitted to."""


def branch_tradeoff(judged: Sequence[Judged], begins: int) -> Tradeoff | None:
  """The curve of samples against steps; None if the branches do not bound Bcrit from both sides.

  Args:
    judged: the branches.
    begins: samples that the run had consumed at the checkpoint.
  """
  trained = [one for one in judged if not one.measured.diverged]
  target = max(one.loss for one in trained)
  found = []
  for measured in (one.measured for one in trained):
    steps_per_block = measured.branch.steps_per_block
    block_samples = samples_of(steps_per_block, measured.branch.batch)
    places = block_samples * (np.arange(len(measured.blocks)) + 0.5)
    took = smooth_crossing(places, measured.blocks, target, begins)
    if took:
      found.append((took, took / block_samples * steps_per_block))
  if len(found) < _FEWEST:
    return None
  curve = fit_tradeoff(*zip(*found, strict=True))
  critical = curve.critical_batch
  return curve if critical.low > 0 and critical.high < float("inf") else None
