"""Tokenizers by the libraries of others: a Hugging Face tokenizer.json, and vocabularies of pieces in one file,
SentencePiece models and tiktoken's ranks, read as Llama 3 and MaxText read them."""

import base64
import json
from pathlib import Path
from typing import Any

from maxbatch.config.registry import library
from maxbatch.config.schema import DataConfig
from maxbatch.data.tokenizers.vocabulary_file import (
  FileTokenizer,
  VocabularyFile,
  bounded_pieces,
  read_vocabulary,
  special_ids,
)
from maxbatch.errors import UserError

_HUGGING_FACE = "tokenizer.json"


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


def build_huggingface(data: DataConfig) -> HuggingFaceTokenizer:
  """Builds the tokenizer of tokenizer_path, a tokenizer.json or the folder that holds it.

  The special tokens are those of tokenizer_config.json beside it, if it is there. Raises UserError:
  there is none, it is damaged, or a special token is missing.
  """
  file = read_vocabulary(data, _HUGGING_FACE)
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


# A file of ranks says neither how text is divided into words nor which tokens are special: these
# are Llama 3's.
_PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUM_SPECIAL = 256
_NAMED = (
  "<|begin_of_text|>",
  "<|end_of_text|>",
  "<|reserved_special_token_0|>",
  "<|reserved_special_token_1|>",
  "<|finetune_right_pad_id|>",
  "<|step_id|>",
  "<|start_header_id|>",
  "<|end_header_id|>",
  "<|eom_id|>",
  "<|eot_id|>",
  "<|python_tag|>",
  "<|image|>",
)


class SentencePieceTokenizer(FileTokenizer):
  """See `FileTokenizer`."""

  @staticmethod
  def load(file: VocabularyFile) -> Any:
    inner = library("sentencepiece", str(file)).SentencePieceProcessor()
    try:
      inner.LoadFromSerializedProto(file.content)
    except (RuntimeError, OSError) as error:
      raise file.damaged(error) from error
    return inner

  def ids_of(self, text: str) -> list[int]:
    return self.inner.encode(text)

  def text_of(self, ids: list[int]) -> str:
    return self.inner.decode(ids)


def build_sentencepiece(data: DataConfig) -> SentencePieceTokenizer:
  """Builds the tokenizer of tokenizer_path, a SentencePiece model or the folder that holds it.
  Raises UserError: there is none, it is damaged, or a special token is missing."""
  file = read_vocabulary(data, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
  inner = SentencePieceTokenizer.load(file)
  size = inner.get_piece_size()

  def find(token: str) -> int | None:
    id_ = inner.piece_to_id(token)
    return id_ if inner.id_to_piece(id_) == token else None

  declared = {"bos": inner.bos_id(), "eos": inner.eos_id(), "pad": inner.pad_id()}
  own = {role: id_ if id_ >= 0 else None for role, id_ in declared.items()}
  known = [inner.id_to_piece(id_) for id_ in range(size) if inner.is_control(id_)]
  return SentencePieceTokenizer(file, size, *special_ids(data, file, own, find, known))


class TiktokenTokenizer(FileTokenizer):
  """See `FileTokenizer`."""

  @staticmethod
  def load(file: VocabularyFile) -> Any:
    tiktoken = library("tiktoken", str(file))
    try:
      ranks = _ranks(file.content)
    except ValueError as error:
      raise file.damaged(error) from error
    rest = range(2, _NUM_SPECIAL - len(_NAMED) + 2)
    names = [*_NAMED, *(f"<|reserved_special_token_{number}|>" for number in rest)]
    special = {name: len(ranks) + place for place, name in enumerate(names)}
    return tiktoken.Encoding(
      name=file.path.name, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )

  def ids_of(self, text: str) -> list[int]:
    pieces = bounded_pieces(text)
    return [id_ for piece in pieces for id_ in self.inner.encode_ordinary(piece)]

  def text_of(self, ids: list[int]) -> str:
    first_special = self.vocab_size - _NUM_SPECIAL
    return self.inner.decode([id_ for id_ in ids if id_ < first_special])


def build_tiktoken(data: DataConfig) -> TiktokenTokenizer:
  """Builds the tokenizer of tokenizer_path, a tiktoken file or the folder that holds it. Raises
  UserError: there is none, it is damaged, or a special token is missing."""
  file = read_vocabulary(data, "tokenizer.model", "tokenizer.tiktoken", "original/tokenizer.model")
  ids = TiktokenTokenizer.load(file)._special_tokens
  own = {"bos": ids[_NAMED[0]], "eos": ids[_NAMED[1]], "pad": ids[_NAMED[4]]}
  special = special_ids(data, file, own, ids.get, list(ids))
  return TiktokenTokenizer(file, max(ids.values()) + 1, *special)


def _ranks(content: bytes) -> dict[bytes, int]:
  """Reads the tokens with their ranks. Raises ValueError: a line or rank is wrong."""
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(content.splitlines(), start=1):
    token, _, rank = line.partition(b" ")
    try:
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
      raise ValueError(f"line {number} is not a token in base64 and its rank: {error}") from None
  if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
    raise ValueError(f"its {len(ranks)} ranks are not 0, 1, 2 and so on")
  if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
    raise ValueError(f"{len(missing)} bytes have no token, the first is 0x{missing[0]:02x}")
  return ranks
