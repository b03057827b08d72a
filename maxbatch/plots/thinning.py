"""Fewer points of a long curve, so that a page opens at once: what is extreme stays."""

import numpy as np

MOST_POINTS = 1200
"""About as many as a screen has dots across."""
_KEPT_OF_EACH = 4


def thinned(y: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
  """The places of the points to draw, in order: all, or at most `most`.

  The curve is divided into stretches of equally many points, of which the first, the last, the
  lowest and the highest stay: so do the ends and extremes of the whole.

  Args:
    y: (n,), finite.
    most: a multiple of 4.
  """
  count, stretches = len(y), most // _KEPT_OF_EACH
  if count <= most:
    return np.arange(count)
  length = -(-count // stretches)
  padded = np.pad(y, (0, stretches * length - count), mode="edge").reshape(stretches, length)
  begins = np.arange(stretches) * length
  found = (0, length - 1, padded.argmin(axis=1), padded.argmax(axis=1))
  places = np.concatenate([begins + place for place in found])
  return np.unique(np.minimum(places, count - 1))
