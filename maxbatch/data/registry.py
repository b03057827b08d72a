"""Tokenizers and datasets by name (docs/extending.md shows how to add one)."""

import dataclasses
from collections.abc import Callable

from maxbatch.config.registry import registered
from maxbatch.config.schema import DataConfig
from maxbatch.data import synthetic, text
from maxbatch.data.dataset import Dataset
from maxbatch.data.tokenizer import ByteTokenizer, Tokenizer
from maxbatch.data.tokenizers import huggingface, sentencepiece, tiktoken
from maxbatch.errors import UserError


def _byte(data: DataConfig) -> Tokenizer:
  given = {
    "tokenizer_path": data.tokenizer_path,
    "bos_token": data.bos_token,
    "eos_token": data.eos_token,
    "pad_token": data.pad_token,
  }
  if unread := [f"{key}={value}" for key, value in given.items() if value]:
    raise UserError(
      f"tokenizer_type=byte reads no vocabulary, and {' '.join(unread)}; give tokenizer_type="
      "huggingface, sentencepiece or tiktoken as well, or leave them empty"
    )
  return ByteTokenizer()


TOKENIZERS: dict[str, Callable[[DataConfig], Tokenizer]] = {
  "byte": _byte,
  "huggingface": huggingface.build,
  "sentencepiece": sentencepiece.build,
  "tiktoken": tiktoken.build,
}

DATASETS: dict[str, Callable[[DataConfig, Tokenizer, int], Dataset]] = {
  "text": text.build,
  "synthetic": synthetic.build,
}
"""By name, what makes a dataset of (data, tokenizer, max_target_length)."""


def build_tokenizer(data: DataConfig) -> Tokenizer:
  """The tokenizer that `tokenizer_type` names.

  Raises:
    UserError: for an unknown name, a vocabulary that cannot be used, or special ids that are no ids
      of the vocabulary.
  """
  tokenizer = registered("tokenizer_type", data.tokenizer_type, TOKENIZERS)(data)
  special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
  if not all(0 <= each < tokenizer.vocab_size for each in special):
    size = tokenizer.vocab_size
    raise UserError(
      f"tokenizer_type={data.tokenizer_type}: bos_id, eos_id, pad_id = {special} must be ids below "
      f"vocab_size={size}; for example {(size, size + 1, size + 2)} with vocab_size {size + 3}"
    )
  return tokenizer


def build_dataset(data: DataConfig, max_target_length: int) -> Dataset:
  """The dataset that `dataset_type` names, in rows of `max_target_length` tokens.

  Raises:
    UserError: for an unknown name, or input that cannot be used; names it.
  """
  build = registered("dataset_type", data.dataset_type, DATASETS)
  tokenizer = build_tokenizer(data)
  dataset = build(data, tokenizer, max_target_length)
  return dataclasses.replace(dataset, tokenizer_version=tokenizer.version)
