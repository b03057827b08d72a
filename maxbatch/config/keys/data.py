"""Keys of the data."""

import dataclasses
from typing import Annotated, Literal

from maxbatch.config.declare import (
  CHANGEABLE,
  FIXED,
  INT32,
  Example,
  Name,
  NonNegative,
  Path,
  Range,
  Section,
  Seed,
  Weight,
  key,
)
from maxbatch.config.keys.read_when import (
  EVAL_FILES,
  GRAIN,
  HF,
  NO_CHAT,
  NO_EVAL_FILES,
  PACKING,
  PROMPTS_OR_REAL_DATA,
  REAL_DATA,
  RECORDS,
  TEXT,
  TEXT_FILES,
  TEXT_OR_OWN_PROMPTS,
  THREADS,
  TOKENIZED_TEXT,
  VOCABULARY,
  WORKERS,
)


@dataclasses.dataclass(frozen=True)
class DataConfig(Section, heading="the data"):
  """What is trained on and how it is read."""

  dataset_type: Name = key("text", CHANGEABLE, TEXT_OR_OWN_PROMPTS)
  """text: files, each a document; grain or hf: files of records, by MaxText's keys; synthetic:
  random tokens, for timing; or module:function of your own."""
  dataset_path: Path = key("stdlib", CHANGEABLE, TEXT, REAL_DATA, TEXT_FILES)
  """File, folder or glob of text (gzip too); stdlib: the text of the Python standard library."""
  eval_dataset_path: Path = key("", CHANGEABLE, TEXT, REAL_DATA, TEXT_FILES)
  """Validation text, as dataset_path; empty: files of dataset_path named valid, val, dev, eval or
  test, or else eval_fraction of it."""
  eval_fraction: Annotated[float, Range(low=0, high=0.9)] = key(
    0.05, CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, NO_EVAL_FILES
  )
  """Share of the bytes held out for validation: whole files, and the end of large ones; 0: no
  validation."""
  dataset_cache_directory: Path = key("", CHANGEABLE, TOKENIZED_TEXT, REAL_DATA)
  """Folder of the token caches; empty: the user's cache folder."""
  tokenizer_type: Name = key("byte", FIXED)
  """byte: a token per byte; huggingface: tokenizer.json; sentencepiece: its model file; tiktoken:
  Llama 3's file; or module:attribute of your own."""
  tokenizer_path: Path = key("", CHANGEABLE, VOCABULARY)
  """File of the vocabulary, the folder that holds it, or a model's name on the Hugging Face hub;
  byte needs none."""
  add_bos: bool = key(True, CHANGEABLE)
  """Begin every document with the bos token."""
  add_eos: bool = key(True, CHANGEABLE, TEXT, REAL_DATA, NO_CHAT)
  """End every document with the eos token."""
  bos_token: str = key("", CHANGEABLE, VOCABULARY)
  """Token that begins a document, for example <s>; empty: the tokenizer's own."""
  eos_token: str = key("", CHANGEABLE, VOCABULARY)
  """Token that ends a document, for example </s>; empty: the tokenizer's own."""
  pad_token: str = key("", CHANGEABLE, VOCABULARY)
  """Token that fills up the last row; empty: the tokenizer's own, else eos_token."""
  data_shuffle_seed: Seed = key(0, FIXED)
  """Random seed of the order of samples, 0 to 2³² − 1."""
  packing: bool = key(True, FIXED, TEXT)
  """Pack several documents into a row, by grain_packing_type; false: one document a row, then
  padding."""
  max_bad_records: NonNegative = key(0, CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA)
  """Bad records (null, no text, not UTF-8, no such column, or prompts that are too long) to skip
  and count; one more is an error."""
  num_epoch: Annotated[int, Range(low=1, limit=INT32, also=-1)] = key(-1, CHANGEABLE, TEXT)
  """Most epochs that a run may take; one that needs more is refused; -1: as many as its budget
  needs."""
  # Files of records, by MaxText's names.
  train_data_columns: tuple[str, ...] = key(
    ("text",), CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, RECORDS
  )
  """Column that holds the documents, for example [text]."""
  eval_data_columns: tuple[str, ...] = key(
    ("text",), CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, RECORDS, EVAL_FILES
  )
  """The same for validation files."""
  tokenize_train_data: bool = key(True, CHANGEABLE, TEXT, REAL_DATA)
  """false: the records hold token ids, which are used as they are."""
  tokenize_eval_data: bool = key(True, CHANGEABLE, TEXT, REAL_DATA)
  """The same for validation files."""
  weights_column: str = key("", CHANGEABLE, TEXT, REAL_DATA)
  """Column that says which tokens count in the loss: 0 or 1 for each token id, or for a whole
  document; empty: all count."""
  grain_file_type: str = key("auto", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, GRAIN)
  """dataset_type grain: arrayrecord, parquet, tfrecord, jsonl (gzip and zstd too) or arrow; auto:
  by the files' names."""
  grain_train_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, GRAIN)
  """dataset_type grain: file, folder or glob of records."""
  grain_eval_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, GRAIN)
  """dataset_type grain: the same for validation; empty: as with eval_dataset_path."""
  hf_path: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: folder of a dataset (save_to_disk, Parquet, JSONL or Arrow); parquet, json or
  arrow, with hf_train_files; or a name on the hub."""
  hf_name: str = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: configuration of a dataset given by name."""
  hf_data_dir: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: folder within the dataset."""
  hf_train_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: file, folder or glob of training records; in a folder's dataset, within it."""
  hf_eval_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: the same for validation."""
  train_split: str = key("train", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: split to train on, of a dataset that has splits."""
  hf_eval_split: str = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: split for validation; empty: as with eval_dataset_path."""
  # Each is a process.
  grain_worker_count: Annotated[int, Range(low=0, limit=256)] = key(0, CHANGEABLE, TEXT)
  """Grain worker processes for loading; 0: threads only; does not change the data."""
  # Each thread has a load, and so has each place of a buffer.
  grain_num_threads: Annotated[int, Range(low=1, limit=256)] = key(1, CHANGEABLE, TEXT, THREADS)
  """Without worker processes: number of loads read at once; more than 1 helps where reading waits
  for a network."""
  grain_prefetch_buffer_size: Annotated[int, Range(low=1, limit=10_000)] = key(
    2, CHANGEABLE, TEXT, THREADS
  )
  """Without worker processes: loads read ahead, a step's samples each (MaxText: rows)."""
  grain_per_worker_buffer_size: Annotated[int, Range(low=1, limit=10_000)] = key(
    2, CHANGEABLE, TEXT, WORKERS
  )
  """Loads that each worker process reads ahead."""
  # Several sources, and documents as rows.
  dataset_mixture: Annotated[
    tuple[tuple[Path, Weight], ...], Example("[[texts, 0.7], [code, 0.3]]")
  ] = key((), CHANGEABLE, TEXT, REAL_DATA)
  """Sources and their shares of the samples, for example [[texts, 0.7], [code, 0.3]], each a path
  as in dataset_path; []: dataset_path alone."""
  mixture_schedule: Annotated[tuple[tuple[Weight, ...], ...], Example("[[10000, 0.5, 0.5]]")] = key(
    (), CHANGEABLE, TEXT, REAL_DATA
  )
  """Shares that change at a sample, for example [[10000, 0.5, 0.5]]: the sample, then a weight for
  each source of the mixture, in its order."""
  grain_train_mixture_config_path: Path = key("", CHANGEABLE, TEXT, REAL_DATA)
  """JSON file with a mixture in MaxText's form, {"name": {"path": "texts", "weight": 0.7}, …};
  empty: dataset_mixture."""
  grain_packing_type: Literal["concat_then_split", "first_fit", "best_fit"] = key(
    "concat_then_split", CHANGEABLE, TEXT, REAL_DATA, PACKING
  )
  """concat_then_split (documents end to end, cut where a row ends: no padding), or each whole into
  the first_fit or best_fit row (fewer cuts, some padding)."""
  use_truncation: bool = key(False, CHANGEABLE, TEXT, REAL_DATA)
  """Cut documents that are longer than a row at its end, and drop the rest; false: divide them into
  rows, losing nothing."""
  block_cross_document_attention: bool = key(True, CHANGEABLE, TEXT, PACKING)
  """Tokens attend to their own document only; false: to all earlier ones in the row, which is
  faster with attention: flash."""
  use_chat_template: bool = key(False, CHANGEABLE, PROMPTS_OR_REAL_DATA)
  """The column holds conversations (messages of role and content), rendered by the tokenizer's chat
  template; needs tokenizer_type: huggingface."""
  sft_train_on_completion_only: bool = key(False, CHANGEABLE, TEXT, REAL_DATA)
  """Only what the assistant says in conversations counts in the loss; false: all of it."""

  @property
  def segmented(self) -> bool:
    """Whether rows say which tokens belong to one document."""
    return self.packing and self.block_cross_document_attention
