"""The ramp: phases of a batch that grows as fast as it becomes worth using, and batches that divide well.

What a whole run says of its batch is an average over its moments. Let the critical batch of a moment be
k · t^p after t tokens (p: batch_rules/published.py). A constant batch B then takes ∫ B / (k · t^p) dt more
tokens than a small one, in all B / ((1 − p) · k · D^p) of the D: that is its data overhead, B / Bcrit.
So the moment's critical batch is Bcrit / (1 − p) · (t/D)^p, 1.9 times Bcrit at the end, and a batch of b
keeps to the overhead x from the moment on at which x times that is b.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.batch_rules.published import GROWTH
from maxbatch.core.solve import nearest_multiples

_HALVINGS = 3
"""A ramp begins with at least an eighth of its last batch: below, phases are shorter than a warm-up."""
_SHORTEST = 0.002
"""Share of the run below which a phase is left out."""
_TOLERANCE = 0.1
"""Rules agree no better than this: so far a batch may move to divide by a larger power of 2."""


@dataclasses.dataclass(frozen=True)
class RampPhase:
  """From a token on, a batch."""

  at_tokens: float
  samples: int
  """Samples of a step."""


def ramp(samples: int, unit: int, tokens: float, share: float) -> list[RampPhase]:
  """Returns doubling phases that end at `samples`, or one where none is worth it.

  Args:
    samples: of a step, at the end.
    unit: samples of which every phase is a multiple.
    share: the last batch over the one that has the asked data overhead over the whole run.
  """
  exponent = GROWTH.exponent
  sizes = {samples}
  for halving in range(1, _HALVINGS + 1):
    near = round(samples / 2**halving / unit) * unit
    if near:
      sizes.add(near)
  phases: list[RampPhase] = []
  for size in sorted(sizes):
    at = tokens * ((1 - exponent) * size / samples * share) ** (1 / exponent)
    if phases and at >= tokens * (1 - _SHORTEST):
      break
    if phases and at - phases[-1].at_tokens < _SHORTEST * tokens:
      phases.pop()
    phases.append(RampPhase(at if phases else 0.0, size))
  return phases


def overhead(
  phases: Sequence[RampPhase], length: int, tokens: float, critical_tokens: float
) -> float:
  """Returns the data overhead of a schedule, of a constant batch B / Bcrit; see above.

  Args:
    phases: the first begins at 0.
    length: tokens of a sample.
    critical_tokens: Bcrit of the whole run.
  """
  rest = 1 - GROWTH.exponent
  ends = [*(phase.at_tokens for phase in phases[1:]), tokens]
  return sum(
    phase.samples
    * length
    / critical_tokens
    * ((end / tokens) ** rest - (phase.at_tokens / tokens) ** rest)
    for phase, end in zip(phases, ends, strict=True)
  )


def round_batch(exact: float) -> int:
  """Returns the multiple of the largest power of 2 that is within a tenth of `exact` samples."""
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


def dividing(samples: int, unit: int) -> int:
  """Returns the multiple of `unit` samples that is nearest to so many."""
  if samples % unit == 0:
    return samples
  return min(
    map(int, nearest_multiples(unit, Fraction(samples))), key=lambda size: abs(size - samples)
  )


def whole_steps(phases: Sequence[tuple[int, int]], samples: float) -> int:
  """Returns the number of samples next to `samples` after which a step of the last phase ends.

  Args:
    phases: (from which sample on, samples of a step), the first from 0 on. A phase begins with the
      first step that begins at or after its sample.
  """
  position = 0
  for (_, size), (following, _) in itertools.pairwise(phases):
    position += max(0, -(-(following - position) // size)) * size
  size = phases[-1][1]
  return position + max(1, round((samples - position) / size)) * size
