"""Tokenizers and datasets by name (docs/extending.md shows how to add one)."""

import dataclasses
import math
from collections.abc import Callable

from maxbatch.config.registry import registered
from maxbatch.config.schema import DataConfig
from maxbatch.data import file_datasets, mixed, synthetic
from maxbatch.data.corpus import build_corpus
from maxbatch.data.file_datasets import Given
from maxbatch.data.mixed import mixed_paths
from maxbatch.data.mixture import MixedRows
from maxbatch.data.rows import Dataset, RowSource
from maxbatch.data.tokenizer import ByteTokenizer, Tokenizer
from maxbatch.data.tokenizers import huggingface, sentencepiece, tiktoken
from maxbatch.errors import UserError

TOKENIZERS: dict[str, Callable[[DataConfig], Tokenizer]] = {
  "byte": lambda _: ByteTokenizer(),
  "huggingface": huggingface.build,
  "sentencepiece": sentencepiece.build,
  "tiktoken": tiktoken.build,
}

FILES: dict[str, Callable[[DataConfig], Given | None]] = {
  "text": file_datasets.find_text,
  "grain": file_datasets.find_grain,
  "hf": file_datasets.find_hf,
}
"""Finders of the files of datasets made of files; the input function report looks at them."""


def _of_files(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  # None for a name on the Hugging Face hub.
  given = FILES[data.dataset_type](data) or file_datasets.of_name(data)
  return build_corpus(data, tokenizer, max_target_length, *given)


DATASETS: dict[str, Callable[[DataConfig, Tokenizer, int], Dataset]] = {
  "text": _of_files,
  "grain": _of_files,
  "hf": _of_files,
  "synthetic": synthetic.build,
}
"""By name, what makes a dataset of (data, tokenizer, max_target_length)."""


def build_tokenizer(data: DataConfig) -> Tokenizer:
  """Builds the tokenizer that `tokenizer_type` names. Raises UserError for an unknown name, a
  vocabulary that cannot be used, or special ids that are no ids of the vocabulary."""
  tokenizer = registered("tokenizer_type", data.tokenizer_type, TOKENIZERS, data.plugins)(data)
  special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
  if not all(0 <= each < tokenizer.vocab_size for each in special):
    size = tokenizer.vocab_size
    raise UserError(
      f"tokenizer_type={data.tokenizer_type}: bos_id, eos_id, pad_id = {special} must be ids below "
      f"vocab_size={size}; for example {(size, size + 1, size + 2)} with vocab_size {size + 3}"
    )
  return tokenizer


def build_dataset(data: DataConfig, max_target_length: int) -> Dataset:
  """Builds the dataset that `dataset_type` names, in rows of `max_target_length` tokens. Raises
  UserError, naming it, for an unknown name or input that cannot be used."""
  build = registered("dataset_type", data.dataset_type, DATASETS, data.plugins)
  tokenizer = build_tokenizer(data)

  def build_one(source: DataConfig) -> Dataset:
    return build(source, tokenizer, max_target_length)

  # Random tokens have no sources, and take the place of whatever is configured.
  mixture = None if data.dataset_type == "synthetic" else mixed_paths(data)
  dataset = mixed.build(data, mixture, build_one) if mixture else build_one(data)
  return dataclasses.replace(dataset, tokenizer_version=tokenizer.version)


def check_epochs(data: DataConfig, rows: RowSource, num_samples: int) -> None:
  """Refuses a run that reads its rows, or those of one source, more often than num_epoch allows.
  Raises UserError: names a number of epochs and a budget that work."""
  if data.num_epoch < 1:
    return
  if isinstance(rows, MixedRows):
    for source, num_epochs in rows.epochs(num_samples).items():
      if num_epochs > data.num_epoch:
        raise UserError(
          f"num_epoch={data.num_epoch}: the run takes {float(num_epochs):.4g} epochs of {source}; use "
          f"num_epoch={math.ceil(num_epochs)}, num_epoch=-1 for as many as it takes, a smaller budget, "
          "or a smaller weight"
        )
    return
  num_rows = len(rows)
  allowed = data.num_epoch * num_rows
  if num_samples > allowed:
    raise UserError(
      f"num_epoch={data.num_epoch}: {num_rows:,} rows are {allowed:,} samples, and the run takes "
      f"{num_samples:,}; use total_samples={allowed} (with steps=-1), num_epoch="
      f"{-(-num_samples // num_rows)}, or num_epoch=-1 for as many as it takes"
    )
