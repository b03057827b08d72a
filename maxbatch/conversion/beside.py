"""A model's folder, here or on the Hugging Face hub, and its small files: tokenizer, generation."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxbatch.checkpoints.tensor_files import INDEX, SINGLE
from maxbatch.config.find import user_path
from maxbatch.config.schema import Config
from maxbatch.data.object_store import is_url
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.data.tokenizers.libraries import (
  HuggingFaceTokenizer,
  SentencePieceTokenizer,
  special_tokens,
)
from maxbatch.data.tokenizers.vocabulary_file import FileTokenizer, hub_folder, is_hub_name
from maxbatch.errors import UserError
from maxbatch.hugging_face.registry import is_model_folder
from maxbatch.run_folder.paths import RunFolder

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = (
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "chat_template.json",
  "vocab.json",
  "merges.txt",
  "spiece.model",
)
_ALONE = {HuggingFaceTokenizer: "tokenizer.json", SentencePieceTokenizer: "tokenizer.model"}
"""What a vocabulary's own file is called in a model's folder."""


def carry_along(source: Path, target: Path) -> None:
  """Copies what a model's folder holds beside its weights. Raises OSError where it cannot."""
  target.mkdir(exist_ok=True)
  _copy(source, target, (CONFIG, GENERATION, *TOKENIZER))


def tokenizer_keys(folder: Path, run: RunFolder) -> list[str]:
  """Returns the keys for the tokenizer of a model's folder, once it is carried along into a run's.
  Raises UserError: tokenizer_config.json cannot be read."""
  place = f"tokenizer_path={run.hugging_face.absolute()}"
  if (folder / "tokenizer.json").is_file():
    # A model without such a token was not trained with one.
    declared = special_tokens(folder / "tokenizer_config.json")
    without = [f"add_{role}=false" for role in ("bos", "eos") if role not in declared]
    return ["tokenizer_type=huggingface", place, *without]
  if (folder / "tokenizer.model").is_file():
    return ["tokenizer_type=sentencepiece", place]
  return []


def origin_of(config: Config) -> Path | None:
  """Returns the folder of the model that a run began with, if it is known."""
  began_with = user_path(config.checkpoint.load_parameters_path)
  folders = (
    RunFolder.of(config.run).hugging_face,
    user_path(config.model.model_name),
    began_with,
    # Another run, or one of its steps.
    RunFolder(began_with).hugging_face,
    RunFolder(began_with.parent.parent).hugging_face,
  )
  return next((folder for folder in folders if is_model_folder(folder)), None)


def write_beside(config: Config, target: Path) -> Tokenizer:
  """Writes a run's tokenizer and generation_config.json into a model's folder.

  The tokenizer is that of the run's keys, if transformers has such files, else its first model's.

  Returns the tokenizer. Raises UserError if it cannot be read, OSError if a file cannot be written.
  """
  tokenizer, origin = build_tokenizer(config.data), origin_of(config)
  own = _ALONE.get(type(tokenizer)) if isinstance(tokenizer, FileTokenizer) else None
  if own is not None and isinstance(tokenizer, FileTokenizer):
    _copy(tokenizer.file.path.parent, target)
    shutil.copyfile(tokenizer.file.path, target / own)
    if not (target / "tokenizer_config.json").exists():
      _write_json(target / "tokenizer_config.json", _tokenizer_config(tokenizer))
  elif origin is not None:
    _copy(origin, target)
  if origin is not None and (origin / GENERATION).is_file():
    shutil.copyfile(origin / GENERATION, target / GENERATION)
  else:
    _write_json(target / GENERATION, token_ids(tokenizer))
  return tokenizer


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
  """Returns the special ids as config.json and generation_config.json name them."""
  ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
  return {f"{role}_token_id": id_ for role, id_ in ids.items()}


def _tokenizer_config(tokenizer: FileTokenizer) -> dict[str, Any]:
  if not isinstance(tokenizer, HuggingFaceTokenizer):
    return {"tokenizer_class": "LlamaTokenizer"}
  ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
  tokens = {f"{role}_token": tokenizer.inner.id_to_token(id_) for role, id_ in ids.items()}
  return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}


def _copy(source: Path, target: Path, names: Sequence[str] = TOKENIZER) -> None:
  for name in names:
    if (source / name).is_file():
      shutil.copyfile(source / name, target / name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_WEIGHTS = (SINGLE, INDEX, "model-*.safetensors")


def model_folder(key: str, name: str, token: str = "") -> Path:
  """Returns the folder that `key=name` means; a name on the hub is downloaded unless cached.

  Args:
    name: a folder, or a model as OWNER/MODEL.
    token: hf_access_token; empty: as the hub's library finds one.

  Raises UserError: there is neither.
  """
  given, path = f"{key}={name}", user_path(name)
  if is_url(name):
    raise UserError(f"{given}: a model cannot be read from a URL; copy its folder to this machine")
  if path.is_dir():
    return path
  if os.path.lexists(path) or not is_hub_name(name):
    raise UserError(
      f"{given}: there is no such folder; give one that holds {CONFIG} and {SINGLE}, or a model's "
      "name on the Hugging Face hub, such as Qwen/Qwen3-0.6B"
    )
  files = (CONFIG, GENERATION, *TOKENIZER, *_WEIGHTS)
  return hub_folder(given, name, files, shown="*.safetensors' --include '*.json", token=token)
