"""What a tick costs and a microbatch needs, as lines through what was compiled: fixed + slope × x."""

import dataclasses
from collections.abc import Sequence

Point = tuple[float, float]
"""(samples, value)."""


@dataclasses.dataclass(frozen=True)
class Line:
  """A value by the samples of a microbatch."""

  fixed: float
  per_sample: float

  def at(self, samples: float) -> float:
    """The value for a microbatch of so many samples."""
    return self.fixed + self.per_sample * samples


def fitted(points: Sequence[Point]) -> Line:
  """The line that misses the points least, each by a share of itself; through two, exactly.

  Through one point the line is level: no sample costs anything, as far as is known.

  Args:
    points: at least one, with positive values.
  """
  ones = [(1 / value, samples / value) for samples, value in points]
  aa, ab, bb = (sum(one[i] * one[j] for one in ones) for i, j in ((0, 0), (0, 1), (1, 1)))
  a, b = (sum(one[i] for one in ones) for i in (0, 1))
  if len({samples for samples, _ in points}) < 2:
    return Line(a / aa, 0.0)
  scale = aa * bb - ab * ab
  return Line((a * bb - b * ab) / scale, (b * aa - a * ab) / scale)


def fitted_cost(points: Sequence[Point]) -> Line:
  """The same for a time, level if larger microbatches seem to take less.

  A negative fixed part stays: between the points, where predictions lie, the line is above 0.
  """
  line = fitted(points)
  return line if line.per_sample >= 0 else fitted([(0.0, value) for _, value in points])
