"""Where a parameter of ours is in a family's files: a table read in both directions.

Ours are named by their path, `layers.attention.query.kernel`, and those of the layers are stacked
along a leading dim, of which a tensor of theirs holds one layer: shapes here are without it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

Shape = tuple[int, ...]
Array = Any
"""Of numpy, jax, or whatever else has the array API."""


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One of their tensors, and the parameters that it holds."""

  name: str
  """Theirs; `{}` stands for the number of the layer."""
  parameters: tuple[str, ...]
  """Paths of ours; several lie side by side along the outputs, as GPT-2's fused projections do."""
  in_dims: int
  """Leading dims of ours that are the inputs of a matrix, the others are its outputs; 0: a vector."""
  transposed: bool
  """Whether theirs is (outputs, inputs), as torch's Linear keeps it."""

  @property
  def is_layered(self) -> bool:
    """Whether there is one for each layer."""
    return "{}" in self.name

  def shape(self, shapes: Sequence[Shape]) -> Shape:
    """Theirs, where those of our parameters are `shapes`."""
    outputs = sum(math.prod(shape[self.in_dims :]) for shape in shapes)
    if not self.in_dims:
      return (outputs,)
    inputs = math.prod(shapes[0][: self.in_dims])
    return (outputs, inputs) if self.transposed else (inputs, outputs)

  def theirs(self, ours: Sequence[Array]) -> Array:
    """Their tensor, of our parameters; a view of ours where that is possible."""
    parts = [each.reshape(self._flat(each.shape)) for each in ours]
    several = len(parts) > 1
    joined = parts[0].__array_namespace__().concat(parts, axis=-1) if several else parts[0]
    return joined.T if self.transposed else joined

  def ours(self, theirs: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Our parameters of `shapes`, of their tensor, whose shape is `self.shape(shapes)`."""
    joined = theirs.T if self.transposed else theirs
    found, start = [], 0
    for shape in shapes:
      end = start + math.prod(shape[self.in_dims :])
      found.append(joined[..., start:end].reshape(shape))
      start = end
    return found

  def _flat(self, shape: Shape) -> Shape:
    outputs = math.prod(shape[self.in_dims :])
    return (math.prod(shape[: self.in_dims]), outputs) if self.in_dims else (outputs,)


def vector(name: str, *parameters: str) -> Tensor:
  """A bias, or the scale of a norm."""
  return Tensor(name, parameters, in_dims=0, transposed=False)


def linear(name: str, *parameters: str, in_dims: int = 1) -> Tensor:
  """The matrix of a torch Linear: (outputs, inputs)."""
  return Tensor(name, parameters, in_dims, transposed=True)


def matrix(name: str, *parameters: str, in_dims: int = 1) -> Tensor:
  """A matrix (inputs, outputs), as GPT-2's Conv1D and all embeddings are."""
  return Tensor(name, parameters, in_dims, transposed=False)
