"""Documents as a dataset: divide them into training and validation, tokenize them once."""

import collections
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from maxbatch.config.schema import DataConfig
from maxbatch.core.keys import counted
from maxbatch.data.chat import build_chat
from maxbatch.data.document_rows import PackedRows, document_rows, layout_of, rows_name
from maxbatch.data.file_datasets import Split, described, sizes_by_name, split
from maxbatch.data.object_copies import with_copies
from maxbatch.data.object_store import is_url
from maxbatch.data.rows import Dataset, RowSource
from maxbatch.data.sources import Document, Sources
from maxbatch.data.token_cache import TokenCache, cache_key, open_or_build
from maxbatch.data.tokenize import Recipe
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import token_caches


def build_corpus(
  data: DataConfig,
  tokenizer: Tokenizer,
  max_target_length: int,
  sources: Sources,
  given_for_validation: Sources | None,
  eval_key: str,
) -> Dataset:
  """Builds the documents of `sources` into rows of `max_target_length` tokens.

  Args:
    given_for_validation: None: a part of `sources`.
    eval_key: the key that gives them.

  Raises UserError: an input is unreadable, empty or too short; names it.
  """
  folder = token_caches(data.dataset_cache_directory)
  eval_sources, parts = sources, split(sources, data.eval_fraction)
  if given_for_validation:
    eval_sources = given_for_validation
    parts = with_validation(sources, eval_sources)

  recipe = recipe_of(data, tokenizer, sources)
  eval_recipe = dataclasses.replace(recipe, sources=eval_sources)
  name, layout = rows_name(data, max_target_length), layout_of(data, max_target_length)
  validation = None
  with _copied(parts, recipe, eval_recipe, folder) as parts:
    train = open_or_build(parts.train, folder, "train", recipe)
    _check_train(sources, train, 1 if layout else max_target_length)
    if parts.validation:
      validation = open_or_build(parts.validation, folder, "validation", eval_recipe)
      _check_validation(eval_sources, eval_key, validation, train)

  def rows(cache: TokenCache, part: str) -> RowSource:
    return document_rows(cache, data, tokenizer, max_target_length, folder, part)

  train_rows = rows(train, "train")
  validation_rows = rows(validation, "validation") if validation else None
  description = _describe(sources, eval_sources, parts, train, validation, folder)
  for part, packed in {"training": train_rows, "validation": validation_rows}.items():
    if isinstance(packed, PackedRows):
      description += f"\n{part}: {packed.index}"
  return Dataset(
    train=train_rows,
    validation=validation_rows,
    fingerprint=train.fingerprint + name,
    description=description,
    validation_fingerprint=validation.fingerprint + name if validation else "none",
    num_skipped_records=train.num_bad,
    train_files=sizes_by_name(parts.train),
    validation_files=sizes_by_name(parts.validation),
  )


@contextlib.contextmanager
def _copied(parts: Split, recipe: Recipe, eval_recipe: Recipe, folder: Path) -> Iterator[Split]:
  """Yields the documents, those of an object store with a place for copies, removed at the end."""
  if not (is_url(recipe.sources.path) or is_url(eval_recipe.sources.path)):
    yield parts
    return
  # Of one's own for the same tokens of the same objects: whoever makes them shares it.
  keys = cache_key(parts.train, recipe), cache_key(parts.validation, eval_recipe)
  copies = folder / f"objects-{'-'.join(keys)}"
  train, validation = (with_copies(each, copies) for each in (parts.train, parts.validation))
  yield parts._replace(train=train, validation=validation)
  shutil.rmtree(copies, ignore_errors=True)  # After an error they stay for the next start.


def recipe_of(data: DataConfig, tokenizer: Tokenizer, sources: Sources) -> Recipe:
  chat = build_chat(data, tokenizer)
  return Recipe(sources, tokenizer, data.add_bos, data.add_eos, data.max_bad_records, chat)


def with_validation(sources: Sources, eval_sources: Sources) -> Split:
  """Returns all of `eval_sources` for validation, and for training what is left of the training
  files. Raises UserError: nothing is left."""
  held_out = {os.path.realpath(file.path) for file in eval_sources.files}
  train, _, test = split(sources, 0)
  kept = [each for each in train if os.path.realpath(each.file.path) not in held_out]
  if not kept:
    raise UserError(
      f"{eval_sources.key}={eval_sources.path} is all that {sources.key}={sources.path} has for "
      f"training; leave {eval_sources.key} empty to hold out eval_fraction of it, or give another "
      "file"
    )
  validation = tuple(map(Document, eval_sources.files))
  left_out = tuple(each for each in test if os.path.realpath(each.file.path) not in held_out)
  return Split(tuple(kept), validation, left_out)


def _check_train(sources: Sources, cache: TokenCache, length: int) -> None:
  if cache.num_tokens == 0:
    raise UserError(f"{sources.key}={sources.path} is empty: a run needs text, or {_OTHERWISE}")
  _check_weights(sources, cache)
  if cache.num_tokens <= length:
    raise UserError(
      f"{sources.key}={sources.path} is too short: {cache.num_tokens} tokens for training, and one "
      f"row needs max_target_length + 1 = {length + 1}; give it more text, or set "
      f"max_target_length={cache.num_tokens - 1}"
    )


def _check_weights(sources: Sources, cache: TokenCache) -> None:
  if not cache.counts_any():
    raise UserError(
      f"{sources.key}={sources.path}: no token counts in the loss, since all weights are 0; give "
      "records with some 1 in weights_column, or weights_column='' if all are to count"
    )


def _check_validation(
  sources: Sources, eval_key: str, cache: TokenCache, train: TokenCache
) -> None:
  if cache.num_tokens == 0:
    raise UserError(
      f"{sources.key}={sources.path}: the text for validation is empty; give more text, another "
      f"{eval_key}, or eval_fraction=0 to do without validation"
    )
  _check_weights(sources, cache)
  if cache.fingerprint == train.fingerprint:
    raise UserError(
      f"{sources.key}={sources.path}: the text for validation equals the text for training; give "
      f"another {eval_key}, or leave it empty to hold out eval_fraction of what is trained on"
    )


_RECORDS = (".json", ".jsonl", ".ndjson")
_OTHERWISE = "dataset_path=stdlib, or dataset_type=synthetic for random tokens"


def _describe(
  sources: Sources,
  eval_sources: Sources,
  parts: Split,
  train: TokenCache,
  validation: TokenCache | None,
  folder: Path,
) -> str:
  what = "the Python standard library" if sources.kind == "stdlib" else sources.path
  if sources.format != "text":
    what += f" ({sources.format}, column {sources.column})"
  counts = [f"{train.num_tokens:,} training tokens ({counted(train.num_documents, 'document')})"]
  if validation:
    count = counted(validation.num_documents, "document")
    counts.append(f"{validation.num_tokens:,} validation tokens ({count})")
  skipped: collections.Counter[str] = collections.Counter()
  for holder in {sources, eval_sources, train} | ({validation} if validation else set()):
    skipped.update(dict(holder.skipped))
  lines = [f"{what}: {', '.join(counts)}; cache in {folder}"]
  lines.append(f"training: {described(parts.train)}")
  if parts.validation:
    lines.append(f"validation: {described(parts.validation)}")
  read = (*parts.train, *parts.validation)
  markup = [each for each in read if each.file.name.removesuffix(".gz").endswith(_RECORDS)]
  if sources.format == "text" and markup:
    lines.append(f"as it is, keys and quotes included: {described(markup)}")
  if parts.left_out:
    lines.append(f"on neither side, by name: {described(parts.left_out)}")
  if skipped:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    what = "files" if sources.format == "text" else "files and records"
    lines.append(f"{what} skipped: {reasons}")
  for part, cache in {"training": train, "validation": validation}.items():
    if cache and cache.num_bad:
      # What the error says is wrong, without what to do, which has been done.
      problem = cache.first_bad.partition("; correct it")[0]
      lines.append(f"bad in {part}: {cache.num_bad:,}, the first: {problem}")
  return "\n".join(lines)
