"""A batch that divides well, near one that a rule says, and a budget of whole steps."""

import itertools
from collections.abc import Sequence

from maxbatch.batch.arithmetic import nearest_batches
from maxbatch.batch.topology import Topology

_TOLERANCE = 0.1
"""Rules agree no better than this: so far a batch may move to divide by a larger power of 2."""


def round_batch(exact: float) -> int:
  """The multiple of the largest power of 2 that is within a tenth of `exact` samples."""
  if exact < 1:
    return 1
  unit = 1
  near = max(round(exact), 1)
  while True:
    unit *= 2
    multiple = round(exact / unit) * unit
    if not multiple or abs(multiple - exact) > _TOLERANCE * exact:
      return near
    near = multiple


def dividing(samples: int, mesh: Topology) -> int:
  """`samples`, or the nearest batch of which every data-parallel group gets whole samples."""
  return min(nearest_batches(samples, mesh), key=lambda size: abs(size - samples))


def whole_steps(phases: Sequence[tuple[int, int]], samples: float) -> int:
  """The number of samples next to `samples` after which a step of the last phase ends.

  Args:
    phases: (from which sample on, samples of a step), the first from 0 on. A phase begins with the
      first step that begins at or after its sample.
    samples: of the run.
  """
  position = 0
  for (_, size), (following, _) in itertools.pairwise(phases):
    position += max(0, -(-(following - position) // size)) * size
  size = phases[-1][1]
  return position + max(1, round((samples - position) / size)) * size
