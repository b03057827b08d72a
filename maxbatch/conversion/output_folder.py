"""A conversion's result: a folder that appears whole, where nothing was, with space for all of it."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from maxbatch.checkpoints.tensor_files import TensorSpec, total_bytes
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hugging_face.model_keys import PLAIN, SHAPE
from maxbatch.run_folder.atomic import appearing, claimed, nearest


@dataclasses.dataclass(frozen=True)
class Converted:
  """What a conversion has made."""

  folder: Path
  model_type: str
  dtype: str
  num_parameters: int
  num_bytes: int
  notes: tuple[str, ...]
  """What a user should know besides, a line each."""


def converted(
  folder: Path, model_type: str, specs: Collection[TensorSpec], notes: Collection[str]
) -> Converted:
  """Returns the same, of the tensors that were written."""
  dtype = next(iter(specs)).dtype.name
  size = sum(math.prod(spec.shape) for spec in specs)
  return Converted(folder, model_type, dtype, size, total_bytes(specs), tuple(notes))


def model_keys(config: Config) -> dict[str, Any]:
  values = to_flat_dict(config)
  return {key: values[key] for key in (*SHAPE, *PLAIN)}


_SMALL_FILES_BYTES = 2**25
_KEPT_OF_NAME = 50
"""Letters of a folder's name in that of its lock."""


@contextlib.contextmanager
def whole_folder(given: str, instead: str, folder: Path, num_bytes: int) -> Iterator[Path]:
  """Yields a folder to write to, which becomes `folder` at the end; after an error nothing is left.

  Args:
    given: the keys that name it, with their values, for errors.
    instead: what to give where something is there.
    folder: where nothing is yet, or an empty folder.
    num_bytes: of the weights that will be written.

  Raises UserError: something is there, another process writes it, or there is no space.
  """
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise UserError(
      f"{given}: it exists and would be overwritten; remove {folder}, or choose another name, "
      f"for example {instead}"
    )
  free, needed = shutil.disk_usage(nearest(folder.absolute())).free, num_bytes + _SMALL_FILES_BYTES
  if needed > free:
    raise UserError(
      f"{given} needs {needed:,} bytes, and {free:,} are free in {nearest(folder.absolute())}; "
      "free some space, or name a folder on another disk"
    )
  try:
    lock = folder.with_name(f".{folder.name[:_KEPT_OF_NAME]}.lock")
    with claimed(lock, wait=False) as is_ours:
      if not is_ours:
        raise UserError(f"{given}: another process is writing it; wait, or choose another name")
      with appearing(folder) as unfinished:
        yield unfinished
  except OSError as error:
    raise UserError(
      f"{given}: {error.filename or folder} cannot be written ({error.strerror or error}); nothing "
      "was left there"
    ) from error
