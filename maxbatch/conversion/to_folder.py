"""From a checkpoint to a Hugging Face folder (safetensors, config.json, tokenizer), or to a PEFT adapter.

peft puts an adapter beside each of a model's matrices. Where theirs is several of ours side by side, as
GPT-2's c_attn is query, key and value, the adapters become one: their A below each other, their B
along a diagonal. Its rank is the sum of theirs, and its alpha grows with it, so that A·B counts as
often as before.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxbatch.checkpoints.record import PARAMETERS
from maxbatch.checkpoints.tensor_files import MAX_FILE_BYTES, TensorSpec, total_bytes, write_tensors
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.conversion.beside import CONFIG, origin_of, token_ids, write_beside
from maxbatch.conversion.output_folder import Converted, converted, model_keys, whole_folder
from maxbatch.conversion.whole import WholeCheckpoint, whole_checkpoint
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.data.tokenizers.vocabulary_file import FileTokenizer
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import LogicalAxes
from maxbatch.hugging_face.family import Family, Shape, Tensor
from maxbatch.hugging_face.model_keys import HARMLESS, PLAIN, differing, read_config_json
from maxbatch.hugging_face.registry import family_for, read_folder
from maxbatch.models import lora
from maxbatch.models.float8 import AMAX
from maxbatch.models.lora import ADAPTER, without_adapters
from maxbatch.models.registry import build_model
from maxbatch.run_folder.progress import ByteProgress


def convert_to_folder(
  step: Path, config: Config, folder: Path, dtype: str = "", vocab_size: int = 0
) -> Converted:
  """Writes a checkpoint's parameters as a Hugging Face folder, adapters merged.

  Args:
    dtype: of the tensors; empty: as in the checkpoint.
    vocab_size: how many rows of the vocabulary are written; 0: all.

  Raises UserError: the checkpoint is not one of this configuration or is damaged, no family can say
  what the model computes, or the folder is not to be written.
  """
  checkpoint = whole_checkpoint(step, config)
  _check_adapters(checkpoint, config)
  model = without_adapters(config.model)
  plain = dataclasses.replace(config, model=model)
  return _write(checkpoint, plain, folder, dtype, vocab_size)


def _write(
  checkpoint: WholeCheckpoint, config: Config, folder: Path, dtype: str, vocab_size: int
) -> Converted:
  _check_model(checkpoint, config)
  rows = _rows(config, vocab_size)
  source = _Source(checkpoint, config, rows)
  family, values = _family(config, rows)
  kind = np.dtype(jnp.dtype(dtype)) if dtype else source.dtype
  table = family.table(source.shapes, config.model.first_num_dense_layers)
  specs = [spec for tensor in table for spec in source.specs(tensor, kind)]
  num_bytes = total_bytes(specs)
  with (
    whole_folder(f"to_hf={folder}", f"to_hf={folder}-2", folder, num_bytes) as unfinished,
    ByteProgress("writing", num_bytes) as progress,
  ):
    write_tensors(unfinished, specs, progress.over(source.values(table, kind)), MAX_FILE_BYTES)
    tokenizer = write_beside(config, unfinished)
    # With the special ids where none are said, and the dtype of the weights.
    ids = {} if origin_of(config) else token_ids(tokenizer)
    key = "torch_dtype" if "torch_dtype" in values else "dtype"
    values = ids | values | {key: kind.name}
    (unfinished / CONFIG).write_text(json.dumps(values, indent=2) + "\n", "utf-8")
  return converted(folder, family.name, specs, list(_vocabulary(rows, tokenizer, config)))


class _Source:
  def __init__(self, checkpoint: WholeCheckpoint, config: Config, vocab_size: int):
    model = build_model(config.model, config.batch.max_target_length)
    self._checkpoint, self._vocab_size = checkpoint, vocab_size
    self._axes = {".".join(path): axes for path, axes in model.axes().items()}
    _check_leaves(checkpoint, self._axes)
    self.shapes = {path: self._shape(path) for path in self._axes}
    """Shapes of one layer, with the vocabulary that is written."""
    self.dtype = checkpoint[_leaf(next(iter(self._axes)))].dtype

  def specs(self, tensor: Tensor, dtype: np.dtype) -> Iterator[TensorSpec]:
    """Yields what a row of the table becomes: one tensor, or one for each layer, or each expert."""
    experts = max(tensor.stacked_dims - 1, 0)
    shape = tensor.shape([self.shapes[path][experts:] for path in tensor.parameters])
    for name, _ in tensor.names(self._checkpoint[_leaf(tensor.parameters[0])].shape):
      yield TensorSpec(name, shape, dtype)

  def values(self, table: tuple[Tensor, ...], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yields their tensors in the order of the table, layer after layer, expert after expert."""
    for tensor in table:
      parts = [self._layers(path, stacked=tensor.is_layered) for path in tensor.parameters]
      for ours in zip(*parts, strict=True):
        each = zip(*ours, strict=True) if tensor.stacked_dims > 1 else [ours]
        for one in each:
          yield np.ascontiguousarray(tensor.theirs(one), dtype)

  def _layers(self, path: str, *, stacked: bool) -> Iterator[np.ndarray]:
    """Yields a parameter layer by layer, or all of it."""
    blocks = self._checkpoint.blocks(_leaf(path))
    if stacked:
      for block in blocks:
        yield from block
      return
    stored = self._checkpoint[_leaf(path)]
    whole, first = np.empty(stored.shape, stored.dtype), 0
    for block in blocks:
      whole[first : first + len(block)] = block
      first += len(block)
    yield whole[tuple(slice(0, size) for size in self.shapes[path])]

  def _shape(self, path: str) -> Shape:
    axes, shape = self._axes[path], self._checkpoint[_leaf(path)].shape
    return tuple(
      self._vocab_size if axis == "vocab" else size
      for axis, size in zip(axes, shape, strict=True)
      if axis != "layers"
    )


def _leaf(path: str) -> str:
  return PARAMETERS + path.replace(".", "/")


def _check_model(checkpoint: WholeCheckpoint, config: Config) -> None:
  ours = model_keys(config)
  saved = {key: value for key, value in checkpoint.record["identity"].items() if key in ours}
  # An option of the model that the version which wrote it did not have was off.
  result = differing({**ours, **PLAIN, **saved}, ours)
  if result is not None:
    key, value = result
    raise _other_run(checkpoint, key, ours[key], value)


def _check_adapters(checkpoint: WholeCheckpoint, config: Config) -> None:
  """Raises UserError: the checkpoint's adapters were trained with other keys."""
  saved, ours = checkpoint.record["identity"], to_flat_dict(config)
  for key in ("lora_rank", "lora_alpha", "lora_targets") if saved.get("lora_rank") else ():
    if saved[key] != ours[key]:
      raise _other_run(checkpoint, key, ours[key], saved[key])


def _other_run(checkpoint: WholeCheckpoint, key: str, ours: object, saved: object) -> UserError:
  return UserError(
    f"{key}={ours} is not what checkpoint={checkpoint.folder} was written with, {saved}; give the "
    f"configuration of its run: config={checkpoint.folder.parent.parent / 'config.yml'}"
  )


def _check_leaves(checkpoint: WholeCheckpoint, axes: Mapping[str, LogicalAxes]) -> None:
  leaves = {name for name in checkpoint.record["leaves"] if name.startswith(PARAMETERS)}
  # Magnitudes that quantization=fp8 keeps are of a run, not of its model.
  saved = {name for name in leaves if name.rpartition("/")[2] != AMAX}
  ours = {_leaf(path) for path in axes}
  if different := sorted(saved ^ ours):
    raise UserError(
      f"checkpoint={checkpoint.folder}: {different[0]} is in "
      f"{'the checkpoint' if different[0] in saved else 'the configuration'} alone, so they are of "
      "different models; give the configuration of its run: "
      f"config={checkpoint.folder.parent.parent / 'config.yml'}"
    )


def _rows(config: Config, vocab_size: int) -> int:
  if vocab_size > config.model.vocab_size:
    raise UserError(
      f"export_vocab_size={vocab_size} is more than the {config.model.vocab_size} rows of the run; "
      "leave it out to write them all"
    )
  return vocab_size or config.model.vocab_size


def _family(config: Config, vocab_size: int) -> tuple[Family, dict[str, Any]]:
  """Returns the family that the run began as, if its model still is of it, else the first that
  fits; and the config.json, which is the original one if it still says all."""
  ours = model_keys(config) | {"vocab_size": vocab_size}
  length, origin = config.batch.max_target_length, origin_of(config)
  if origin is None:
    return family_for(ours, length)
  began_as = read_config_json(origin)
  family, options = read_folder(origin)
  if family.text_key not in began_as and differing({**PLAIN, **options}, ours) is None:
    return family, began_as
  said = {key: value for key, value in began_as.items() if key in HARMLESS}
  try:
    return family, said | family.config_json(ours, length)
  except UserError:
    family, values = family_for(ours, length)
    return family, said | values


def _vocabulary(rows: int, tokenizer: Tokenizer, config: Config) -> Iterator[str]:
  if rows < config.model.vocab_size:
    yield f"export_vocab_size={rows}: the last {config.model.vocab_size - rows} rows are left out"
  elif isinstance(tokenizer, FileTokenizer) and rows > tokenizer.vocab_size:
    yield (
      f"the vocabulary has {rows} rows and the tokenizer {tokenizer.vocab_size} tokens; "
      f"export_vocab_size={tokenizer.vocab_size} leaves out the others"
    )


_ADAPTER_WEIGHTS, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_KERNEL = ".kernel"


def convert_to_peft(step: Path, config: Config, folder: Path) -> Converted:
  """Writes a checkpoint's adapters as a folder that peft loads. Raises UserError: the run has no
  adapters, or other parameters trained too; or the folder is not to be written."""
  length, trainable = config.batch.max_target_length, config.optimizer.trainable
  model = build_model(config.model, length, trainable=trainable)
  _check_trained(config, {path for path in model.axes() if path not in model.frozen}, step)
  checkpoint = whole_checkpoint(step, config)
  _check_adapters(checkpoint, config)
  adapted = {".".join(path[:-1]) for path in model.axes() if path[-1] == ADAPTER[0]}
  if routed := sorted(name for name in adapted if ".experts." in name or name.endswith(".router")):
    raise UserError(
      f"to_peft={folder}: {routed[0]} has adapters, and peft has none beside the matrices of experts and "
      "routers; to_hf writes all parameters, adapters merged"
    )
  family, _ = family_for(model_keys(config), config.batch.max_target_length)
  plain = build_model(lora.without_adapters(config.model), config.batch.max_target_length)
  dense = config.model.first_num_dense_layers
  table = family.table([".".join(path) for path in plain.axes()], dense)
  fused = [
    _Fused(tensor, adapted, checkpoint)
    for tensor in table
    if any(name.removesuffix(_KERNEL) in adapted for name in tensor.parameters)
  ]
  tensors = dict(pair for each in fused for pair in each.tensors())
  specs = [TensorSpec(name, each.shape, each.dtype) for name, each in tensors.items()]
  given = f"to_peft={folder}"
  with whole_folder(given, f"{given}-2", folder, total_bytes(specs)) as unfinished:
    write_tensors(unfinished, specs, iter(tensors.values()))
    (unfinished / "model.safetensors").rename(unfinished / _ADAPTER_WEIGHTS)
    values = _adapter_config(config, fused)
    (unfinished / _ADAPTER_CONFIG).write_text(json.dumps(values, indent=2) + "\n", "utf-8")
  return converted(folder, family.name, specs, ())


def _check_trained(config: Config, trained: set[tuple[str, ...]], step: Path) -> None:
  if not config.model.lora_rank:
    raise UserError(
      f"checkpoint={step}: its run has no adapters (lora_rank=0), so there is no adapter to write; "
      "to_hf writes all parameters"
    )
  others = sorted("/".join(path) for path in trained if path[-1] not in ADAPTER)
  if others:
    raise UserError(
      f"checkpoint={step}: not only adapters were trained, but {others[0]} too (trainable="
      f"{list(config.optimizer.trainable)}), which a PEFT adapter does not hold; to_hf writes all "
      "parameters, adapters merged"
    )


class _Fused:
  """The adapters beside one of their matrices, those of all layers."""

  def __init__(self, tensor: Tensor, adapted: set[str], checkpoint: WholeCheckpoint):
    self.tensor, self._checkpoint = tensor, checkpoint
    self._parts = [name.removesuffix(_KERNEL) for name in tensor.parameters]
    self._adapted = [name for name in self._parts if name in adapted]

  @property
  def num(self) -> int:
    return len(self._adapted)

  @property
  def module(self) -> str:
    """Its name in peft, within a layer: `self_attn.q_proj`."""
    name = self.tensor.name.removesuffix(".weight")
    return name.partition("{}.")[2] or name

  def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and values, layer after layer: A (R, inputs) and B (outputs, R)."""
    stored = {name: [self._whole(name, each) for each in ADAPTER] for name in self._adapted}
    kernels = {name: f"{PARAMETERS}{name.replace('.', '/')}/kernel" for name in self._parts}
    first = self.tensor.in_dims + self.tensor.is_layered
    outputs = {n: math.prod(self._checkpoint[kernels[n]].shape[first:]) for n in kernels}
    layers = len(stored[self._adapted[0]][0]) if self.tensor.is_layered else 1
    for layer in range(layers):
      rows, columns = [], []
      for name, (a, b) in stored.items():
        a, b = (each[layer] if self.tensor.is_layered else each for each in (a, b))
        rank = a.shape[-1]
        rows.append(a.reshape(-1, rank).T)
        before = sum(outputs[other] for other in self._parts[: self._parts.index(name)])
        placed = np.zeros((sum(outputs.values()), rank), b.dtype)
        placed[before : before + outputs[name]] = b.reshape(rank, -1).T
        columns.append(placed)
      module = self.tensor.name.format(layer + self.tensor.first_layer).removesuffix(".weight")
      prefix = f"base_model.model.{module}"
      yield f"{prefix}.lora_A.weight", np.ascontiguousarray(np.concatenate(rows, axis=0))
      yield f"{prefix}.lora_B.weight", np.ascontiguousarray(np.concatenate(columns, axis=1))

  def _whole(self, name: str, part: str) -> np.ndarray:
    return self._checkpoint.whole(f"{PARAMETERS}{name.replace('.', '/')}/{part}")


def _adapter_config(config: Config, fused: list[_Fused]) -> dict[str, Any]:
  rank, scale = config.model.lora_rank, lora.scale(config.model)
  larger = {each.module: each.num for each in fused if each.num > 1}
  origin = origin_of(config)
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": str(origin or ""),
    "r": rank,
    "lora_alpha": scale * rank,
    "rank_pattern": {module: rank * num for module, num in larger.items()},
    "alpha_pattern": {module: scale * rank * num for module, num in larger.items()},
    "target_modules": [each.module for each in fused],
    "fan_in_fan_out": not fused[0].tensor.transposed,
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
  }
