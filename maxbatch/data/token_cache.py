"""The token cache: every document as uint16 tokens in one flat file, built once.

A cache's name derives from its sources' paths, sizes and times of change, so a finished cache never
changes: a run that has one open cannot see it replaced by another. It appears under its name only
when it is whole, so any number of runs may build it at once.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tqdm

from maxbatch.data import documents as reading
from maxbatch.data import tokenizer
from maxbatch.data.sources import Document, Sources
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import replacing, write_whole

_FORMAT = 1
_TOKEN = np.dtype("<u2")
# Up to this size an opened cache is hashed against its fingerprint (about 0.1 s); beyond it only
# its length is checked, so that starting does not take longer the more text there is.
_FULL_CHECK_BYTES = 128 * 2**20

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TokenCache:
  """A finished cache on disk; small to pickle, mapped into memory when first read."""

  path: str
  num_tokens: int
  fingerprint: str
  """Hash of the tokens alone: equal on every machine that has the same text."""
  num_documents: int
  skipped: tuple[tuple[str, int], ...] = ()

  @functools.cached_property
  def tokens(self) -> np.ndarray:
    """uint16[num_tokens], mapped, not loaded. Raises OSError if the file is gone or cut."""
    tokens = np.memmap(self.path, dtype=_TOKEN, mode="r")
    if tokens.size != self.num_tokens:
      raise OSError(f"{self.path} holds {tokens.size} tokens instead of {self.num_tokens}")
    return np.asarray(tokens)

  def __getstate__(self) -> dict[str, object]:
    """Leaves the mapping out, or pickling for a worker would copy every token."""
    return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}


def open_or_build(
  sources: Sources, documents: Sequence[Document], folder: Path, part: str
) -> TokenCache:
  """The cache of `documents`, which are files of `sources`: the one in `folder`, or a new one.

  Args:
    sources: where the documents come from; names the configuration key in errors.
    documents: what to put in, in this order: begin, bytes, end of each.
    folder: where caches are kept.
    part: "train" or "validation", part of the file's name.

  Raises:
    UserError: an input or the folder cannot be used; names it.
  """
  path = folder / f"{part}-{_key(sources, documents)}.tokens"
  cache = _open(path)
  if cache is not None:
    return cache
  try:
    with replacing(path) as file:
      metadata = _write(file, sources, documents, part)
    write_whole(_metadata_path(path), json.dumps(metadata, indent=1))
  except OSError as error:
    raise _cannot_write(path, documents, error) from error
  return _from_metadata(path, metadata)


def _key(sources: Sources, documents: Sequence[Document]) -> str:
  """What decides the cache's contents, hashed; reading no file."""
  parts = [
    (doc.file.path, doc.file.name, doc.file.size_bytes, doc.file.modified_ns, doc.begin, doc.end)
    for doc in documents
  ]
  text = json.dumps([_FORMAT, tokenizer.TOKENIZER_VERSION, sources.kind, parts])
  return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _metadata_path(path: Path) -> Path:
  return path.with_suffix(".json")


def _open(path: Path) -> TokenCache | None:
  """The cache at `path` if it is there and whole."""
  if not _metadata_path(path).exists() and not path.exists():
    return None
  try:
    cache = _from_metadata(path, json.loads(_metadata_path(path).read_text()))
    problem = _damage(cache)
  except (OSError, ValueError, KeyError, TypeError) as error:
    problem = f"its metadata cannot be read ({error})"
  else:
    if not problem:
      return cache
  _log.warning("The token cache %s is damaged: %s. Building it again.", path, problem)
  return None


def _from_metadata(path: Path, metadata: dict) -> TokenCache:
  return TokenCache(
    path=str(path),
    num_tokens=int(metadata["num_tokens"]),
    fingerprint=str(metadata["fingerprint"]),
    num_documents=int(metadata["num_documents"]),
    skipped=tuple((str(reason), int(count)) for reason, count in metadata["skipped"].items()),
  )


def _damage(cache: TokenCache) -> str:
  """What is wrong with the file, or an empty string."""
  size, expected = os.path.getsize(cache.path), cache.num_tokens * _TOKEN.itemsize
  if size != expected:
    return f"it has {size} bytes instead of {expected}"
  if size <= _FULL_CHECK_BYTES:
    with open(cache.path, "rb") as file:
      digest = hashlib.file_digest(file, _new_hash).hexdigest()
    if digest != cache.fingerprint:
      return "its tokens do not match its fingerprint"
  return ""


def _new_hash():
  return hashlib.blake2b(digest_size=16)


def _write(
  file: BinaryIO, sources: Sources, documents: Sequence[Document], part: str
) -> dict[str, object]:
  """Writes all tokens and returns the cache's metadata."""
  digest, num_tokens = _new_hash(), 0
  skipped: collections.Counter[str] = collections.Counter()
  # disable=None: no bar where the output is not a terminal.
  with tqdm.tqdm(
    total=sum(document.file.size_bytes for document in documents),
    desc=f"tokenizing {part}",
    unit="B",
    unit_scale=True,
    disable=None,
    leave=False,
  ) as bar:
    for document in documents:
      for tokens in _tokens(sources, document, skipped):
        file.write(tokens.data)
        digest.update(tokens.data)
        num_tokens += tokens.size
      bar.update(document.file.size_bytes)
  return {
    "num_tokens": num_tokens,
    "fingerprint": digest.hexdigest(),
    "num_documents": len(documents) - skipped.total(),
    "skipped": dict(skipped),
  }


def _tokens(
  sources: Sources, document: Document, skipped: collections.Counter[str]
) -> Iterator[np.ndarray]:
  """Begin, bytes, end of one document; nothing, and a count in `skipped`, if it is passed over."""
  try:
    size = reading.checked_size(sources.key, document.file)
  except reading.NotTextError:
    # Nobody chose the standard library's files one by one, so its odd one is only counted.
    if sources.kind != "stdlib":
      raise
    skipped["not UTF-8"] += 1
    return
  if size == 0:
    skipped["empty"] += 1
    return
  yield np.array([tokenizer.BOS], _TOKEN)
  for chunk in reading.text_chunks(sources.key, document, size):
    yield tokenizer.encode(chunk).astype(_TOKEN, copy=False)
  yield np.array([tokenizer.EOS], _TOKEN)


def _cannot_write(path: Path, documents: Sequence[Document], error: OSError) -> UserError:
  needed = sum(_TOKEN.itemsize * (document.file.size_bytes + 2) for document in documents)
  zipped = any(document.file.name.endswith(".gz") for document in documents)
  try:
    free = f", {shutil.disk_usage(path.parent).free} bytes are free"
  except OSError:
    free = ""
  return UserError(
    f"dataset_cache_directory={path.parent}: cannot write the token cache {path}: "
    f"{error.strerror or error}; it needs {'more than' if zipped else 'about'} {needed} bytes{free};"
    " make room there, or set dataset_cache_directory to a folder you can write to"
  )
