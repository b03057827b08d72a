"""From a Hugging Face folder to a run's folder: config.yml, and a checkpoint of parameters alone."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import yaml

from maxbatch.checkpoints.parameters_only import write_parameters
from maxbatch.checkpoints.record import PARAMETERS
from maxbatch.checkpoints.tensor_files import TensorSpec, block_indices, total_bytes
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.conversion.beside import carry_along
from maxbatch.conversion.output_folder import Converted, converted, model_keys, whole_folder
from maxbatch.conversion.reading import FolderReader, leaves_by_path, reader_of
from maxbatch.models.registry import build_model
from maxbatch.precision.policy import policy_of
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.progress import ByteProgress


def convert_to_run(folder: Path, config: Config) -> Converted:
  """Writes the folder of a run that begins with a Hugging Face folder's parameters.

  Args:
    folder: with config.json and safetensors files.

  Raises UserError: the folder's tensors are not the model's, or the run's folder cannot be written.
  """
  policy = policy_of(config.precision)
  model = build_model(config.model, config.batch.max_target_length, policy=policy)
  leaves = leaves_by_path(model.shapes())
  specs = {
    path: TensorSpec(PARAMETERS + "/".join(path), leaf.shape, np.dtype(leaf.dtype))
    for path, leaf in leaves.items()
  }
  run, num_bytes = RunFolder.of(config.run), total_bytes(specs.values())
  given = f"run_name={config.run.run_name} base_output_directory={config.run.base_output_directory}"
  reader = reader_of(folder, model)
  with (
    whole_folder(given, f"run_name={run.free_name()}", run.path, num_bytes) as unfinished,
    ByteProgress("reading", num_bytes) as progress,
  ):
    made = RunFolder(unfinished)
    carry_along(folder, made.hugging_face)
    made.config.write_text(yaml.safe_dump(to_flat_dict(config), sort_keys=False), "utf-8")
    values, identity = progress.over(_values(reader, specs)), model_keys(config)
    origin = {"folder": str(folder.absolute()), "vocab_size": reader.options["vocab_size"]}
    write_parameters(made.checkpoints / "0", list(specs.values()), values, identity, origin)
    notes = list(_notes(config, reader))
  return converted(run.path, reader.family.name, specs.values(), notes)


def _values(reader: FolderReader, specs: dict[tuple[str, ...], TensorSpec]) -> Iterator[np.ndarray]:
  for path, spec in specs.items():
    for index in block_indices(spec.shape, spec.dtype):
      yield reader.read(path, index, spec.dtype)


def _notes(config: Config, reader: FolderReader) -> Iterator[str]:
  dtype = jnp.dtype(config.precision.weight_dtype)
  for theirs in sorted(
    each.name for each in reader.dtypes if jnp.promote_types(each, dtype) != dtype
  ):
    yield f"weight_dtype={dtype.name}: {theirs} in the folder, and so rounded"
  added = config.model.vocab_size - reader.options["vocab_size"]
  if added:
    yield (
      f"vocab_size={config.model.vocab_size}: the folder's {reader.options['vocab_size']} rows, and "
      f"{added} of zeros after them, whose logits are 0 until they are trained"
    )
