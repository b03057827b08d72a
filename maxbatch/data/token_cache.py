"""The token cache: every document as token ids on disk, made once, by all the cores there are.

It is made of shards, each of some megabytes of sources. A shard's name derives from its sources'
paths, sizes and times of change and from the tokenizer, so a finished one never changes while a run
has it open, and stays good whatever becomes of other files. Whoever needs a shard claims it, makes
it and goes to the next: processes of one run, other runs and other hosts share the work, and what an
interrupted run had finished is there for the next one.
"""

import bisect
import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from maxbatch.data.formats import text
from maxbatch.data.formats.registry import FORMATS
from maxbatch.data.sources import Document, SourceFile, Sources
from maxbatch.data.token_shard import (
  FULL_CHECK_BYTES,
  ShardJob,
  TokenShard,
  make_shards,
  open_shard,
)
from maxbatch.data.tokenize import Recipe, new_hash, source_bytes, too_many
from maxbatch.data.workers import make_shards_in_processes, tokenizing_progress

_FORMAT = 4
SHARD_BYTES = 16 * 2**20
"""Of the sources of a shard, if there are not too many of them: seconds to a minute for a core."""
_MOST_SHARDS = 4096


@dataclasses.dataclass(frozen=True)
class TokenCache:
  """A finished cache: the tokens of its shards one after the other."""

  shards: tuple[TokenShard, ...]
  fingerprint: str
  """Hash of the tokens: equal on every machine that has the same files."""

  @functools.cached_property
  def _firsts(self) -> list[int]:
    """The first token's number of every shard, and the number of all."""
    return [0, *itertools.accumulate(shard.num_tokens for shard in self.shards)]

  @functools.cached_property
  def _has_weights(self) -> bool:
    return any(shard.weights_fingerprint for shard in self.shards)

  @property
  def num_tokens(self) -> int:
    """Of all documents, with those that begin and end them."""
    return self._firsts[-1]

  @property
  def num_documents(self) -> int:
    """Without those that were skipped."""
    return sum(shard.num_documents for shard in self.shards)

  @property
  def skipped(self) -> tuple[tuple[str, int], ...]:
    """Reasons, and how many documents were skipped for each."""
    counts: collections.Counter[str] = collections.Counter()
    for shard in self.shards:
      counts.update(dict(shard.skipped))
    return tuple(counts.items())

  @property
  def num_bad(self) -> int:
    """Records that were skipped because they hold no document."""
    return sum(shard.num_bad for shard in self.shards)

  @property
  def first_bad(self) -> str:
    """What is wrong with the first of these, and where it is."""
    return next((shard.first_bad for shard in self.shards if shard.num_bad), "")

  def read(self, start: int, stop: int) -> np.ndarray:
    """The ids [stop - start] from token `start` on, fewer at the end.

    Raises:
      OSError: a file of the cache is gone or truncated.
    """
    parts = [
      shard.tokens[max(start - first, 0) : stop - first]
      for first, shard in self._overlapping(start, stop)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

  def read_weights(self, start: int, stop: int) -> np.ndarray | None:
    """Which of the tokens [start, stop) count as targets, uint8; None: all do."""
    if not self._has_weights:
      return None
    parts = [
      shard.weights[max(start - first, 0) : stop - first]
      for first, shard in self._overlapping(start, stop)
    ]
    return np.concatenate(parts)

  def counts_any(self) -> bool:
    """Whether some token counts as a target."""
    return any(shard.weights.any() for shard in self.shards) if self._has_weights else True

  def document_starts(self, start: int, stop: int) -> np.ndarray:
    """The tokens in [start, stop) that begin a document, int64, ascending; likewise."""
    parts = []
    for first, shard in self._overlapping(start, stop):
      starts = shard.document_starts
      # The method: numpy's function of that name takes twice as long, and this is for every row.
      begin, end = starts.searchsorted(start - first), starts.searchsorted(stop - first)
      parts.append(starts[begin:end] + first)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

  def _overlapping(self, start: int, stop: int) -> list[tuple[int, TokenShard]]:
    """The shards that hold some of the tokens [start, stop), at least one, with their first one."""
    firsts = self._firsts
    begin = min(bisect.bisect_right(firsts, start), len(self.shards)) - 1
    if stop <= firsts[begin + 1]:
      return [(firsts[begin], self.shards[begin])]
    end = max(bisect.bisect_left(firsts, stop), begin + 1)
    return list(zip(firsts[begin:end], self.shards[begin:end], strict=False))

  def __getstate__(self) -> dict[str, object]:
    return {"shards": self.shards, "fingerprint": self.fingerprint}


def open_or_build(
  documents: Sequence[Document], folder: Path, part: str, recipe: Recipe
) -> TokenCache:
  """The cache of `documents`: opened in `folder`, or built there, or completed.

  Args:
    documents: what it holds, in this order.
    folder: the folder of all caches.
    part: "train" or "validation", part of the files' names.
    recipe: how the documents become tokens.

  Raises:
    UserError: an input or the folder cannot be used; names it.
  """
  recipe = dataclasses.replace(recipe, sources=dataclasses.replace(recipe.sources, files=()))
  jobs = shard_jobs(documents, folder, part, recipe)
  size = sum(os.path.getsize(job.path) for job in jobs if job.path.is_file())
  jobs = [dataclasses.replace(job, check=size <= FULL_CHECK_BYTES) for job in jobs]
  found = {job.path: open_shard(job.path, check=job.check) for job in jobs}
  if missing := [job for job in jobs if found[job.path] is None]:
    with tokenizing_progress(part, sum(job.size_bytes for job in missing)) as report:
      make_shards_in_processes(missing, recipe, report)
      make_shards(missing, recipe, report)
    found |= {job.path: open_shard(job.path, check=False) for job in missing}
  shards = tuple(shard for shard in found.values() if shard is not None)
  cache = TokenCache(shards, _fingerprint(shards))
  if cache.num_bad > recipe.max_bad_records:
    raise too_many(cache.num_bad, recipe.max_bad_records, cache.first_bad)
  return cache


def shard_jobs(
  documents: Sequence[Document], folder: Path, part: str, recipe: Recipe
) -> list[ShardJob]:
  """The shards that `open_or_build` opens or makes; none of them is looked at."""
  return [
    ShardJob(folder / f"{part}-{cache_key(each, recipe)}.tokens", each)
    for each in _grouped(documents, recipe.sources)
  ]


def can_be_divided(sources: Sources) -> Callable[[SourceFile], bool]:
  """Whether a part of a file can be read without all that stands before it."""
  return text.can_be_divided if sources.format == "text" else FORMATS[sources.format].can_be_divided


def _grouped(documents: Sequence[Document], sources: Sources) -> Iterator[tuple[Document, ...]]:
  """The documents of each shard: small files together, large ones in pieces if they can be.

  A function of the documents alone, so that every machine with the same files has the same shards.
  """
  is_divisible = can_be_divided(sources)
  shard_bytes = max(SHARD_BYTES, sum(map(source_bytes, documents)) // _MOST_SHARDS)
  group: list[Document] = []
  size = 0
  for document in documents:
    num_pieces = -(-source_bytes(document) // shard_bytes)
    if num_pieces < 2 or not is_divisible(document.file):
      pieces = [document]
    else:
      pieces = [
        dataclasses.replace(document, piece=piece, num_pieces=num_pieces)
        for piece in range(num_pieces)
      ]
    for piece in pieces:
      if group and size + source_bytes(piece) > shard_bytes:
        yield tuple(group)
        group, size = [], 0
      group.append(piece)
      size += source_bytes(piece)
  yield tuple(group)


def cache_key(documents: Sequence[Document], recipe: Recipe) -> str:
  """A hash of everything that determines the documents' tokens; no file is read for it."""
  parts = [(*_file(each), each.begin, each.end, each.piece, each.num_pieces) for each in documents]
  tokenizer, sources = recipe.tokenizer, recipe.sources
  kind = type(tokenizer)
  name = (kind.__module__, kind.__qualname__, tokenizer.version, tokenizer.vocab_size)
  how = (recipe.add_bos, recipe.add_eos, sources.format, sources.column, sources.is_tokenized)
  how += (recipe.chat.version,) if recipe.chat else ()
  how += ("weights", sources.weights_column) if sources.weights_column else ()
  content = json.dumps([_FORMAT, name, how, sources.kind == "stdlib", parts])
  return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def _file(document: Document) -> tuple[str, str, int, int | str]:
  file = document.file
  return file.path, file.name, file.size_bytes, file.version or file.modified_ns


def _fingerprint(shards: Sequence[TokenShard]) -> str:
  """Of all tokens one after the other; of very many, of the shards' fingerprints."""
  if len(shards) == 1 and not shards[0].weights_fingerprint:
    return shards[0].fingerprint
  digest = new_hash()
  is_small = sum(os.path.getsize(shard.path) for shard in shards) <= FULL_CHECK_BYTES
  for shard in shards:
    digest.update(shard.tokens.data if is_small else shard.fingerprint.encode())
    digest.update(shard.weights_fingerprint.encode())
  return digest.hexdigest()
