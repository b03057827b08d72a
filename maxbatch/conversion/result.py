"""What a conversion has made, and what must be equal for parameters to mean the same."""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from maxbatch.checkpoints.tensor_files import TensorSpec, total_bytes
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.hugging_face.model_keys import PLAIN, SHAPE


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
  """The same, of the tensors that were written."""
  dtype = next(iter(specs)).dtype.name
  size = sum(math.prod(spec.shape) for spec in specs)
  return Converted(folder, model_type, dtype, size, total_bytes(specs), tuple(notes))


def model_keys(config: Config) -> dict[str, Any]:
  """The keys that say what a model computes, as JSON values."""
  values = to_flat_dict(config)
  return {key: values[key] for key in (*SHAPE, *PLAIN)}
