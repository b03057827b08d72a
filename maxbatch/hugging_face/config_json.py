"""A config.json as a mapping that knows its file, the defaults behind it, and what nobody has read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxbatch.errors import UserError

_LONGEST_VALUE = 100


def words(*lines: str) -> frozenset[str]:
  """Returns the words of some lines of text."""
  return frozenset(word for line in lines for word in line.split())


HARMLESS = words(
  """_name_or_path name_or_path architectures model_type transformers_version torch_dtype dtype
  use_cache cache_implementation initializer_range bos_token_id eos_token_id pad_token_id
  pretraining_tp id2label label2id num_labels task_specific_params tokenizer_class return_dict
  output_attentions output_hidden_states chunk_size_feed_forward problem_type is_encoder_decoder
  is_decoder torchscript attn_implementation _attn_implementation_autoset _num_labels
  transformers.js_config"""
)
"""Keys that no model computes with: of files, tokens, training and classes. In which precision the
weights are kept (dtype) is read from the weights."""


class ConfigJson:
  """The values of a config.json. Absent keys have the family's default; null reads as None."""

  def __init__(self, where: str, values: Mapping[str, Any], defaults: Mapping[str, Any]):
    self.where = where
    self._given = values
    self._values = {**defaults, **values}
    self._read: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self._read.add(key)
    return self._values.get(key)

  def integer(self, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
    """Returns a whole number; UserError if it is something else, out of its range, or missing."""
    value = self[key]
    is_one = isinstance(value, int) and not isinstance(value, bool)
    if not is_one or not least <= value <= most:
      raise self.refusal(key, f"a whole number is needed, at least {least} and at most {most}")
    return value

  @property
  def num_layers(self) -> int:
    return self.integer("num_hidden_layers", most=10_000)

  def word(self, key: str) -> str | None:
    """Returns a text, or another value as one; None where there is none."""
    value = self[key]
    return None if value is None else str(value)

  def mapping(self, key: str) -> Mapping[str, Any]:
    """Returns a JSON object; empty where there is none. UserError if it is something else."""
    value = self[key]
    if value is not None and not isinstance(value, dict):
      raise self.refusal(key, "an object is needed, such as {}")
    return value or {}

  def refusal(self, key: str, why: str) -> UserError:
    """Returns the error for the value of `key`."""
    return UserError(f"{self.where}: {key}={_shown(self._values.get(key))}: {why}")

  def refuse_unread(self, model_type: str) -> None:
    """Raises UserError for the first key that was not read and is not known to be harmless."""
    for key, value in self._given.items():
      if key not in self._read and key not in HARMLESS and value is not None:
        raise self.refusal(
          key,
          f"maxbatch would ignore this key of a model of type {model_type}. If the model computes "
          "the same without it, remove it from a copy of the file",
        )


def _shown(value: object) -> str:
  text = json.dumps(value)
  return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def read_config_json(folder: Path) -> dict[str, Any]:
  """Reads the config.json of a folder. Raises UserError: it cannot be read, or is not a JSON
  object."""
  path = folder / "config.json"
  try:
    values = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"{path}: cannot be read: {error.strerror}") from error
  except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
    raise UserError(f"{path}: not JSON in UTF-8: {error}") from error
  if not isinstance(values, dict):
    raise UserError(f'{path}: a JSON object is needed, such as {{"model_type": "llama"}}')
  return values
