"""A shard of a token cache: three files, of which the last to appear says that it is whole.

NAME.tokens has the ids of its documents one after the other, NAME.documents where each of them
begins, and NAME.json what is known of both. Where only some tokens count as targets, NAME.weights has
a byte for each that says which. All appear whole, and are never changed.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from maxbatch.data.object_copies import copy_objects, is_object
from maxbatch.data.sources import Document
from maxbatch.data.tokenize import Recipe, new_hash, source_bytes, tokenize
from maxbatch.data.tokenizer import token_dtype
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import claimed, replacing, write_whole

FULL_CHECK_BYTES = 128 * 2**20
"""Up to this size an opened cache is hashed against its fingerprints (about 0.1 s); beyond it only
lengths are checked, so that starting does not take longer the more text there is."""
_START_BYTES = 8
_METADATA = {
  "num_tokens": int,
  "fingerprint": str,
  "num_documents": int,
  "documents_fingerprint": str,
  "dtype": str,
  "weights_fingerprint": str,
  "num_bad": int,
  "first_bad": str,
  "skipped": dict,
}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TokenShard:
  """A finished shard on disk; small to pickle, mapped into memory when first read."""

  path: str
  num_tokens: int
  fingerprint: str
  """Hash of the tokens alone: equal on every machine that has the same text."""
  num_documents: int
  documents_fingerprint: str = ""
  weights_fingerprint: str = ""
  """Fingerprint of which tokens count, if there is a file that says so; else all do."""
  dtype: str = "<u2"
  """Dtype of the ids in the file: uint16 or uint32, little-endian, as the vocabulary needs."""
  num_bad: int = 0
  """Records that were skipped because they hold no document."""
  first_bad: str = ""
  skipped: tuple[tuple[str, int], ...] = ()

  @functools.cached_property
  def tokens(self) -> np.ndarray:
    """The ids [num_tokens], mapped, not loaded. Raises OSError if the file is gone or truncated."""
    return _mapped(Path(self.path), self.dtype, self.num_tokens, "tokens")

  @functools.cached_property
  def document_starts(self) -> np.ndarray:
    """First token of each document, int64[num_documents] ascending, likewise."""
    path = Path(self.path).with_suffix(".documents")
    return _mapped(path, "<i8", self.num_documents, "documents")

  @functools.cached_property
  def weights(self) -> np.ndarray:
    """uint8[num_tokens], 1 where a token counts as a target."""
    if not self.weights_fingerprint:
      return np.ones(self.num_tokens, np.uint8)
    return _mapped(Path(self.path).with_suffix(".weights"), "u1", self.num_tokens, "weights")

  def __getstate__(self) -> dict[str, object]:
    return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class ShardJob:
  """A shard to make: its file of tokens, and the documents in it."""

  path: Path
  documents: tuple[Document, ...]

  @property
  def size_bytes(self) -> int:
    return sum(map(source_bytes, self.documents))


def open_shard(path: Path, *, check: bool = True, warn: bool = True) -> TokenShard | None:
  """Opens the shard at `path` if it exists and is intact.

  Args:
    check: its contents too, and not their lengths alone.
    warn: if it exists and is not intact.
  """
  if not path.with_suffix(".json").exists():
    return None  # It comes last: somebody is making the shard, or was interrupted.
  try:
    if any(
      each.is_fifo() for each in (path, path.with_suffix(".json"), path.with_suffix(".documents"))
    ):
      raise OSError("it is a pipe, not a file")
    shard = _from_metadata(path, json.loads(path.with_suffix(".json").read_text()))
    problem = _damage(shard, check)
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    problem = f"its metadata cannot be read ({error})"
  else:
    if not problem:
      return shard
  if warn:
    _log.warning("The token cache %s is damaged: %s. Building it again.", path, problem)
  return None


def remove_damaged(job: ShardJob, recipe: Recipe, *, check: bool) -> None:
  """Makes a damaged shard a missing one, to be read no more. Raises UserError: it cannot."""
  try:
    with claimed(_claim_path(job.path), wait=True):  # Nobody makes it anew meanwhile, or has.
      if open_shard(job.path, check=check, warn=False) is None:
        job.path.with_suffix(".json").unlink(missing_ok=True)
  except OSError as error:
    raise _cannot_write(job, token_dtype(recipe.tokenizer), error) from error


def make_shards(
  jobs: Sequence[ShardJob], recipe: Recipe, report: Callable[[int], None], *, wait: bool = True
) -> None:
  """Makes those of the shards that nobody has made or is making; damaged ones have been removed.

  Args:
    report: is given the bytes of sources that have been read here.
    wait: for those that others are making, and make them if the others end without them.

  Raises UserError: a source or the folder cannot be used; names it.
  """
  left, shards_of = list(jobs), _shards_of_objects(jobs)
  for waits in (False, True) if wait else (False,):
    if waits and left:
      print(f"The token cache waits for other processes: {len(left)} of its parts", flush=True)
    for job in list(left):
      try:
        with claimed(_claim_path(job.path), wait=waits) as is_ours:
          if is_ours:
            _make_unless_there(job, recipe, report)
            left.remove(job)
            _remove_unneeded(job, shards_of)
      except OSError as error:
        raise _cannot_write(job, token_dtype(recipe.tokenizer), error) from error


def _make_unless_there(job: ShardJob, recipe: Recipe, report: Callable[[int], None]) -> None:
  if open_shard(job.path, check=False, warn=False):
    return
  path = job.path
  copy_objects(recipe.sources.key, job.documents)
  with contextlib.ExitStack() as files:
    tokens_file = files.enter_context(replacing(path))
    starts_file = files.enter_context(replacing(path.with_suffix(".documents")))
    weights_file = None
    if recipe.has_weights:
      weights_file = files.enter_context(replacing(path.with_suffix(".weights")))
    written = tokenize(recipe, job.documents, tokens_file, starts_file, report, weights_file)
    starts_file.flush()
    with open(starts_file.name, "rb") as file:
      starts_hash = hashlib.file_digest(file, new_hash).hexdigest()
  dtype = token_dtype(recipe.tokenizer).str
  metadata = {**vars(written), "documents_fingerprint": starts_hash, "dtype": dtype}
  write_whole(path.with_suffix(".json"), json.dumps(metadata, indent=1))


def _shards_of_objects(jobs: Sequence[ShardJob]) -> Mapping[str, Sequence[Path]]:
  """Returns which shards hold part of an object, by the object's copy."""
  shards: dict[str, list[Path]] = collections.defaultdict(list)
  for job in jobs:
    for document in job.documents:
      if is_object(document.file):
        shards[document.file.copy].append(job.path)
  return shards


def _remove_unneeded(job: ShardJob, shards_of: Mapping[str, Sequence[Path]]) -> None:
  """Removes the copies of objects of which all shards are made.

  Of an object that is divided into training and validation the copy stays for the latter.
  """
  for document in job.documents:
    copy = document.file.copy
    is_needed = any(not path.with_suffix(".json").exists() for path in shards_of.get(copy, ()))
    if is_object(document.file) and document.end == 1 and not is_needed:
      Path(copy).unlink(missing_ok=True)


def _claim_path(path: Path) -> Path:
  return path.with_name(f".{path.stem}.claim")


def _mapped(path: Path, dtype: str, count: int, what: str) -> np.ndarray:
  if count == 0 and path.exists():  # Which cannot be mapped.
    return np.empty(0, dtype)
  mapped = np.memmap(path, dtype=dtype, mode="r")
  if mapped.size != count:
    raise OSError(f"{path} holds {mapped.size} {what} instead of {count}")
  return np.asarray(mapped)


def _from_metadata(path: Path, metadata: dict) -> TokenShard:
  wrong = [name for name, kind in _METADATA.items() if type(metadata[name]) is not kind]
  skipped = metadata["skipped"]
  if wrong or any(type(count) is not int for count in skipped.values()):
    raise TypeError(f"{', '.join(wrong or ['skipped'])} has a value of another type")
  return TokenShard(
    path=str(path),
    skipped=tuple(skipped.items()),
    **{name: metadata[name] for name in _METADATA if name != "skipped"},
  )


def _damage(shard: TokenShard, check: bool) -> str:
  path = Path(shard.path)
  wanted = {
    path: (shard.num_tokens * np.dtype(shard.dtype).itemsize, shard.fingerprint),
    path.with_suffix(".documents"): (
      shard.num_documents * _START_BYTES,
      shard.documents_fingerprint,
    ),
  }
  if shard.weights_fingerprint:
    wanted[path.with_suffix(".weights")] = (shard.num_tokens, shard.weights_fingerprint)
  for each, (expected, _) in wanted.items():
    if (size := os.path.getsize(each)) != expected:
      return f"{each.name} has {size} bytes instead of {expected}"
  for each, (_, fingerprint) in wanted.items():
    if check:
      with open(each, "rb") as file:
        digest = hashlib.file_digest(file, new_hash).hexdigest()
      if digest != fingerprint:
        return f"{each.name} does not match its fingerprint"
  return ""


def _cannot_write(job: ShardJob, dtype: np.dtype, error: OSError) -> UserError:
  path = job.path
  needed = sum(dtype.itemsize * (source_bytes(document) + 2) for document in job.documents)
  zipped = any(document.file.name.endswith(".gz") for document in job.documents)
  try:
    free = f", {shutil.disk_usage(path.parent).free} bytes are free"
  except OSError:
    free = ""
  return UserError(
    f"dataset_cache_directory={path.parent}: cannot write the token cache {path}: "
    f"{error.strerror or error}; it needs {'more than' if zipped else 'about'} {needed} bytes{free};"
    " free some space there, or set dataset_cache_directory to a folder you can write to"
  )
