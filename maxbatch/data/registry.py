"""Tokenizers and datasets by name (docs/extending.md shows how to add one)."""

from collections.abc import Callable

from maxbatch.config.registry import registered
from maxbatch.config.schema import DataConfig
from maxbatch.data import mixed, synthetic, text
from maxbatch.data.dataset import Dataset
from maxbatch.data.mixture_keys import mixed_paths
from maxbatch.data.tokenizer import ByteTokenizer, Tokenizer
from maxbatch.errors import UserError


def _byte(data: DataConfig) -> Tokenizer:
  del data
  return ByteTokenizer()


TOKENIZERS: dict[str, Callable[[DataConfig], Tokenizer]] = {
  "byte": _byte,
}

DATASETS: dict[str, Callable[[DataConfig, Tokenizer, int], Dataset]] = {
  "text": text.build,
  "synthetic": synthetic.build,
}
"""By name, what makes a dataset of (data, tokenizer, max_target_length)."""


def build_tokenizer(data: DataConfig) -> Tokenizer:
  """The tokenizer that `tokenizer_type` names.

  Raises:
    UserError: for an unknown name, or special ids that are not distinct ids of the vocabulary.
  """
  tokenizer = registered("tokenizer_type", data.tokenizer_type, TOKENIZERS)(data)
  special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
  if len(set(special)) < 3 or not all(0 <= each < tokenizer.vocab_size for each in special):
    size = tokenizer.vocab_size
    raise UserError(
      f"tokenizer_type={data.tokenizer_type}: bos_id, eos_id, pad_id = {special} must be three "
      f"distinct ids below vocab_size={size}; for example {(size, size + 1, size + 2)} with "
      f"vocab_size {size + 3}"
    )
  return tokenizer


def build_dataset(data: DataConfig, max_target_length: int) -> Dataset:
  """The dataset that `dataset_type` names, in rows of `max_target_length` tokens.

  Raises:
    UserError: for an unknown name, or input that cannot be used; names it.
  """
  build = registered("dataset_type", data.dataset_type, DATASETS)
  tokenizer = build_tokenizer(data)

  def build_one(source: DataConfig) -> Dataset:
    return build(source, tokenizer, max_target_length)

  # Random tokens have no sources, and take the place of whatever is configured.
  mixture = None if data.dataset_type == "synthetic" else mixed_paths(data)
  return mixed.build(data, mixture, build_one) if mixture else build_one(data)
