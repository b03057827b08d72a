"""Parameters from a Hugging Face folder: which tensor is which, and each straight into its place.

A matrix of theirs is (inputs, outputs), or transposed; ours has several dims for each, and theirs may
hold several of ours side by side. So a part of ours that is divided along the first dim of its inputs
or of its outputs, as all shardings here divide, is a rectangle of theirs, and nothing else is read.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from maxbatch.checkpoints.formats import whole_slices
from maxbatch.checkpoints.tensor_files import Index, StoredArray, TensorFolder
from maxbatch.errors import UserError, first_of
from maxbatch.hardware.sharding import LogicalAxes
from maxbatch.hugging_face.family import Family, Interleaved, Shape, Tensor
from maxbatch.hugging_face.registry import read_folder
from maxbatch.models.float8 import AMAX
from maxbatch.models.lora import ADAPTER
from maxbatch.models.registry import Model, Parameters


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a parameter of ours is in a tensor of theirs; shapes are those of one layer, and of one
  expert where there is a tensor for each."""

  tensor: Tensor
  number: int
  """Which of the parameters in that tensor."""
  shapes: tuple[Shape, ...]
  """Shapes of all tensors, as they are in the file."""

  def read(self, theirs: StoredArray, index: Index) -> np.ndarray:
    """Reads a part of our parameter from the stored tensor; beyond the end of a dim are zeros.

    A dim is longer than in the file where the vocabulary is padded.
    """
    shape, in_dims = self.shapes[self.number], self.tensor.in_dims
    sizes = zip(index, shape, strict=True)
    inside = tuple(slice(min(each.start, size), min(each.stop, size)) for each, size in sizes)
    if isinstance(self.tensor, Interleaved):
      ways, last = len(self.shapes), inside[-1]
      rows = theirs.read((*inside[:-1], slice(ways * last.start, ways * last.stop)))
      return rows[..., self.number :: ways]
    before = sum(math.prod(other[in_dims:]) for other in self.shapes[: self.number])
    rows = _range(inside[:in_dims], shape[:in_dims])
    columns = _range(inside[in_dims:], shape[in_dims:], before)
    held = _held(inside[:in_dims], shape[:in_dims]) + _held(inside[in_dims:], shape[in_dims:])
    result = _read_matrix(theirs, self.tensor, rows, columns).reshape([_len(each) for each in held])
    result = result[tuple(_within(*each) for each in zip(inside, held, strict=True))]
    missing = [(0, _len(each) - size) for each, size in zip(index, result.shape, strict=True)]
    return np.pad(result, missing) if any(after for _, after in missing) else result


def _range(index: Index, shape: Shape, before: int = 0) -> slice:
  """Returns the rows, or columns, that hold a part of some dims flattened, `before` others."""
  rest = math.prod(shape[1:])
  first, last = (index[0].start, index[0].stop) if index else (0, 1)
  return slice(before + first * rest, before + last * rest)


def _held(index: Index, shape: Shape) -> Index:
  return (*index[:1], *(slice(0, size) for size in shape[1:]))


def _len(part: slice) -> int:
  return part.stop - part.start


def _within(wanted: slice, held: slice) -> slice:
  return slice(wanted.start - held.start, wanted.stop - held.start)


def _read_matrix(theirs: StoredArray, tensor: Tensor, rows: slice, columns: slice) -> np.ndarray:
  """Reads a rectangle of their tensor as (inputs, outputs), or part of a vector."""
  if not tensor.in_dims:
    return theirs.read((columns,))
  if tensor.transposed:
    return theirs.read((columns, rows)).T
  return theirs.read((rows, columns))


_SHOWN = 3
OF_A_RUN = (*ADAPTER, AMAX)
"""Names of parameters that belong to how a run trains its model, and that no folder has."""


def load_parameters(folder: Path, model: Model, wanted: Parameters) -> Parameters:
  """Loads parameters of a Hugging Face folder, each part on the process that needs it alone.

  Args:
    wanted: ShapeDtypeStructs with shardings, of some or all of its parameters; values are cast to
      their dtypes. Those of OF_A_RUN are left out.

  Raises UserError: the folder, or its family, cannot be read, or a tensor is not as it should be.
  """
  reader = reader_of(folder, model)
  return unflatten_dict(
    {
      path: _placed(reader, path, leaf)
      for path, leaf in leaves_by_path(wanted).items()
      if path[-1] not in OF_A_RUN
    }
  )


def reader_of(folder: Path, model: Model) -> "FolderReader":
  """Returns a reader of a model's parameters, all but those of OF_A_RUN, from a folder that is checked to
  have them. Raises UserError: see `load_parameters`."""
  leaves = leaves_by_path(model.shapes()).items()
  shapes = {path: leaf.shape for path, leaf in leaves if path[-1] not in OF_A_RUN}
  return FolderReader(folder, shapes, model.axes())


def leaves_by_path(tree: Parameters) -> dict[tuple[str, ...], Any]:
  return cast(dict[tuple[str, ...], Any], flatten_dict(tree))


def _placed(reader: "FolderReader", path: tuple[str, ...], leaf: Any) -> jax.Array:
  def part(index: Index | None) -> np.ndarray:
    return reader.read(path, whole_slices(index, leaf.shape), np.dtype(leaf.dtype))

  return jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)


class FolderReader:
  """Reads parts of parameters from a Hugging Face folder."""

  def __init__(
    self,
    folder: Path,
    shapes: Mapping[tuple[str, ...], Shape],
    axes: Mapping[tuple[str, ...], LogicalAxes],
  ):
    """Checks that the folder's tensors are those of the parameters.

    Args:
      shapes: of the parameters by their paths, stacked ones with their leading dim.
      axes: the logical axes of their dims.

    Raises UserError: see `load_parameters`.
    """
    family, options = read_folder(folder)
    self.family, self.options = family, options
    self.dtypes: set[np.dtype] = set()
    """Dtypes of the folder's tensors."""
    self._folder, self._shapes = folder, shapes
    stored = _as_stored(shapes, axes, options["vocab_size"], folder)
    self._places = _places(family, stored, options["first_num_dense_layers"])
    self._tensors = TensorFolder(folder)
    self._names = _names(self._tensors, family)
    self._check()

  def read(self, path: tuple[str, ...], index: Index, dtype: np.dtype) -> np.ndarray:
    place = self._places[path]
    stacked = place.tensor.stacked_dims
    result = np.empty([_len(each) for each in index], dtype)
    for name, at in place.tensor.names(self._shapes[path]):
      inside = zip(at, index, strict=False)
      if all(each.start <= number < each.stop for number, each in inside):
        theirs = self._tensors[self._names[name]]
        within = tuple(number - each.start for number, each in zip(at, index, strict=False))
        result[within] = place.read(theirs, index[stacked:])
    return result

  def _check(self) -> None:
    """Raises UserError for tensors that are missing, left over, or of another shape."""
    expected = dict(self._expected())
    if missing := [name for name in expected if name not in self._names]:
      raise UserError(
        f"{self._folder}: tensor {first_of(missing, _SHOWN)} is missing, which a model of type "
        f"{self.family.name} has with the keys of this run; take the folder as it was published, "
        "whole, and the keys as its config.json has them"
      )
    # As transformers does where both matrices are one.
    ignored = {tensor.name for tensor in self.family.tensors if tensor.parameters == ("head",)}
    if left := sorted(self._names.keys() - expected.keys() - ignored):
      raise UserError(
        f"{self._folder}: the tensor {first_of(left, _SHOWN)} would be left over: no parameter of "
        "this run uses it; keys such as base_num_decoder_layers must match the folder's config.json"
      )
    for name, (shape, place) in expected.items():
      result = self._tensors[self._names[name]]
      self.dtypes.add(result.dtype)
      if not jnp.issubdtype(result.dtype, jnp.floating):
        raise UserError(
          f"{self._folder}: the tensor {self._names[name]} is {result.dtype.name}, and parameters "
          "are floating-point numbers; take the folder with the original weights, not quantized"
        )
      if result.shape != shape:
        raise UserError(
          f"{self._folder}: the tensor {self._names[name]} is {list(result.shape)}, and this run's "
          f"parameters make it {list(shape)} ({', '.join(place.tensor.parameters)}); the keys of "
          "the model must match the folder's config.json"
        )

  def _expected(self) -> Iterator[tuple[str, tuple[Shape, Place]]]:
    """Yields every tensor that the parameters need, by the table's name, with its shape."""
    for path, place in self._places.items():
      shape = place.tensor.shape(place.shapes)
      for name, _ in place.tensor.names(self._shapes[path]):
        yield name, (shape, place)


def _as_stored(
  shapes: Mapping[tuple[str, ...], Shape],
  axes: Mapping[tuple[str, ...], LogicalAxes],
  vocab_size: int,
  folder: Path,
) -> dict[tuple[str, ...], Shape]:
  """Returns the shapes of one layer, with the folder's vocabulary, maybe smaller than ours."""
  results: dict[tuple[str, ...], Shape] = {}
  for path, shape in shapes.items():
    sizes = []
    for axis, size in zip(axes[path], shape, strict=True):
      if axis == "vocab" and size < vocab_size:
        raise UserError(
          f"vocab_size={size} is less than the {vocab_size} of {folder}; give "
          f"vocab_size={vocab_size}, or more for rows of zeros after them"
        )
      if axis != "layers":
        sizes.append(vocab_size if axis == "vocab" else size)
    results[path] = tuple(sizes)
  return results


def _places(
  family: Family, shapes: Mapping[tuple[str, ...], Shape], dense_layers: int
) -> dict[tuple[str, ...], Place]:
  paths = {".".join(path): path for path in shapes}
  results: dict[tuple[str, ...], Place] = {}
  for tensor in family.table(paths, dense_layers):
    experts = max(tensor.stacked_dims - 1, 0)
    inside = tuple(shapes[paths[name]][experts:] for name in tensor.parameters)
    for number, name in enumerate(tensor.parameters):
      results[paths[name]] = Place(tensor, number, inside)
  return results


def _names(tensors: TensorFolder, family: Family) -> dict[str, str]:
  named = {family.table_name(name): name for name in tensors.names}
  return {ours: theirs for ours, theirs in named.items() if ours is not None}
