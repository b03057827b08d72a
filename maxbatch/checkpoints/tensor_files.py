"""Folders of safetensors files: read in parts, and written tensor by tensor.

The library reads; to write, it wants all tensors of a file at once, so that is done here. A file is
the length of its header (8 bytes, little-endian), the header (JSON: each tensor's dtype, shape and
place), and the tensors' bytes. Of several files, an index says which has which tensor.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxbatch.checkpoints.stored import Index, StoredArray
from maxbatch.data.optional import library
from maxbatch.errors import UserError

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
    """Bytes of its values."""
    return math.prod(self.shape) * self.dtype.itemsize


class TensorFolder:
  """The tensors of a folder, of which nothing is in memory; a context manager."""

  def __init__(self, folder: Path):
    """Looks for model.safetensors, or for the files that the index beside them names.

    Raises:
      UserError: there are none, or they are not what the index says.
    """
    self.folder = folder
    self._open_files = contextlib.ExitStack()
    with contextlib.ExitStack() as opened:
      self._files = _files(folder, opened)
      self._open_files = opened.pop_all()

  def __enter__(self) -> "TensorFolder":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Closes the files; arrays that were taken from here cannot be read any more."""
    self._open_files.close()

  @property
  def names(self) -> list[str]:
    """All tensors, sorted."""
    return sorted(self._files)

  def __getitem__(self, name: str) -> StoredArray:
    """One tensor, still on disk.

    Raises:
      UserError: numpy has no such dtype.
    """
    part = self._files[name].get_slice(name)
    if part.get_dtype() not in _DTYPES:
      raise UserError(
        f"{self.folder}: {name} is of type {part.get_dtype()}, and what is read is "
        f"{', '.join(_DTYPES)}; take the model's folder with the weights as trained, not quantized"
      )
    shape = tuple(part.get_shape())
    return StoredArray(shape, _DTYPES[part.get_dtype()], 1, functools.partial(_read, part))


def _read(part: Any, index: Index) -> np.ndarray:
  return np.asarray(part[index] if index else part[...])


def _files(folder: Path, opened: contextlib.ExitStack) -> dict[str, Any]:
  """The open file of every tensor."""
  single, index = folder / SINGLE, folder / INDEX
  if single.is_file():
    file = opened.enter_context(_open(single))
    return dict.fromkeys(file.keys(), file)
  if not index.is_file():
    raise UserError(_nothing_there(folder))
  named = _weight_map(index)
  files = {name: opened.enter_context(_open(folder / name)) for name in sorted(set(named.values()))}
  inside = {name: set(file.keys()) for name, file in files.items()}
  for tensor, name in named.items():
    if tensor not in inside[name]:
      raise UserError(f"{index}: {tensor} is said to be in {name}, which does not have it")
  return {tensor: files[name] for tensor, name in named.items()}


def _weight_map(index: Path) -> dict[str, str]:
  """Which file has which tensor."""
  try:
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    inside = all(Path(name).name == name for name in named.values())
  except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise UserError(f"{index}: this is no index of safetensors files ({error})") from error
  if not inside:
    raise UserError(f"{index}: it names files of other folders; give the folder as published")
  return named


def _open(path: Path) -> Any:
  safetensors = library("safetensors", str(path), extra="hf")
  try:
    # Not mapped into memory: the pages would count as this process's.
    return safetensors.safe_open(path, framework="numpy", backend="pread")
  except (OSError, safetensors.SafetensorError) as error:
    missing = "it is missing" if not path.exists() else f"it cannot be read: {error}"
    raise UserError(f"{path}: {missing}; copy or download the folder again, whole") from error


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
    folder: it is there.
    specs: the tensors, in the order in which they are written.
    values: all their values in the same order, in parts of which each belongs to one tensor.
    max_file_bytes: more than that is in several files; a larger tensor has one of its own.

  Raises:
    OSError: a file cannot be written.
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
  """The tensors of each file, by its name."""
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


def _header(specs: Sequence[TensorSpec]) -> bytes:
  """What stands before the tensors, padded so that they are aligned."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for spec in specs:
    begin, end = end, end + spec.nbytes
    place = {"dtype": _CODES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
    header[spec.name] = place
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  return len(text).to_bytes(8, "little") + text


def _bytes(piece: np.ndarray) -> memoryview:
  # numpy hands out no buffer of bfloat16.
  return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data


def total_bytes(specs: Iterable[TensorSpec]) -> int:
  """Bytes of all values."""
  return sum(spec.nbytes for spec in specs)
