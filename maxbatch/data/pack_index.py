"""Packs documents into rows, and keeps the index of these rows beside the token cache.

A document of n tokens has n − 1 targets and so needs n − 1 places. What is longer than a row of T
places is divided into pieces of T, each a row of its own, and a shorter rest; a piece takes one token
more than it has places, so that its last input has a target. Rests are packed whole, in the order
of the documents, with K rows open at a time: first_fit takes the row opened first that has room, best_fit
the one with the least room that suffices. Where no row has room, the fullest is closed and a new one
opened.

Documents are packed in groups, each on its own, all groups of a chunk side by side: the steps of a
group depend on each other, those of different groups do not. So packing takes some tenths of a
microsecond per document, memory for one chunk, and the result does not depend on the chunk. A group
is long enough that the rows it leaves open hardly count.

The index's name derives from the fingerprints of tokens and documents and from what the rows follow
from, so a finished index never changes; it is written under a temporary name and renamed when
complete. On disk are, for P pieces in R rows: the first token of each piece int64[P], its places
int32[P], and where the pieces of each row end int64[R]. It is mapped, never loaded, so memory does
not grow with it.

G groups of a chunk, K open rows, N documents of a group.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import tqdm

from maxbatch.data.token_cache import TokenCache
from maxbatch.data.token_shard import FULL_CHECK_BYTES
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import replacing, write_whole

Fit = Literal["first_fit", "best_fit", "alone"]
"""How rests share rows; alone: not at all."""

_OPEN_ROWS = 64
_GROUP_DOCUMENTS = 2**14
_GROUP_ROWS = 256
"""A group has documents for so many rows at least."""
_NONE = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Pieces:
  """Pieces of documents in the order of their rows."""

  starts: np.ndarray
  """int64[P]: the token that is a piece's first input."""
  lengths: np.ndarray
  """int32[P]: its places."""
  counts: np.ndarray
  """int64[rows]: pieces of each row."""


def places(offsets: np.ndarray, length: int, *, truncate: bool) -> np.ndarray:
  """Returns the places int64[D] that the documents between the offsets int64[D+1] need in rows of
  `length`."""
  needed = np.maximum(np.diff(offsets) - 1, 0)
  return np.minimum(needed, length) if truncate else needed


def group_documents(num_documents: int, num_places: int, length: int) -> int:
  """Returns how many documents are packed as a group, for rests of `num_places` places together."""
  for_rows = -(-_GROUP_ROWS * length * num_documents // max(num_places, 1))
  return min(max(_GROUP_DOCUMENTS, for_rows), max(num_documents, 1))


def pack(offsets: np.ndarray, length: int, fit: Fit, group: int, *, truncate: bool) -> Pieces:
  """Packs the documents between the offsets int64[D+1] into rows.

  Args:
    offsets: the first token of each document, and the end of the last.
    length: T, the places of a row.
    group: documents per group; the first group begins at the first document.
    truncate: drop what is beyond the first T places of a document.
  """
  needed = places(offsets, length, truncate=truncate)
  whole, rest = np.divmod(needed, length)
  starts, lengths, rows = _divided(offsets[:-1], whole, rest, length)
  is_rest = lengths < length
  if fit != "alone" and is_rest.any():
    packed = _fit(rest, length, fit, group)[rest > 0]
    # Rows of whole pieces come after those that are packed.
    rows[~is_rest] += int(packed.max()) + 1
    rows[is_rest] = packed
  order = np.argsort(rows, kind="stable")
  _, counts = np.unique(rows, return_counts=True)
  return Pieces(starts[order], lengths[order].astype(np.int32), counts)


def _divided(
  begins: np.ndarray, whole: np.ndarray, rest: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns first token and places of every piece in the order of the documents, and its number."""
  pieces = whole + (rest > 0)
  number = np.arange(pieces.sum())
  document = np.repeat(np.arange(len(pieces)), pieces)
  within = number - np.repeat(np.cumsum(pieces) - pieces, pieces)
  lengths = np.where(within < whole[document], length, rest[document])
  return begins[document] + within * length, lengths, number


def _fit(sizes: np.ndarray, length: int, fit: Fit, group: int) -> np.ndarray:
  """Returns a row for each of the sizes int[D] below `length`, numbered by group, then opening."""
  num_groups = -(-len(sizes) // group)
  sizes_GN = np.zeros((num_groups, group), np.int32)
  sizes_GN.reshape(-1)[: len(sizes)] = sizes
  rows_GN = np.empty((num_groups, group), np.int64)
  room_GK = np.full((num_groups, _OPEN_ROWS), length, np.int32)
  opened_GK = np.tile(np.arange(_OPEN_ROWS, dtype=np.int32), (num_groups, 1))
  # Each group opens its rows in order: a row that is still empty is never chosen over one begun.
  last_G = np.full(num_groups, _OPEN_ROWS, np.int32)
  preferred_GK = opened_GK if fit == "first_fit" else room_GK
  groups_G = np.arange(num_groups)
  for place, size_G in enumerate(np.ascontiguousarray(sizes_GN.T)):
    fits_GK = np.where(room_GK >= size_G[:, None], preferred_GK, _NONE)
    chosen_G = fits_GK.argmin(axis=1)
    if (full_G := fits_GK[groups_G, chosen_G] == _NONE).any():
      closing = room_GK[full_G].argmin(axis=1)
      chosen_G[full_G] = closing
      room_GK[full_G, closing], opened_GK[full_G, closing] = length, last_G[full_G]
      last_G += full_G
    room_GK[groups_G, chosen_G] -= size_G
    rows_GN[:, place] = opened_GK[groups_G, chosen_G]
  rows_GN += (np.cumsum(last_G, dtype=np.int64) - last_G)[:, None]
  return rows_GN.reshape(-1)[: len(sizes)]


VERSION = 1
"""Version of the rows that the same documents are packed into."""
_CHUNK_DOCUMENTS = 2**21

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How documents become rows."""

  length: int
  """T, the places of a row."""
  fit: Fit
  truncate: bool

  @property
  def name(self) -> str:
    """A name that distinguishes the rows from other rows of the same tokens."""
    return f"{self.fit}{'-truncated' if self.truncate else ''}-{VERSION}"


@dataclasses.dataclass(frozen=True)
class Packed:
  """What packing came to."""

  num_documents: int
  """Those that have a target at all."""
  num_longer: int
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
    """Returns the pieces of the rows int64[R], row by row."""
    starts, lengths, ends = self._arrays
    last = ends[rows]
    first = np.where(rows > 0, ends[rows - 1], 0)
    counts = last - first
    which = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return Pieces(starts[which], lengths[which], counts)

  def __getstate__(self) -> dict[str, object]:
    return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}

  def __str__(self) -> str:
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
  """Returns the index of the documents of `cache`: opened in `folder`, or built there. Raises
  UserError: the folder cannot be written."""
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
    write_whole(path.with_suffix(".rows.json"), json.dumps(metadata, indent=1))
  except OSError as error:
    raise UserError(
      f"dataset_cache_directory={folder}: cannot write the pack index {path}: "
      f"{error.strerror or error}; it takes 12 bytes per document and 8 per row. Free some space "
      "there, or set dataset_cache_directory to a folder you can write to"
    ) from error
  return PackIndex(str(path), layout, packed, fingerprint)


def _new_hash(content: bytes = b""):
  return hashlib.blake2b(content, digest_size=12)


def _size(packed: Packed) -> int:
  return 12 * packed.num_pieces + 8 * packed.num_rows


def _open(path: Path, layout: Layout) -> PackIndex | None:
  if not path.exists() or not path.with_suffix(".rows.json").exists():
    return None
  try:
    metadata = json.loads(path.with_suffix(".rows.json").read_text())
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
  """Returns what is known before packing, and the number of rests with the places they need."""
  sums = np.zeros(7, np.int64)
  for each in offsets(cache, _CHUNK_DOCUMENTS):
    needed, kept = (places(each, layout.length, truncate=cut) for cut in (False, layout.truncate))
    whole, rest = np.divmod(kept, layout.length)
    counted = (needed > 0, needed > layout.length, needed, whole + (rest > 0), kept, rest > 0, rest)
    sums += [int(one.sum()) for one in counted]
  documents, longer, num_places, pieces, filled, rests, rest_places = sums.tolist()
  return Packed(documents, longer, num_places, pieces, 0, filled), (rests, rest_places)


def offsets(cache: TokenCache, documents: int) -> Iterator[np.ndarray]:
  """Yields the first token of every document, `documents` at a time, with the end of the last."""
  waiting, first = np.empty(0, np.int64), 0
  for shard in cache.shards:
    waiting = np.concatenate([waiting, shard.document_starts + first])
    first += shard.num_tokens
    while len(waiting) > documents:
      yield waiting[: documents + 1]
      waiting = waiting[documents:]
  if len(waiting):
    yield np.append(waiting, first)
