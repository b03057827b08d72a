"""Arrays on disk that are read in parts, and folders of safetensors files, read so and written one by one.

The library checks files; it reads whole tensors, and writes all tensors of a file at once, so that
parts are read and tensors written one by one here. A file is the length of its header (8 bytes,
little-endian), the header (JSON: each tensor's dtype, shape and place), and the tensors' bytes. Of
several files, an index says which has which tensor.
"""

import dataclasses
import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from maxbatch.config.registry import library
from maxbatch.errors import UserError

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
  """How many indices of its first dim are stored together: who reads one of them reads them all."""
  read: Callable[[Index], np.ndarray]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def blocks(self) -> Iterator[np.ndarray]:
    """Yields all of it in turn, divided along the first dim into parts that are stored together."""
    for index in block_indices(self.shape, self.dtype, self.rows_together):
      yield self.read(index)


def block_indices(
  shape: tuple[int, ...], dtype: np.dtype, rows_together: int = 1
) -> Iterator[Index]:
  """Yields the indices that divide an array along its first dim into parts of moderate size.

  Args:
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


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
_ALIGNMENT = 8
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")

_DTYPES: dict[str, np.dtype] = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  # Of a run's state beside its parameters.
  "I32": np.dtype(np.int32),
  "U32": np.dtype(np.uint32),
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
  """A tensor of a file."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class TensorFolder:
  """The tensors of a folder, of which nothing is in memory, and no file is open."""

  def __init__(self, folder: Path):
    """Looks for model.safetensors, or for the files that the index beside them names. Raises
    UserError: there are none, or they are not what the index says."""
    self.folder = folder
    self._tensors = _find_tensors(folder)

  @property
  def names(self) -> list[str]:
    return sorted(self._tensors)

  def __getitem__(self, name: str) -> StoredArray:
    """Returns one tensor, still on disk. Raises UserError: numpy has no such dtype."""
    path, place = self._tensors[name]
    code, shape = place["dtype"], tuple(place["shape"])
    if code not in _DTYPES:
      raise UserError(
        f"{self.folder}: {name} is of type {code}, and what is read is {', '.join(_DTYPES)}; take "
        "the model's folder with the original weights, not quantized"
      )

    def read(index: Index) -> np.ndarray:
      part = np.empty([each.stop - each.start for each in index], _DTYPES[code])
      with path.open("rb", buffering=0) as file:
        _read_part(file, part, place["begins"], shape, index)
      return part

    return StoredArray(shape, _DTYPES[code], 1, read)


def _read_part(
  file: io.FileIO, part: np.ndarray, begins: int, shape: tuple[int, ...], index: Index
) -> None:
  """Fills `part` with a part of the tensor of `shape` that begins at a byte of the file.

  Not mapped into memory, where the pages would count as this process's.
  """
  row_bytes = math.prod(shape[1:]) * part.dtype.itemsize
  first = index[0].start if index else 0
  inside = zip(index[1:], shape[1:], strict=True)
  if all((each.start, each.stop) == (0, size) for each, size in inside):
    left = part.reshape(-1).view(np.uint8)
    place = begins + first * row_bytes
    while left.size:
      num_bytes = os.preadv(file.fileno(), [left.data], place)
      if not num_bytes:
        raise OSError(errno.EIO, "the file ends too early", file.name)
      left, place = left[num_bytes:], place + num_bytes
    return
  for number, row in enumerate(part, first):
    _read_part(file, row, begins + number * row_bytes, shape[1:], index[1:])


_Tensors = dict[str, tuple[Path, Mapping[str, Any]]]
"""The file of every tensor, and its dtype, shape and first byte."""


def _find_tensors(folder: Path) -> _Tensors:
  single, index = folder / SINGLE, folder / INDEX
  if single.is_file():
    return _header_of(single)
  if not index.is_file():
    raise UserError(_nothing_there(folder))
  named = _weight_map(index)
  files = {name: _header_of(folder / name) for name in sorted(set(named.values()))}
  for tensor, name in named.items():
    if tensor not in files[name]:
      raise UserError(f"{index}: {tensor} should be in {name}, but is not")
  return {tensor: files[name][tensor] for tensor, name in named.items()}


def _weight_map(index: Path) -> dict[str, str]:
  try:
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    inside = all(Path(name).name == name for name in named.values())
  except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise UserError(f"{index}: this is not an index of safetensors files ({error})") from error
  if not inside:
    raise UserError(f"{index}: it names files of other folders; give the folder as published")
  return named


def _header_of(path: Path) -> _Tensors:
  safetensors = library("safetensors", str(path), extra="hf")
  try:
    # The library looks whether the header is right and the file as long as it says.
    with safetensors.safe_open(path, framework="numpy"), path.open("rb") as file:
      length = int.from_bytes(file.read(8), "little")
      header = json.loads(file.read(length))
  except (OSError, safetensors.SafetensorError) as error:
    missing = "it is missing" if not path.exists() else f"it cannot be read: {error}"
    raise UserError(f"{path}: {missing}; copy or download the whole folder again") from error
  return {
    name: (path, {**place, "begins": 8 + length + place["data_offsets"][0]})
    for name, place in header.items()
    if name != "__metadata__"
  }


def _nothing_there(folder: Path) -> str:
  if not folder.is_dir():
    return f"{folder}: there is no such folder"
  names = sorted(path.name for path in folder.iterdir())
  pickled = [name for name in names if name.endswith(_PICKLED)]
  if pickled:
    return (
      f"{folder}: {pickled[0]} is pickled, and reading a pickle runs whatever program is in it; "
      f"only safetensors are read, and there is no {SINGLE} or {INDEX}. Take a revision of the "
      "model that has them, or write them where you trust the file: transformers."
      f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('NEW_FOLDER')"
    )
  return f"{folder}: there is no {SINGLE} or {INDEX}; there is {', '.join(names[:8]) or 'nothing'}"


def write_tensors(
  folder: Path,
  specs: Sequence[TensorSpec],
  values: Iterable[np.ndarray],
  max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
  """Writes tensors into a folder that has none, one file after the other, and their index last.

  Args:
    values: all their values in the same order, in parts of which each belongs to one tensor.
    max_file_bytes: more than that is in several files; a larger tensor has one of its own.

  Raises OSError: a file cannot be written.
  """
  files, parts = _divided(specs, max_file_bytes), iter(values)
  for name, inside in files.items():
    _write_file(folder / name, inside, parts)
  # What gives the values may have something to say at the end.
  assert next(parts, None) is None
  if list(files) != [SINGLE]:
    weight_map = {spec.name: name for name, inside in files.items() for spec in inside}
    total = {"total_size": total_bytes(specs)}
    index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _divided(specs: Sequence[TensorSpec], max_file_bytes: int) -> dict[str, list[TensorSpec]]:
  files: list[list[TensorSpec]] = [[]]
  for spec in specs:
    taken = sum(each.nbytes for each in files[-1])
    if files[-1] and taken + spec.nbytes > max_file_bytes:
      files.append([])
    files[-1].append(spec)
  if len(files) == 1:
    return {SINGLE: files[0]}
  stem = SINGLE.removesuffix(".safetensors")
  return {
    f"{stem}-{number:05}-of-{len(files):05}.safetensors": inside
    for number, inside in enumerate(files, 1)
  }


def _write_file(path: Path, specs: Sequence[TensorSpec], values: Iterator[np.ndarray]) -> None:
  with path.open("xb") as file:
    file.write(_header(specs))
    for spec in specs:
      left = spec.nbytes
      while left:
        part = next(values)
        assert part.dtype == spec.dtype, spec
        left -= file.write(_bytes(part))
        assert left >= 0, spec
    file.flush()
    os.fsync(file.fileno())


def _bytes(part: np.ndarray) -> memoryview:
  # numpy returns no buffer of bfloat16.
  return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def _header(specs: Sequence[TensorSpec]) -> bytes:
  """Returns what stands before the tensors, padded so that they are aligned."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for spec in specs:
    begin, end = end, end + spec.nbytes
    place = {"dtype": _CODES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
    header[spec.name] = place
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  return len(text).to_bytes(8, "little") + text


def total_bytes(specs: Iterable[TensorSpec]) -> int:
  return sum(spec.nbytes for spec in specs)
