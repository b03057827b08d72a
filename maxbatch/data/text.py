"""Text files as a dataset: find them, split them, tokenize them once."""

import collections
from collections.abc import Sequence
from pathlib import Path

from maxbatch.config.schema import DataConfig
from maxbatch.data.dataset import Dataset
from maxbatch.data.sources import Document, Sources, resolve, split
from maxbatch.data.token_cache import TokenCache, open_or_build
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.data.windows import TokenWindows
from maxbatch.errors import UserError
from maxbatch.run_folder.cache import token_caches


def build(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """The text of `dataset_path` in rows of `max_target_length` tokens.

  Raises:
    UserError: an input is missing, unreadable, not text, empty or too short; names it.
  """
  folder = token_caches(data.dataset_cache_directory)
  sources = resolve("dataset_path", data.dataset_path)
  train_documents, eval_documents = split(sources, data.eval_fraction)
  eval_sources = sources
  if data.eval_dataset_path:
    eval_sources = resolve("eval_dataset_path", data.eval_dataset_path)
    train_documents, eval_documents = _whole(sources), _whole(eval_sources)
  train = open_or_build(sources, train_documents, folder, "train", tokenizer)
  _check_train(sources, train, max_target_length)
  validation = None
  if eval_documents:
    validation = open_or_build(eval_sources, eval_documents, folder, "validation", tokenizer)
    _check_validation(eval_sources, validation)

  def windows(cache: TokenCache) -> TokenWindows:
    return TokenWindows(cache, max_target_length, data.packing, tokenizer.bos_id, tokenizer.pad_id)

  return Dataset(
    train=windows(train),
    validation=validation and windows(validation),
    fingerprint=train.fingerprint,
    description=_describe(sources, eval_sources, train, validation, folder),
  )


def _whole(sources: Sources) -> Sequence[Document]:
  return [Document(file) for file in sources.files]


def _check_train(sources: Sources, cache: TokenCache, length: int) -> None:
  if cache.num_tokens == 0:
    raise UserError(f"{sources.key}={sources.path} is empty: a run needs text, or {_OTHERWISE}")
  if cache.num_tokens <= length:
    raise UserError(
      f"{sources.key}={sources.path} is too short: {cache.num_tokens} tokens for training, and one "
      f"row needs max_target_length + 1 = {length + 1}; give it more text, or set "
      f"max_target_length={cache.num_tokens - 1}"
    )


def _check_validation(sources: Sources, cache: TokenCache) -> None:
  if cache.num_tokens == 0:
    raise UserError(
      f"{sources.key}={sources.path}: the text for validation is empty; give more text, another "
      "eval_dataset_path, or eval_fraction=0 to do without validation"
    )


_OTHERWISE = "dataset_path=stdlib, or dataset_type=synthetic for random tokens"


def _describe(
  sources: Sources,
  eval_sources: Sources,
  train: TokenCache,
  validation: TokenCache | None,
  folder: Path,
) -> str:
  """One line on what is read, a second on what is not."""
  what = "the Python standard library" if sources.kind == "stdlib" else sources.path
  parts = [f"{train.num_tokens:,} training tokens ({_documents(train.num_documents)})"]
  if validation:
    count = _documents(validation.num_documents)
    parts.append(f"{validation.num_tokens:,} validation tokens ({count})")
  skipped: collections.Counter[str] = collections.Counter()
  for holder in {sources, eval_sources, train} | ({validation} if validation else set()):
    skipped.update(dict(holder.skipped))
  line = f"{what}: {', '.join(parts)}; cache in {folder}"
  if not skipped:
    return line
  reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
  return f"{line}\nfiles skipped: {reasons}"


def _documents(count: int) -> str:
  return f"{count:,} document" + ("s" if count != 1 else "")
