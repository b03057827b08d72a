"""Which part of a file's tensor is which part of a parameter.

A matrix of theirs is (inputs, outputs), or transposed; ours has several dims for each, and theirs may
hold several of ours side by side. So a part of ours that is divided along the first dim of its inputs
or of its outputs, as all shardings here divide, is a rectangle of theirs, and nothing else is read.
"""

import dataclasses
import math

import numpy as np

from maxbatch.checkpoints.stored import Index, StoredArray
from maxbatch.hugging_face.tensors import Shape, Tensor


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a parameter of ours is in a tensor of theirs; shapes are those of one layer."""

  tensor: Tensor
  number: int
  """Which of the parameters in that tensor."""
  shapes: tuple[Shape, ...]
  """Of all of them, as they are in the file."""

  def read(self, theirs: StoredArray, index: Index) -> np.ndarray:
    """A part of ours, of the tensor as it is stored; values beyond the end of a dim are zeros.

    A dim is longer than in the file where the vocabulary is padded.
    """
    shape, in_dims = self.shapes[self.number], self.tensor.in_dims
    inside = tuple(
      slice(min(each.start, size), min(each.stop, size))
      for each, size in zip(index, shape, strict=True)
    )
    before = sum(math.prod(other[in_dims:]) for other in self.shapes[: self.number])
    rows = _range(inside[:in_dims], shape[:in_dims])
    columns = _range(inside[in_dims:], shape[in_dims:], before)
    held = _held(inside[:in_dims], shape[:in_dims]) + _held(inside[in_dims:], shape[in_dims:])
    found = _read_matrix(theirs, self.tensor, rows, columns).reshape([_len(each) for each in held])
    found = found[tuple(_within(*each) for each in zip(inside, held, strict=True))]
    missing = [(0, _len(each) - size) for each, size in zip(index, found.shape, strict=True)]
    return np.pad(found, missing) if any(after for _, after in missing) else found


def _range(index: Index, shape: Shape, before: int = 0) -> slice:
  """The rows, or columns, that hold a part of some dims flattened, `before` others."""
  rest = math.prod(shape[1:])
  first, last = (index[0].start, index[0].stop) if index else (0, 1)
  return slice(before + first * rest, before + last * rest)


def _held(index: Index, shape: Shape) -> Index:
  """What `_range` covers of each of the dims."""
  return (*index[:1], *(slice(0, size) for size in shape[1:]))


def _len(part: slice) -> int:
  return part.stop - part.start


def _within(wanted: slice, held: slice) -> slice:
  return slice(wanted.start - held.start, wanted.stop - held.start)


def _read_matrix(theirs: StoredArray, tensor: Tensor, rows: slice, columns: slice) -> np.ndarray:
  """A rectangle of theirs as (inputs, outputs), or part of a vector."""
  if not tensor.in_dims:
    return theirs.read((columns,))
  if tensor.transposed:
    return theirs.read((columns, rows)).T
  return theirs.read((rows, columns))
