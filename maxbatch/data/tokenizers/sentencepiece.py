"""A SentencePiece model, by the sentencepiece library."""

from typing import Any

from maxbatch.config.registry import library
from maxbatch.config.schema import DataConfig
from maxbatch.data.tokenizers.vocabulary_file import (
  FileTokenizer,
  VocabularyFile,
  read_vocabulary,
  special_ids,
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


def build(data: DataConfig) -> SentencePieceTokenizer:
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
