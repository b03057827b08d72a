"""Parquet, by pyarrow."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from maxbatch.data.formats.arrow_columns import (
  check_column,
  check_weights,
  values,
  weights_of,
)
from maxbatch.data.formats.format import Record, RecordFormat, damaged, unreadable
from maxbatch.data.optional import library
from maxbatch.data.sources import SourceFile

# All of a batch is in memory, and records may be large.
_BATCH_BYTES = 8 * 2**20
_MOST_ROWS = 1024


def _size(key: str, file: SourceFile) -> int:
  """In rows, as the file's end says."""
  with _opened(key, file) as opened:
    return opened.metadata.num_rows


def _read(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened(key, file) as opened:
    check_column(key, file, opened.schema_arrow, column)
    check_weights(key, file, opened.schema_arrow, weights)
    firsts = _first_rows(opened)
    groups = [
      group
      for group, (first, end) in enumerate(itertools.pairwise(firsts))
      if first < stop and end > start
    ]
    if not groups:
      return
    place = firsts[groups[0]]
    rows = _rows_at_once(opened, column, groups)
    columns = [column, weights] if weights else [column]
    for batch in opened.iter_batches(rows, row_groups=groups, columns=columns):
      for value, weight in zip(
        values(batch.column(column)), weights_of(batch, weights), strict=True
      ):
        if start <= place < stop:
          yield Record(place, value, weight)
        place += 1
      if place >= stop:
        return


def _next_row_group(key: str, file: SourceFile, place: int) -> int:
  """Where the next row group begins: to read its last row, all of a group is read."""
  with _opened(key, file) as opened:
    return next(first for first in _first_rows(opened) if first >= place)


def _first_rows(opened: Any) -> list[int]:
  """The first row of every row group, and the number of all rows."""
  groups = range(opened.num_row_groups)
  counts = (opened.metadata.row_group(group).num_rows for group in groups)
  return [0, *itertools.accumulate(counts)]


def _rows_at_once(opened: Any, column: str, groups: Sequence[int]) -> int:
  """As many as are not too large, by the mean of the row group with the largest."""
  means = []
  for group in groups:
    metadata = opened.metadata.row_group(group)
    leaves = (metadata.column(number) for number in range(metadata.num_columns))
    own = [leaf for leaf in leaves if f"{leaf.path_in_schema}.".startswith(f"{column}.")]
    means.append(sum(leaf.total_uncompressed_size for leaf in own) // max(metadata.num_rows, 1))
  return min(max(_BATCH_BYTES // max(1, *means), 1), _MOST_ROWS)


@contextlib.contextmanager
def _opened(key: str, file: SourceFile) -> Iterator[Any]:
  pyarrow = library("pyarrow", file.path)
  parquet = library("pyarrow.parquet", file.path)
  try:
    with parquet.ParquetFile(file.local_path, pre_buffer=False, buffer_size=2**20) as opened:
      yield opened
  except pyarrow.ArrowException as error:
    raise damaged(key, file, "Parquet", error) from error
  except OSError as error:
    if error.errno is None:  # Of pyarrow, about the contents.
      raise damaged(key, file, "Parquet", error) from error
    raise unreadable(key, file, error) from error


PARQUET = RecordFormat(
  suffix=r"\.(parquet|pq)$",
  size=_size,
  read=_read,
  can_be_divided=lambda file: True,
  next_cut=_next_row_group,
)
