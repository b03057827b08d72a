"""The token cache: every document as token ids in one flat file, built once.

A cache's name derives from its sources' paths, sizes and times of change and from the tokenizer, so
a finished cache never changes while a run has it open. It is written under a temporary name and
renamed when complete, so any number of runs may build it at once.
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
from maxbatch.data.sources import Document, Sources
from maxbatch.data.tokenizer import Tokenizer, token_dtype
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import replacing, write_whole

_FORMAT = 2
# Up to this size an opened cache is hashed against its fingerprint (about 0.1 s); beyond it only
# its length is checked, so that starting does not take longer the more text there is.
_FULL_CHECK_BYTES = 128 * 2**20

_METADATA = {
  "num_tokens": int,
  "fingerprint": str,
  "num_documents": int,
  "dtype": str,
  "skipped": dict,
}
"""What is noted of a cache, and of which type."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TokenCache:
  """A finished cache on disk; small to pickle, mapped into memory when first read."""

  path: str
  num_tokens: int
  fingerprint: str
  """Hash of the tokens alone: equal on every machine that has the same text."""
  num_documents: int
  dtype: str = "<u2"
  """Of the ids in the file: uint16 or uint32, little-endian, as the vocabulary needs."""
  skipped: tuple[tuple[str, int], ...] = ()

  @functools.cached_property
  def tokens(self) -> np.ndarray:
    """The ids [num_tokens], mapped, not loaded. Raises OSError if the file is gone or truncated."""
    tokens = np.memmap(self.path, dtype=self.dtype, mode="r")
    if tokens.size != self.num_tokens:
      raise OSError(f"{self.path} holds {tokens.size} tokens instead of {self.num_tokens}")
    return np.asarray(tokens)

  def __getstate__(self) -> dict[str, object]:
    """Leaves the mapping out, or pickling for a worker would copy every token."""
    return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}


def open_or_build(
  sources: Sources, documents: Sequence[Document], folder: Path, part: str, tokenizer: Tokenizer
) -> TokenCache:
  """The cache of `documents`, which are files of `sources`: opened in `folder`, or built there.

  Args:
    sources: where the documents come from; names the configuration key in errors.
    documents: what it holds, in this order; of each document bos_id, its ids, eos_id.
    folder: the folder of all caches.
    part: "train" or "validation", part of the file's name.
    tokenizer: makes the ids.

  Raises:
    UserError: an input or the folder cannot be used; names it.
  """
  path = folder / f"{part}-{_key(sources, documents, tokenizer)}.tokens"
  cache = _open(path)
  if cache is not None:
    return cache
  try:
    with replacing(path) as file:
      metadata = _write(file, sources, documents, part, tokenizer)
    write_whole(_metadata_path(path), json.dumps(metadata, indent=1))
  except OSError as error:
    raise _cannot_write(path, documents, token_dtype(tokenizer), error) from error
  return _from_metadata(path, metadata)


def _key(sources: Sources, documents: Sequence[Document], tokenizer: Tokenizer) -> str:
  """A hash of everything that determines the cache's contents; no file is read for it."""
  parts = [
    (doc.file.path, doc.file.name, doc.file.size_bytes, doc.file.modified_ns, doc.begin, doc.end)
    for doc in documents
  ]
  kind = type(tokenizer)
  name = (kind.__module__, kind.__qualname__, tokenizer.version, tokenizer.vocab_size)
  text = json.dumps([_FORMAT, name, sources.kind, parts])
  return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _metadata_path(path: Path) -> Path:
  return path.with_suffix(".json")


def _open(path: Path) -> TokenCache | None:
  """The cache at `path` if it exists and is intact."""
  if not _metadata_path(path).exists() and not path.exists():
    return None
  try:
    if path.is_fifo() or _metadata_path(path).is_fifo():
      raise OSError("it is a pipe, not a file")
    cache = _from_metadata(path, json.loads(_metadata_path(path).read_text()))
    problem = _damage(cache)
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    problem = f"its metadata cannot be read ({error})"
  else:
    if not problem:
      return cache
  _log.warning("The token cache %s is damaged: %s. Building it again.", path, problem)
  return None


def _from_metadata(path: Path, metadata: dict) -> TokenCache:
  wrong = [name for name, kind in _METADATA.items() if type(metadata[name]) is not kind]
  skipped = metadata["skipped"]
  if wrong or any(type(count) is not int for count in skipped.values()):
    raise TypeError(f"{', '.join(wrong or ['skipped'])} has a value of another type")
  return TokenCache(
    path=str(path),
    skipped=tuple(skipped.items()),
    **{name: metadata[name] for name in _METADATA if name != "skipped"},
  )


def _damage(cache: TokenCache) -> str:
  """What is wrong with the file, or an empty string."""
  size, expected = os.path.getsize(cache.path), cache.num_tokens * np.dtype(cache.dtype).itemsize
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
  file: BinaryIO,
  sources: Sources,
  documents: Sequence[Document],
  part: str,
  tokenizer: Tokenizer,
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
      for tokens in _tokens(sources, document, tokenizer, skipped):
        file.write(tokens.data)
        digest.update(tokens.data)
        num_tokens += tokens.size
      bar.update(document.file.size_bytes)
  return {
    "num_tokens": num_tokens,
    "fingerprint": digest.hexdigest(),
    "dtype": token_dtype(tokenizer).str,
    "num_documents": len(documents) - skipped.total(),
    "skipped": dict(skipped),
  }


def _tokens(
  sources: Sources, document: Document, tokenizer: Tokenizer, skipped: collections.Counter[str]
) -> Iterator[np.ndarray]:
  """Begin, ids, end of one document; nothing, and a count in `skipped`, if it is skipped."""
  try:
    size = reading.checked_size(sources.key, document.file)
  except reading.NotTextError:
    # The user did not choose the standard library's files one by one, so such a file is skipped.
    if sources.kind != "stdlib":
      raise
    skipped["not UTF-8"] += 1
    return
  if size == 0:
    skipped["empty"] += 1
    return
  dtype = token_dtype(tokenizer)
  yield np.array([tokenizer.bos_id], dtype)
  for lines in reading.whole_lines(reading.text_chunks(sources.key, document, size)):
    yield np.ascontiguousarray(tokenizer.encode(lines), dtype)
  yield np.array([tokenizer.eos_id], dtype)


def _cannot_write(
  path: Path, documents: Sequence[Document], dtype: np.dtype, error: OSError
) -> UserError:
  needed = sum(dtype.itemsize * (document.file.size_bytes + 2) for document in documents)
  zipped = any(document.file.name.endswith(".gz") for document in documents)
  try:
    free = f", {shutil.disk_usage(path.parent).free} bytes are free"
  except OSError:
    free = ""
  return UserError(
    f"dataset_cache_directory={path.parent}: cannot write the token cache {path}: "
    f"{error.strerror or error}; it needs {'more than' if zipped else 'about'} {needed} bytes{free};"
    " free some space there, or set dataset_cache_directory to a folder you can write to"
  )
