"""A Hugging Face tokenizer.json, by the tokenizers library."""

import json
from pathlib import Path
from typing import Any

from maxbatch.config.registry import library
from maxbatch.config.schema import DataConfig
from maxbatch.data.tokenizers.vocabulary_file import (
  FileTokenizer,
  VocabularyFile,
  read_vocabulary,
  special_ids,
)
from maxbatch.errors import UserError

_NAME = "tokenizer.json"


class HuggingFaceTokenizer(FileTokenizer):
  """See `FileTokenizer`."""

  @staticmethod
  def load(file: VocabularyFile) -> Any:
    tokenizers = library("tokenizers", str(file))
    try:
      inner = tokenizers.Tokenizer.from_str(file.content.decode())
    except Exception as error:  # The library raises no narrower class.
      raise file.damaged(error) from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return inner

  def ids_of(self, text: str) -> list[int]:
    (encoding,) = self.inner.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids

  def text_of(self, ids: list[int]) -> str:
    return self.inner.decode(ids, skip_special_tokens=True)


def build(data: DataConfig) -> HuggingFaceTokenizer:
  """Builds the tokenizer of tokenizer_path, a tokenizer.json or the folder that holds it.

  The special tokens are those of tokenizer_config.json beside it, if it is there. Raises UserError:
  there is none, it is damaged, or a special token is missing.
  """
  file = read_vocabulary(data, _NAME)
  inner = HuggingFaceTokenizer.load(file)
  own = declared_tokens(file)
  added = inner.get_added_tokens_decoder().values()
  known = [token.content for token in added if token.special]
  ids = {role: inner.token_to_id(token) for role, token in own.items()}
  # Ids may have gaps: the largest counts, not how many there are.
  size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
  special = special_ids(data, file, ids, inner.token_to_id, known)
  return HuggingFaceTokenizer(file, size, *special)


def declared_tokens(file: VocabularyFile) -> dict[str, str]:
  return special_tokens(file.path.with_name("tokenizer_config.json"), f"{file}: ")


def special_tokens(path: Path, given: str = "") -> dict[str, str]:
  """Reads the special tokens by role from a tokenizer_config.json; none without one. Raises
  UserError: it cannot be read."""
  try:
    said = json.loads(path.read_text())
    tokens = {role: said.get(f"{role}_token") for role in ("bos", "eos", "pad")}
  except FileNotFoundError:
    return {}
  except (OSError, ValueError, AttributeError, RecursionError) as error:
    raise UserError(f"{given}{path} beside it cannot be read ({error}); correct it") from error
  # A token is its text, or an object that has it.
  texts = {
    role: token.get("content") if isinstance(token, dict) else token
    for role, token in tokens.items()
  }
  return {role: text for role, text in texts.items() if isinstance(text, str)}
