"""The pack index: which pieces of which documents make up each row, built once beside the cache.

Its name derives from the fingerprints of tokens and documents and from what the rows follow from, so a finished index
never changes; it is written under a temporary name and renamed when complete. On disk are, for P
pieces in R rows: the first token of each piece int64[P], its places int32[P], and where the pieces
of each row end int64[R]. It is mapped, never loaded, so memory does not grow with it.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tqdm

from maxbatch.data.packing import Fit, Pieces, group_documents, pack, places
from maxbatch.data.token_cache import TokenCache
from maxbatch.data.token_shard import FULL_CHECK_BYTES
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import replacing, write_whole

VERSION = 1
"""Of the rows that the same documents are packed to."""
_CHUNK_DOCUMENTS = 2**21

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How documents become rows."""

  length: int
  """T, the places of a row."""
  fit: Fit
  truncate: bool
  """Whether only the beginning of a longer document is kept."""

  @property
  def name(self) -> str:
    """What distinguishes the rows from other rows of the same tokens."""
    return f"{self.fit}{'-truncated' if self.truncate else ''}-{VERSION}"


@dataclasses.dataclass(frozen=True)
class Packed:
  """What packing came to."""

  num_documents: int
  """Those that have a target at all."""
  num_longer: int
  """Documents that are longer than a row."""
  num_places: int
  """Places of all documents, those that are dropped included."""
  num_pieces: int
  num_rows: int
  num_filled: int
  """Places of the rows that are filled."""


@dataclasses.dataclass(frozen=True)
class PackIndex:
  """A finished index on disk; small to pickle, mapped into memory when first read."""

  path: str
  layout: Layout
  packed: Packed
  fingerprint: str

  @functools.cached_property
  def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pieces, rows = self.packed.num_pieces, self.packed.num_rows
    mapped = np.memmap(self.path, mode="r", dtype=np.uint8)
    if mapped.size != _size(self.packed):
      raise OSError(f"{self.path} holds {mapped.size} bytes instead of {_size(self.packed)}")
    content = np.asarray(mapped)
    return (
      content[: 8 * pieces].view("<i8"),
      content[8 * pieces : 12 * pieces].view("<i4"),
      np.frombuffer(content, "<i8", rows, 12 * pieces),
    )

  def pieces(self, rows: np.ndarray) -> Pieces:
    """The pieces of the rows int64[R], row by row."""
    starts, lengths, ends = self._arrays
    last = ends[rows]
    first = np.where(rows > 0, ends[rows - 1], 0)
    counts = last - first
    which = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return Pieces(starts[which], lengths[which], counts)

  def __getstate__(self) -> dict[str, object]:
    """Leaves the mapping out."""
    return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}

  def __str__(self) -> str:
    """What packing came to, in a line."""
    packed = self.packed
    padding = 1 - packed.num_filled / (packed.num_rows * self.layout.length)
    shared = {"first_fit": "first fit, ", "best_fit": "best fit, "}.get(self.layout.fit, "")
    line = f"{packed.num_rows:,} rows: {shared}{padding:.2%} padding"
    if not packed.num_longer:
      return line
    longer = f"{packed.num_longer:,} of {packed.num_documents:,} documents are longer than a row"
    lost = 1 - packed.num_filled / packed.num_places
    what = f"cut, with {lost:.2%} of the tokens" if self.layout.truncate else "divided"
    return f"{line}; {longer} and {what}"


def open_or_build(folder: Path, part: str, cache: TokenCache, layout: Layout) -> PackIndex:
  """The index of the documents of `cache`: opened in `folder`, or built there.

  Args:
    folder: the folder of all caches.
    part: "train" or "validation", part of the file's name.
    cache: the documents.
    layout: how they become rows.

  Raises:
    UserError: the folder cannot be written.
  """
  prints = [(each.fingerprint, each.documents_fingerprint) for each in cache.shards]
  content = json.dumps([prints, layout.length, layout.name])
  path = folder / f"{part}-{_new_hash(content.encode()).hexdigest()}.rows"
  if (index := _open(path, layout)) is not None:
    return index
  try:
    with replacing(path) as file:
      packed = _write(file, cache, layout, part)
    with open(path, "rb") as written:
      fingerprint = hashlib.file_digest(written, _new_hash).hexdigest()
    metadata = {"packed": dataclasses.asdict(packed), "fingerprint": fingerprint}
    write_whole(_metadata_path(path), json.dumps(metadata, indent=1))
  except OSError as error:
    raise UserError(
      f"dataset_cache_directory={folder}: cannot write the pack index {path}: "
      f"{error.strerror or error}; it takes 12 bytes per document and 8 per row. Free some space "
      "there, or set dataset_cache_directory to a folder you can write to"
    ) from error
  return PackIndex(str(path), layout, packed, fingerprint)


def _new_hash(content: bytes = b""):
  return hashlib.blake2b(content, digest_size=12)


def _metadata_path(path: Path) -> Path:
  return path.with_suffix(".rows.json")


def _size(packed: Packed) -> int:
  return 12 * packed.num_pieces + 8 * packed.num_rows


def _open(path: Path, layout: Layout) -> PackIndex | None:
  """The index at `path` if it exists and is intact."""
  if not path.exists() or not _metadata_path(path).exists():
    return None
  try:
    metadata = json.loads(_metadata_path(path).read_text())
    packed, fingerprint = Packed(**metadata["packed"]), str(metadata["fingerprint"])
    size = os.path.getsize(path)
    intact = size == _size(packed)
    if intact and size <= FULL_CHECK_BYTES:
      with open(path, "rb") as file:
        intact = hashlib.file_digest(file, _new_hash).hexdigest() == fingerprint
  except (OSError, ValueError, KeyError, TypeError) as error:
    _log.warning("The pack index %s cannot be read (%s). Building it again.", path, error)
    return None
  if not intact:
    _log.warning("The pack index %s is damaged. Building it again.", path)
    return None
  return PackIndex(str(path), layout, packed, fingerprint)


def _write(file: BinaryIO, cache: TokenCache, layout: Layout, part: str) -> Packed:
  """Packs chunk by chunk; the numbers of pieces are known before, those of rows are not."""
  total, rests = _counted(cache, layout)
  group = group_documents(*rests, layout.length)
  pieces, rows = 0, 0
  chunk = group * max(1, _CHUNK_DOCUMENTS // group)
  # disable=None: no bar where the output is not a terminal.
  with tqdm.tqdm(
    total=cache.num_documents,
    desc=f"packing {part}",
    unit=" documents",
    unit_scale=True,
    disable=None,
    leave=False,
  ) as bar:
    for each in offsets(cache, chunk):
      packed = pack(each, layout.length, layout.fit, group, truncate=layout.truncate)
      ends = pieces + np.cumsum(packed.counts)
      _write_at(file, 8 * pieces, packed.starts.astype("<i8"))
      _write_at(file, 8 * total.num_pieces + 4 * pieces, packed.lengths.astype("<i4"))
      _write_at(file, 12 * total.num_pieces + 8 * rows, ends.astype("<i8"))
      pieces, rows = pieces + len(packed.starts), rows + len(ends)
      bar.update(len(each) - 1)
  return dataclasses.replace(total, num_rows=rows)


def _write_at(file: BinaryIO, position: int, content: np.ndarray) -> None:
  file.seek(position)
  file.write(content.data)


def _counted(cache: TokenCache, layout: Layout) -> tuple[Packed, tuple[int, int]]:
  """What can be said before packing; and how many rests there are, with how many places."""
  sums = np.zeros(7, np.int64)
  for each in offsets(cache, _CHUNK_DOCUMENTS):
    needed, kept = (places(each, layout.length, truncate=cut) for cut in (False, layout.truncate))
    whole, rest = np.divmod(kept, layout.length)
    counted = (needed > 0, needed > layout.length, needed, whole + (rest > 0), kept, rest > 0, rest)
    sums += [int(one.sum()) for one in counted]
  documents, longer, num_places, pieces, filled, rests, rest_places = sums.tolist()
  return Packed(documents, longer, num_places, pieces, 0, filled), (rests, rest_places)


def offsets(cache: TokenCache, documents: int) -> Iterator[np.ndarray]:
  """The first token of every document, so many documents at a time, with the end of the last."""
  waiting, first = np.empty(0, np.int64), 0
  for shard in cache.shards:
    waiting = np.concatenate([waiting, shard.document_starts + first])
    first += shard.num_tokens
    while len(waiting) > documents:
      yield waiting[: documents + 1]
      waiting = waiting[documents:]
  if len(waiting):
    yield np.append(waiting, first)
