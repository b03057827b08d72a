"""Tokenizers and datasets by name (docs/extending.md shows how to add one), and the one of random tokens.

R rows, T tokens per row, S = T + 1.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from maxbatch.config.registry import registered
from maxbatch.config.schema import DataConfig
from maxbatch.data import file_datasets, mixed
from maxbatch.data.corpus import build_corpus
from maxbatch.data.document_rows import segments
from maxbatch.data.file_datasets import Given
from maxbatch.data.mixed import mixed_paths
from maxbatch.data.mixture import MixedRows
from maxbatch.data.rows import Arrays, Dataset, RowSource
from maxbatch.data.tokenizer import ByteTokenizer, Tokenizer, ordinary_ids
from maxbatch.data.tokenizers.libraries import (
  build_huggingface,
  build_sentencepiece,
  build_tiktoken,
)
from maxbatch.errors import UserError

# The most rows the shuffle can number: as good as unlimited.
_TRAIN_ROWS = 2**31 - 1
# A bounded set, so that "the whole validation set" ends.
_VALIDATION_ROWS = 256


@dataclasses.dataclass(frozen=True)
class SyntheticRows:
  """Random tokens: what the training loop costs when reading costs nothing. Row i is a pure function of (seed, part, i)."""

  seed: int
  part: int
  num_rows: int
  length: int
  packing: bool
  ids: np.ndarray
  """The ids that are drawn from: those that stand for text."""

  def __len__(self) -> int:
    return self.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    """Returns the rows int[R], see `RowSource.rows`; all weights are 1, each row is one segment."""
    tokens_RS = np.empty((len(indices), self.length + 1), np.int32)
    for row, index in enumerate(indices):
      draws = np.random.default_rng((self.seed, self.part, int(index)))
      ids = draws.integers(0, len(self.ids), self.length + 1, dtype=self.ids.dtype)
      tokens_RS[row] = self.ids[ids]
    arrays = {
      "inputs": np.ascontiguousarray(tokens_RS[:, :-1]),
      "targets": np.ascontiguousarray(tokens_RS[:, 1:]),
      "weights": np.ones((len(indices), self.length), np.float32),
    }
    if self.packing:
      begins_RT = np.zeros(arrays["inputs"].shape, bool)
      filled_R = np.full(len(indices), self.length)
      arrays["segment_ids"], arrays["positions"] = segments(begins_RT, filled_R)
    return arrays


def build_synthetic(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """Builds random tokens in rows of `max_target_length`; no path is read."""

  def part(number: int, rows: int) -> SyntheticRows:
    seed, ids = data.data_shuffle_seed, ordinary_ids(tokenizer)
    return SyntheticRows(seed, number, rows, max_target_length, data.segmented, ids)

  return Dataset(
    train=part(0, _TRAIN_ROWS),
    validation=part(1, _VALIDATION_ROWS) if data.eval_fraction else None,
    fingerprint=f"synthetic-{data.data_shuffle_seed}",
    description=f"random tokens, seed {data.data_shuffle_seed}",
  )


TOKENIZERS: dict[str, Callable[[DataConfig], Tokenizer]] = {
  "byte": lambda _: ByteTokenizer(),
  "huggingface": build_huggingface,
  "sentencepiece": build_sentencepiece,
  "tiktoken": build_tiktoken,
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
  "synthetic": build_synthetic,
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
