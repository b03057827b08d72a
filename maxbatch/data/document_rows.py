"""Rows of the documents of a token cache: windows of all tokens one after the other, or whole documents.

R rows, T tokens per row, P pieces of documents in these rows.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxbatch.config.schema import DataConfig
from maxbatch.data.pack_index import Layout, PackIndex, open_or_build
from maxbatch.data.rows import WHOLE, Arrays, RowPart, RowSource
from maxbatch.data.token_cache import TokenCache
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError


class Before(NamedTuple):
  """What a row has before the part of it that is read."""

  segments_R: np.ndarray
  """How many begin there and end there."""
  tokens_R: np.ndarray
  """How many there are of the segment that the part begins in."""


def segments(
  begins_RT: np.ndarray, filled_R: np.ndarray, before: Before | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns segment numbers and positions, int32[R, T] each, of rows of packed documents.

  Segments count 1, 2, 3 … by document within the row, 0 is padding; positions restart at 0 with
  each document. A row that begins inside a document counts that rest as its first segment.

  Args:
    begins_RT: bool, where a document begins; changed in place.
    filled_R: the tokens of each row that are no padding, which is at its end.
    before: where these are parts of rows; None: they begin here.
  """
  length = begins_RT.shape[1]
  begins_RT[:, 0] = True
  # Documents are few, tokens are many: what belongs to a document is repeated for its tokens.
  firsts = np.flatnonzero(begins_RT)
  num_tokens = np.diff(firsts, append=begins_RT.size)
  rows = firsts // length
  numbers = np.arange(1, len(firsts) + 1) - np.searchsorted(rows, rows)
  origins = firsts.astype(np.int32)
  if before is not None:
    numbers += before.segments_R[rows]
    origins[firsts % length == 0] -= before.tokens_R.astype(np.int32)
  segment_ids_RT = np.repeat(numbers.astype(np.int32), num_tokens).reshape(begins_RT.shape)
  places = np.arange(begins_RT.size, dtype=np.int32)
  positions_RT = (places - np.repeat(origins, num_tokens)).reshape(begins_RT.shape)
  for array_RT in (segment_ids_RT, positions_RT):
    clear_padding(array_RT, filled_R)
  return segment_ids_RT, positions_RT


def clear_padding(array_RT: np.ndarray, filled_R: np.ndarray) -> None:
  """Sets to 0 what comes after the first `filled_R` of each row."""
  length = array_RT.shape[1]
  for row in np.flatnonzero(filled_R < length).tolist():
    array_RT[row, filled_R[row] :] = 0


def _blank(shape_RT: tuple[int, int], pad_id: int) -> Arrays:
  tokens = {name: np.full(shape_RT, pad_id, np.int32) for name in ("inputs", "targets")}
  return tokens | {"weights": np.ones(shape_RT, np.float32)}


@dataclasses.dataclass(frozen=True)
class TokenWindows:
  """The rows of one cache."""

  cache: TokenCache
  length: int
  packing: bool
  pad_id: int

  def __len__(self) -> int:
    return max(0, -(-(self.cache.num_tokens - 1) // self.length))

  def rows(self, indices: np.ndarray) -> Arrays:
    """Returns the windows int[R] as new arrays, see `RowSource.rows`."""
    return self.part_of_rows(indices, WHOLE)

  def part_of_rows(self, indices: np.ndarray, part: RowPart) -> Arrays:
    """Returns a part of the windows int[R] as new arrays, see `RowSource.rows`.

    The weight is 0 where the target is padding and, when packing, where it begins the next
    document, which nothing in this one predicts; and where the data say so.
    """
    cache, own = self.cache, part.tokens(self.length)
    shape_RT = len(indices), (length := own.stop - own.start)
    begins_R = np.asarray(indices, np.int64) * self.length
    starts_R = begins_R + own.start
    num_inputs_R = np.clip(cache.num_tokens - starts_R, 0, length)
    num_targets_R = np.clip(cache.num_tokens - starts_R - 1, 0, length)
    places_R = np.arange(len(indices)) * length
    arrays = _blank(shape_RT, self.pad_id)
    cache.copy_tokens(starts_R, num_inputs_R, arrays["inputs"], places_R)
    cache.copy_tokens(starts_R + 1, num_targets_R, arrays["targets"], places_R)
    cache.copy_weights(starts_R + 1, num_targets_R, arrays["weights"], places_R)
    clear_padding(arrays["weights"], num_targets_R)
    if self.packing:
      begins_RT = np.zeros(shape_RT, bool)
      # Of the targets, from the row's first: where a document begins as an input, one token later.
      rows, columns = cache.document_starts(begins_R + 1, starts_R + 1 + length)
      columns -= own.start
      inside = columns >= 0
      arrays["weights"][rows[inside], columns[inside]] = 0
      inside = (columns >= 0) & (columns + 1 < length)
      begins_RT[rows[inside], columns[inside] + 1] = True
      before = None
      if own.start:
        rows, columns = rows[columns < 0], columns[columns < 0]
        tokens_R = np.full(len(indices), own.start)
        tokens_R[rows] = -1 - columns  # They ascend: of several in a row the last.
        before = Before(np.bincount(rows, minlength=len(indices)), tokens_R)
      arrays["segment_ids"], arrays["positions"] = segments(begins_RT, num_inputs_R, before)
    return arrays


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """The rows of one cache and one index."""

  cache: TokenCache
  index: PackIndex
  pad_id: int
  segmented: bool
  """Whether rows say which tokens belong together; else a token sees all before it in the row."""

  def __len__(self) -> int:
    return self.index.packed.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    """Returns the rows int[R] as new arrays, see `RowSource.rows`; padding has weight 0."""
    return self.part_of_rows(indices, WHOLE)

  def part_of_rows(self, indices: np.ndarray, part: RowPart) -> Arrays:
    """Returns a part of the rows int[R] as new arrays, likewise."""
    pieces, own = (
      self.index.pieces(np.asarray(indices, np.int64)),
      part.tokens(self.index.layout.length),
    )
    shape_RT = (len(indices), own.stop - own.start)
    starts_P, lengths_P = pieces.starts, pieces.lengths
    rows_P = np.repeat(np.arange(len(indices)), pieces.counts)
    filled_R = np.bincount(rows_P, lengths_P, len(indices)).astype(np.int64)
    # In their rows, of which the part begins at 0.
    rests_R = np.cumsum(filled_R) - filled_R
    places_P = np.cumsum(lengths_P) - lengths_P - rests_R[rows_P] - own.start
    filled_R, before = np.clip(filled_R - own.start, 0, shape_RT[1]), None
    if part != WHOLE:
      cut_P, ends_P = np.maximum(-places_P, 0), places_P + lengths_P
      lengths_P = np.minimum(ends_P, shape_RT[1]) - np.maximum(places_P, 0)
      earlier_R = np.bincount(rows_P[ends_P <= 0], minlength=len(indices))
      kept = lengths_P > 0
      tokens_R = np.zeros(len(indices), np.int64)
      tokens_R[rows_P[kept & (cut_P > 0)]] = cut_P[kept & (cut_P > 0)]
      before = Before(earlier_R, tokens_R)
      starts_P, places_P = (starts_P + cut_P)[kept], (places_P + cut_P)[kept]
      lengths_P, rows_P = lengths_P[kept], rows_P[kept]
    places_P = places_P + rows_P * shape_RT[1]
    arrays = _blank(shape_RT, self.pad_id)
    self.cache.copy_tokens(starts_P, lengths_P, arrays["inputs"], places_P)
    self.cache.copy_tokens(starts_P + 1, lengths_P, arrays["targets"], places_P)
    self.cache.copy_weights(starts_P + 1, lengths_P, arrays["weights"], places_P)
    clear_padding(arrays["weights"], filled_R)
    if self.segmented:
      begins_RT = np.zeros(shape_RT, bool)
      begins_RT.reshape(-1)[places_P] = True
      arrays["segment_ids"], arrays["positions"] = segments(begins_RT, filled_R, before)
    return arrays


def layout_of(data: DataConfig, length: int) -> Layout | None:
  """Returns how documents are packed into rows of `length` tokens; None: concatenated and then
  divided. Raises UserError: use_truncation=true where no document is longer than its row."""
  if not data.packing:
    return Layout(length, "alone", data.use_truncation)
  if data.grain_packing_type != "concat_then_split":
    return Layout(length, data.grain_packing_type, data.use_truncation)
  if data.use_truncation:
    raise UserError(
      "use_truncation=true: grain_packing_type=concat_then_split divides documents where a row "
      "ends, so none is cut; set use_truncation=false, or grain_packing_type=best_fit to keep the "
      "beginning of each document that is longer than a row"
    )
  return None


def rows_name(data: DataConfig, length: int) -> str:
  """Returns what a fingerprint says of the rows besides their tokens; empty for the default."""
  layout = layout_of(data, length)
  name = f"-{layout.name}" if layout else ""
  return name if data.segmented or not data.packing else f"{name}-unsegmented"


def document_rows(
  cache: TokenCache, data: DataConfig, tokenizer: Tokenizer, length: int, folder: Path, part: str
) -> RowSource:
  """Returns the rows of `length` tokens of the documents of `cache`. Raises UserError: keys that
  exclude each other, the index cannot be written, or there is no row."""
  layout = layout_of(data, length)
  if layout is None:
    return TokenWindows(cache, length, data.segmented, tokenizer.pad_id)
  index = open_or_build(folder, part, cache, layout)
  return PackedRows(cache, index, tokenizer.pad_id, segmented=data.segmented)
