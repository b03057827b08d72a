"""Text files as a dataset, each of them a document."""

from maxbatch.config.schema import DataConfig
from maxbatch.data.corpus import build_corpus
from maxbatch.data.dataset import Dataset
from maxbatch.data.sources import resolve
from maxbatch.data.split import Given
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError


def build(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """The text of `dataset_path` in rows of `max_target_length` tokens.

  Raises:
    UserError: an input is missing, unreadable, not text, empty or too short; names it.
  """
  return build_corpus(data, tokenizer, max_target_length, *find(data))


def find(data: DataConfig) -> Given:
  """The files of `dataset_path` and `eval_dataset_path`.

  Raises:
    UserError: one is missing, or is to hold weights or token ids.
  """
  if data.weights_column:
    raise UserError(
      f"weights_column={data.weights_column}: files of text have no columns; set weights_column='', or "
      "use dataset_type=grain grain_train_files='data/*.parquet'"
    )
  ids = {
    "tokenize_train_data": data.tokenize_train_data,
    "tokenize_eval_data": data.tokenize_eval_data,
  }
  if ids_keys := [key for key, tokenize in ids.items() if not tokenize]:
    raise UserError(
      f"{ids_keys[0]}=false: files of text hold no token ids; set {ids_keys[0]}=true, or use "
      "dataset_type=grain grain_train_files='data/*.parquet'"
    )
  sources = resolve("dataset_path", data.dataset_path)
  validation = None
  if data.eval_dataset_path:
    validation = resolve("eval_dataset_path", data.eval_dataset_path)
  return Given(sources, validation, "eval_dataset_path")
