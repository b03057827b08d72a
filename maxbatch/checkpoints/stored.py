"""Arrays on disk that are read in parts: what conversions and partial restores take them from."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]
"""A part of an array: a slice with a step of 1 for every dim."""

_BLOCK_BYTES = 2**27
"""What is read at once, where an array can be divided along its first dim."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """An array that is not in memory."""

  shape: tuple[int, ...]
  dtype: np.dtype
  rows_together: int
  """Of its first dim, how many are stored together: who reads one of them reads them all."""
  read: Callable[[Index], np.ndarray]
  """A part of it."""

  @property
  def nbytes(self) -> int:
    """Bytes of its values."""
    return math.prod(self.shape) * self.dtype.itemsize

  def blocks(self) -> Iterator[np.ndarray]:
    """All of it in turn, divided along the first dim into parts that are stored together."""
    for index in block_indices(self.shape, self.dtype, self.rows_together):
      yield self.read(index)


def block_indices(
  shape: tuple[int, ...], dtype: np.dtype, rows_together: int = 1
) -> Iterator[Index]:
  """An array in parts that are a moderate amount of memory, divided along its first dim.

  Args:
    shape: of the whole array.
    dtype: of its values.
    rows_together: parts are multiples of so many rows, however large.
  """
  if not shape:
    yield ()
    return
  whole = tuple(slice(0, size) for size in shape)
  together = max(rows_together, 1)
  bytes_together = max(together * math.prod(shape[1:]) * dtype.itemsize, 1)
  rows = together * max(_BLOCK_BYTES // bytes_together, 1)
  for first in range(0, shape[0], rows):
    yield (slice(first, min(first + rows, shape[0])), *whole[1:])


class StoredArrays(Protocol):
  """Arrays by name, none of which is in memory."""

  def __getitem__(self, name: str, /) -> StoredArray: ...
