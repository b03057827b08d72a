"""Text files as a dataset, each of them a document."""

from maxbatch.config.schema import DataConfig
from maxbatch.data.corpus import build_corpus
from maxbatch.data.dataset import Dataset
from maxbatch.data.sources import resolve
from maxbatch.data.split import Given
from maxbatch.data.tokenizer import Tokenizer


def build(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """The text of `dataset_path` in rows of `max_target_length` tokens.

  Raises:
    UserError: an input is missing, unreadable, not text, empty or too short; names it.
  """
  return build_corpus(data, tokenizer, max_target_length, *find(data))


def find(data: DataConfig) -> Given:
  """The files of `dataset_path` and `eval_dataset_path`.

  Raises:
    UserError: one is missing.
  """
  sources = resolve("dataset_path", data.dataset_path)
  validation = None
  if data.eval_dataset_path:
    validation = resolve("eval_dataset_path", data.eval_dataset_path)
  return Given(sources, validation, "eval_dataset_path")
