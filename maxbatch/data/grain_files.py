"""dataset_type=grain: files of records, by the keys of MaxText's grain pipeline."""

from maxbatch.config.schema import DataConfig
from maxbatch.data.corpus import build_corpus
from maxbatch.data.dataset import Dataset
from maxbatch.data.record_files import Columns, resolve_records
from maxbatch.data.split import Given
from maxbatch.data.tokenizer import Tokenizer

_FORM = "grain_file_type"


def train_columns(data: DataConfig) -> Columns:
  """What of a record is the document to train on."""
  names, tokenize = data.train_data_columns, data.tokenize_train_data
  return Columns("train_data_columns", names, tokenize, data.weights_column)


def eval_columns(data: DataConfig) -> Columns:
  """What of a record is the document for validation."""
  names, tokenize = data.eval_data_columns, data.tokenize_eval_data
  return Columns("eval_data_columns", names, tokenize, data.weights_column)


def build(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """The records of `grain_train_files` in rows of `max_target_length` tokens.

  Raises:
    UserError: an input is missing, unreadable, of another format, empty or too short; names it.
  """
  return build_corpus(data, tokenizer, max_target_length, *find(data))


def find(data: DataConfig) -> Given:
  """The files of `grain_train_files` and `grain_eval_files`.

  Raises:
    UserError: one is missing, or is of another format.
  """
  form = data.grain_file_type
  sources = resolve_records(
    "grain_train_files", data.grain_train_files, train_columns(data), form, _FORM
  )
  eval_key, validation = "grain_eval_files", None
  if data.grain_eval_files:
    columns = eval_columns(data)
    validation = resolve_records(eval_key, data.grain_eval_files, columns, form, _FORM)
  return Given(sources, validation, eval_key)
