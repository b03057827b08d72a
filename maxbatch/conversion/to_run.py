"""From a Hugging Face folder to a run's folder: config.yml, and a checkpoint of parameters alone."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flax.traverse_util import flatten_dict

from maxbatch.checkpoints.parameters_only import PARAMETERS, write_parameters
from maxbatch.checkpoints.stored import block_indices
from maxbatch.checkpoints.tensor_files import TensorSpec, total_bytes
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.conversion.beside import carry_along
from maxbatch.conversion.output_folder import whole_folder
from maxbatch.conversion.reading import FolderReader
from maxbatch.hugging_face.model_keys import PLAIN, SHAPE
from maxbatch.models.registry import build_model
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.progress import ByteProgress


@dataclasses.dataclass(frozen=True)
class Converted:
  """What a conversion has made."""

  folder: Path
  model_type: str
  num_parameters: int
  num_bytes: int
  dtype: str
  notes: tuple[str, ...] = ()
  """What a user should know besides, a line each."""


def convert_to_run(folder: Path, config: Config) -> Converted:
  """Writes the folder of a run that begins with a Hugging Face folder's parameters.

  Args:
    folder: with config.json and safetensors files.
    config: of the run, with the model's keys as the folder's config.json has them.

  Raises:
    UserError: the folder's tensors are not those of the model, or the run's folder is not to be
      written.
  """
  model = build_model(config.model, config.batch.max_target_length)
  leaves = flatten_dict(model.shapes())
  specs = {
    path: TensorSpec(PARAMETERS + "/".join(path), leaf.shape, np.dtype(leaf.dtype))
    for path, leaf in leaves.items()
  }
  run, num_bytes = RunFolder.of(config.run), total_bytes(specs.values())
  shapes = {path: spec.shape for path, spec in specs.items()}
  given = f"run_name={config.run.run_name} base_output_directory={config.run.base_output_directory}"
  with (
    FolderReader(folder, shapes, model.axes()) as reader,
    whole_folder(given, run.path, num_bytes) as unfinished,
    ByteProgress("reading", num_bytes) as progress,
  ):
    made = RunFolder(unfinished)
    carry_along(folder, made.hugging_face)
    made.config.write_text(yaml.safe_dump(to_flat_dict(config), sort_keys=False), "utf-8")
    values = _values(reader, specs, progress)
    origin = {"folder": str(folder.absolute()), "vocab_size": reader.options["vocab_size"]}
    write_parameters(
      made.checkpoints / "0", list(specs.values()), values, model_identity(config), origin
    )
    return Converted(
      run.path,
      reader.family.name,
      sum(math.prod(spec.shape) for spec in specs.values()),
      num_bytes,
      config.model.weight_dtype,
      tuple(_padding(config, reader)),
    )


def model_identity(config: Config) -> dict[str, Any]:
  """The keys that a run with these parameters must share, as JSON values."""
  values = to_flat_dict(config)
  return {key: values[key] for key in (*SHAPE, *PLAIN, "weight_dtype")}


def _values(
  reader: FolderReader, specs: dict[tuple[str, ...], TensorSpec], progress: ByteProgress
) -> Iterator[np.ndarray]:
  """All parameters in parts, in the order of `specs`."""
  for path, spec in specs.items():
    for index in block_indices(spec.shape, spec.dtype):
      part = reader.read(path, index, spec.dtype)
      yield part
      progress.add(part.nbytes)


def _padding(config: Config, reader: FolderReader) -> Iterator[str]:
  added = config.model.vocab_size - reader.options["vocab_size"]
  if added:
    yield (
      f"vocab_size={config.model.vocab_size}: the folder's {reader.options['vocab_size']} rows, and "
      f"{added} of zeros after them, whose logits are 0 until they are trained"
    )
