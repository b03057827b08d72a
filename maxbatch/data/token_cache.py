"""The token cache: every document as token ids on disk, made once, by all the cores there are.

It is made of shards, each of some megabytes of sources. A shard's name derives from its sources'
paths, sizes and times of change and from the tokenizer, so a finished one never changes while a run
has it open, and stays good whatever becomes of other files. Whoever needs a shard claims it, makes
it and goes to the next: processes of one run, other runs and other hosts share the work, and what an
interrupted run had finished is there for the next one.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from maxbatch.data.formats import text
from maxbatch.data.record_files import FORMATS
from maxbatch.data.sources import Document, SourceFile, Sources
from maxbatch.data.token_shard import (
  FULL_CHECK_BYTES,
  ShardJob,
  TokenShard,
  make_shards,
  open_shard,
  remove_damaged,
)
from maxbatch.data.tokenize import Recipe, new_hash, source_bytes, too_many
from maxbatch.data.workers import make_shards_in_processes, tokenizing_progress

_FORMAT = 4
SHARD_BYTES = 16 * 2**20
"""Bytes of a shard's sources, if there are not too many of them: seconds to a minute for a core."""
_MOST_SHARDS = 4096


@dataclasses.dataclass(frozen=True)
class TokenCache:
  """A finished cache: the tokens of its shards one after the other."""

  shards: tuple[TokenShard, ...]
  fingerprint: str
  """Hash of the tokens: equal on every machine that has the same files."""

  @functools.cached_property
  def _firsts(self) -> np.ndarray:
    """The first token's number of every shard, and the number of all, int64[shards + 1]."""
    return np.cumsum([0, *(shard.num_tokens for shard in self.shards)])

  @functools.cached_property
  def _has_weights(self) -> bool:
    return any(shard.weights_fingerprint for shard in self.shards)

  @property
  def num_tokens(self) -> int:
    """Tokens of all documents, with those that begin and end them."""
    return int(self._firsts[-1])

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
    """The first bad record's fault, and where it is."""
    return next((shard.first_bad for shard in self.shards if shard.num_bad), "")

  def read(self, start: int, stop: int) -> np.ndarray:
    """Reads the ids [stop - start] from token `start` on, fewer at the end; see `copy_tokens`."""
    length = min(stop, self.num_tokens) - start
    tokens = np.empty(length, self.shards[0].dtype)
    self.copy_tokens(np.array([start]), np.array([length]), tokens, np.array([0]))
    return tokens

  def copy_tokens(
    self, starts_P: np.ndarray, lengths_P: np.ndarray, out: np.ndarray, places_P: np.ndarray
  ) -> None:
    """Copies pieces of the tokens to places in `out`, whatever its shape.

    Args:
      starts_P: the first token of each piece.
      lengths_P: its tokens, which there must be.
      out: contiguous, changed in place.
      places_P: where the first token of each piece goes in out.reshape(-1).

    Raises OSError: a file of the cache is gone or truncated.
    """
    self._copy(operator.attrgetter("tokens"), starts_P, lengths_P, out, places_P)

  def copy_weights(
    self, starts_P: np.ndarray, lengths_P: np.ndarray, out: np.ndarray, places_P: np.ndarray
  ) -> None:
    """Copies which tokens are targets, 1 or 0, likewise; leaves `out` as it is where all are."""
    if self._has_weights:
      self._copy(operator.attrgetter("weights"), starts_P, lengths_P, out, places_P)

  def counts_any(self) -> bool:
    """Returns whether some token counts as a target."""
    return any(shard.weights.any() for shard in self.shards) if self._has_weights else True

  def _copy(
    self,
    column: Callable[[TokenShard], np.ndarray],
    starts_P: np.ndarray,
    lengths_P: np.ndarray,
    out: np.ndarray,
    places_P: np.ndarray,
  ) -> None:
    flat, ends_P = out.reshape(-1), places_P + lengths_P
    numbers_P, begins_P = self._located(starts_P)
    pieces = zip(*map(np.ndarray.tolist, (numbers_P, begins_P, places_P, ends_P)), strict=True)
    for number, begin, place, end in pieces:
      while place < end:  # A piece may go on in the next shard.
        part = column(self.shards[number])[begin : begin + end - place]
        flat[place : place + part.size] = part
        number, begin, place = number + 1, 0, place + part.size

  def document_starts(
    self, starts_R: np.ndarray, stops_R: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents that begin in each of the ranges [start, stop) of tokens, in order.

    Returns: The range int64[D] that each document begins in, and how far from its start int64[D].

    Raises OSError: a file of the cache is gone or truncated.
    """
    which, counts, places = [0], [0], [np.empty(0, np.int64)]
    numbers_R, begins_R = self._located(starts_R)
    ranges = zip(*map(np.ndarray.tolist, (numbers_R, begins_R, stops_R - starts_R)), strict=True)
    for one, (number, begin, length) in enumerate(ranges):
      passed = 0
      while passed < length and number < len(self.shards):  # It may go on in the next shard.
        shard = self.shards[number]
        starts, end = shard.document_starts, begin + length - passed
        # The method: numpy's function of that name takes twice as long, and this is for every row.
        first, last = starts.searchsorted(begin), starts.searchsorted(end)
        if first < last:
          which.append(one)
          counts.append(last - first)
          places.append(starts[first:last] + (passed - begin))
        passed += shard.num_tokens - begin
        number, begin = number + 1, 0
    return np.repeat(which, counts), np.concatenate(places)

  def _located(self, tokens_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the shard of each token, and its index within the shard, int64[P] each."""
    numbers_P = np.searchsorted(self._firsts, tokens_P, "right") - 1
    return numbers_P, tokens_P - self._firsts[numbers_P]

  def __getstate__(self) -> dict[str, object]:
    return {"shards": self.shards, "fingerprint": self.fingerprint}


def open_or_build(
  documents: Sequence[Document], folder: Path, part: str, recipe: Recipe
) -> TokenCache:
  """Returns the cache of `documents`: opened in `folder`, built there, or completed. Raises
  UserError: an input or the folder cannot be used; names it."""
  recipe = dataclasses.replace(recipe, sources=dataclasses.replace(recipe.sources, files=()))
  jobs = shard_jobs(documents, folder, part, recipe)
  size = sum(os.path.getsize(job.path) for job in jobs if job.path.is_file())
  check = size <= FULL_CHECK_BYTES
  results = {job.path: open_shard(job.path, check=check) for job in jobs}
  if missing := [job for job in jobs if results[job.path] is None]:
    for job in missing:
      if job.path.exists():
        remove_damaged(job, recipe, check=check)
    with tokenizing_progress(part, sum(job.size_bytes for job in missing)) as report:
      make_shards_in_processes(missing, recipe, report)
      make_shards(missing, recipe, report)
    results |= {job.path: open_shard(job.path, check=False) for job in missing}
  shards = tuple(shard for shard in results.values() if shard is not None)
  cache = TokenCache(shards, _fingerprint(shards))
  if cache.num_bad > recipe.max_bad_records:
    raise too_many(cache.num_bad, recipe.max_bad_records, cache.first_bad)
  return cache


def shard_jobs(
  documents: Sequence[Document], folder: Path, part: str, recipe: Recipe
) -> list[ShardJob]:
  """Returns the shards that `open_or_build` opens or makes, without looking at any."""
  return [
    ShardJob(folder / f"{part}-{cache_key(each, recipe)}.tokens", each)
    for each in _grouped(documents, recipe.sources)
  ]


def can_be_divided(sources: Sources) -> Callable[[SourceFile], bool]:
  """Returns a function that tells whether part of a file can be read without what is before."""
  return text.can_be_divided if sources.format == "text" else FORMATS[sources.format].can_be_divided


def _grouped(documents: Sequence[Document], sources: Sources) -> Iterator[tuple[Document, ...]]:
  """Yields the documents of each shard: small files together, large ones in pieces if they can be.

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
  """Returns a hash of everything that determines the documents' tokens; no file is read for it."""
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
  """Returns the fingerprint of all tokens in order; of very many, of the shards' fingerprints."""
  if len(shards) == 1 and not shards[0].weights_fingerprint:
    return shards[0].fingerprint
  digest = new_hash()
  is_small = sum(os.path.getsize(shard.path) for shard in shards) <= FULL_CHECK_BYTES
  for shard in shards:
    digest.update(shard.tokens.data if is_small else shard.fingerprint.encode())
    digest.update(shard.weights_fingerprint.encode())
  return digest.hexdigest()
