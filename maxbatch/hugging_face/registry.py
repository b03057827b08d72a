"""The families that are known, and which of them a config.json or a model of ours belongs to.

To add one: a file in families/, and its Family in FAMILIES (docs/extending.md).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxbatch.errors import UserError
from maxbatch.hugging_face.families.gemma import GEMMA2, GEMMA3
from maxbatch.hugging_face.families.gpt2 import GPT2
from maxbatch.hugging_face.families.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from maxbatch.hugging_face.families.mixtures import (
  DEEPSEEK_V2,
  DEEPSEEK_V3,
  GPT_OSS,
  MIXTRAL,
  OLMOE,
  QWEN3_MOE,
)
from maxbatch.hugging_face.family import Family, Ours
from maxbatch.hugging_face.model_keys import read_config_json

FAMILIES: tuple[Family, ...] = (
  LLAMA,
  MISTRAL,
  QWEN2,
  QWEN3,
  GEMMA2,
  GEMMA3,
  OLMO2,
  GPT2,
  MIXTRAL,
  OLMOE,
  QWEN3_MOE,
  GPT_OSS,
  DEEPSEEK_V2,
  DEEPSEEK_V3,
)
"""A model of ours is written as the first that can say all of it."""


def is_model_folder(path: Path) -> bool:
  return (path / "config.json").is_file()


def family_of(values: Mapping[str, Any], where: str) -> Family:
  """Returns the family that a config.json names. Raises UserError: none, or an unknown one."""
  known = {name: family for family in FAMILIES for name in family.model_types}
  model_type = str(values.get("model_type"))
  if model_type not in known:
    is_named = "model_type" in values
    given = f"model_type={model_type} is not supported" if is_named else "no model_type"
    raise UserError(f"{where}: {given}; what works: {', '.join(known)}")
  family = known[model_type]
  named = values.get("architectures") or list(family.architectures)
  named = named if isinstance(named, list) else [named]
  if not any(name in family.architectures for name in named):
    raise UserError(
      f"{where}: architectures={named} is not a language model of type {model_type}; what works: "
      f"{' or '.join(family.architectures)}"
    )
  return family


def read_folder(folder: Path) -> tuple[Family, dict[str, Any]]:
  """Reads the family of a folder's model, and all model keys of our configuration that it gives.
  Raises UserError: the folder's config.json is missing, or says what is not computed here."""
  values, where = read_config_json(folder), str(folder / "config.json")
  family = family_of(values, where)
  return family, family.options(values, where)


def family_for(model: Ours, max_target_length: int) -> tuple[Family, dict[str, Any]]:
  """Returns the family as which a model of ours can be written, and its config.json. Raises
  UserError: none computes what the model does; says for each what it could not say."""
  obstacles = []
  for family in FAMILIES:
    try:
      return family, family.config_json(model, max_target_length)
    except UserError as error:
      obstacles.append(str(error))
  raise UserError(
    "no family of Hugging Face computes what this model does:\n" + "\n".join(obstacles)
  )
