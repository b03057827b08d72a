"""Packs documents into rows: which pieces of which documents share a row.

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

G groups of a chunk, K open rows, N documents of a group.
"""

import dataclasses
from typing import Literal

import numpy as np

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
  """The places int64[D] that the documents between the offsets int64[D+1] need in rows of `length`."""
  needed = np.maximum(np.diff(offsets) - 1, 0)
  return np.minimum(needed, length) if truncate else needed


def group_documents(num_documents: int, num_places: int, length: int) -> int:
  """How many documents are packed as a group, for rests of `num_places` places together."""
  for_rows = -(-_GROUP_ROWS * length * num_documents // max(num_places, 1))
  return min(max(_GROUP_DOCUMENTS, for_rows), max(num_documents, 1))


def pack(offsets: np.ndarray, length: int, fit: Fit, group: int, *, truncate: bool) -> Pieces:
  """The rows of the documents between the offsets int64[D+1].

  Args:
    offsets: the first token of each document, and the end of the last.
    length: T, the places of a row.
    fit: how rests are packed.
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
  """First token and places of every piece in the order of the documents, and its number."""
  pieces = whole + (rest > 0)
  number = np.arange(pieces.sum())
  document = np.repeat(np.arange(len(pieces)), pieces)
  within = number - np.repeat(np.cumsum(pieces) - pieces, pieces)
  lengths = np.where(within < whole[document], length, rest[document])
  return begins[document] + within * length, lengths, number


def _fit(sizes: np.ndarray, length: int, fit: Fit, group: int) -> np.ndarray:
  """A row for each of the sizes int[D] below `length`, numbered by group and then by opening."""
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
