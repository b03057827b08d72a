"""From a checkpoint with adapters to a PEFT adapter: adapter_model.safetensors, adapter_config.json.

peft puts an adapter beside each of a model's matrices. Where theirs is several of ours side by side, as
GPT-2's c_attn is query, key and value, the adapters become one: their A below each other, their B
along a diagonal. Its rank is the sum of theirs, and its alpha grows with it, so that A·B counts as
often as before.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxbatch.checkpoints.parameters_only import PARAMETERS
from maxbatch.checkpoints.tensor_files import TensorSpec, total_bytes, write_tensors
from maxbatch.config.schema import Config
from maxbatch.conversion.beside import origin_of
from maxbatch.conversion.output_folder import Converted, converted, model_keys, whole_folder
from maxbatch.conversion.whole import WholeCheckpoint, whole_checkpoint
from maxbatch.errors import UserError
from maxbatch.hugging_face.family import Tensor
from maxbatch.hugging_face.registry import family_for
from maxbatch.models import lora
from maxbatch.models.registry import build_model
from maxbatch.models.trainable import ADAPTER

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_KERNEL = ".kernel"


def convert_to_peft(step: Path, config: Config, folder: Path) -> Converted:
  """Writes a checkpoint's adapters as a folder that peft loads. Raises UserError: the run has no
  adapters, or other parameters trained too; or the folder is not to be written."""
  model = build_model(
    config.model, config.batch.max_target_length, trainable=config.optimizer.trainable
  )
  _check(config, {path for path in model.axes() if path not in model.frozen}, step)
  checkpoint = whole_checkpoint(step, config)
  adapted = {".".join(path[:-1]) for path in model.axes() if path[-1] == ADAPTER[0]}
  family, _ = family_for(model_keys(config), config.batch.max_target_length)
  plain = build_model(lora.without_adapters(config.model), config.batch.max_target_length)
  table = family.table([".".join(path) for path in plain.axes()])
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
    (unfinished / "model.safetensors").rename(unfinished / _WEIGHTS)
    values = _adapter_config(config, fused)
    (unfinished / _CONFIG).write_text(json.dumps(values, indent=2) + "\n", "utf-8")
  return converted(folder, family.name, specs, ())


def _check(config: Config, trained: set[tuple[str, ...]], step: Path) -> None:
  if not config.model.lora_rank:
    raise UserError(
      f"checkpoint={step}: its run has no adapters (lora_rank=0), so there is nothing for peft; "
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
    """What peft calls it, within a layer: `self_attn.q_proj`."""
    name = self.tensor.name.removesuffix(".weight")
    return name.partition("{}.")[2] or name

  def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values, layer after layer: A (R, inputs) and B (outputs, R)."""
    stored = {name: [self._whole(name, each) for each in ADAPTER] for name in self._adapted}
    outputs = {name: self._outputs(name) for name in self._parts}
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
      module = self.tensor.name.format(layer).removesuffix(".weight")
      prefix = f"base_model.model.{module}"
      yield f"{prefix}.lora_A.weight", np.ascontiguousarray(np.concatenate(rows, axis=0))
      yield f"{prefix}.lora_B.weight", np.ascontiguousarray(np.concatenate(columns, axis=1))

  def _whole(self, name: str, part: str) -> np.ndarray:
    return self._checkpoint.whole(f"{PARAMETERS}{name.replace('.', '/')}/{part}")

  def _outputs(self, name: str) -> int:
    shape = self._checkpoint[f"{PARAMETERS}{name.replace('.', '/')}/kernel"].shape
    return math.prod(shape[self.tensor.in_dims + self.tensor.is_layered :])


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
