"""Parquet, and Arrow files, streams of batches or not, as Hugging Face's datasets are on disk; by pyarrow."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from maxbatch.config.registry import library
from maxbatch.data.formats.format import Record, RecordFormat, damaged, naming_errors
from maxbatch.data.sources import SourceFile
from maxbatch.errors import UserError


def check_columns(key: str, file: SourceFile, schema: Any, column: str, weights: str) -> None:
  """Refuses a file without that column, or with one that is neither text nor lists of integers."""
  types = library("pyarrow.types", file.path)
  if column not in schema.names:
    raise UserError(
      f"{key}: {file.path} has no column {column}, named by train_data_columns or "
      f"eval_data_columns; its columns: {', '.join(schema.names) or 'none'}"
    )
  type_ = schema.field(column).type
  kind = type_.value_type if types.is_dictionary(type_) else type_
  texts = ("string", "large_string", "string_view", "binary", "large_binary")
  is_text = any(getattr(types, f"is_{name}")(kind) for name in texts)
  is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
  # A list is of ids, or of messages.
  is_list = is_list and (types.is_integer(kind.value_type) or types.is_struct(kind.value_type))
  if not (is_text or is_list or types.is_null(kind)):
    raise UserError(
      f"{key}: the column {column} of {file.path} is of type {type_}, but must hold text, or token "
      "ids with tokenize_train_data=false; name another column in train_data_columns"
    )
  if weights and weights not in schema.names:
    raise UserError(
      f"{key}: {file.path} has no column {weights}, named by weights_column; its columns: "
      f"{', '.join(schema.names)}"
    )


def weights_of(batch: Any, column: str) -> Iterable[object]:
  """Yields what the column of weights holds for every row; None where there is no such column."""
  return values(batch.column(column)) if column else itertools.repeat(None, batch.num_rows)


def values(column: Any) -> Iterator[object]:
  """Yields text, bytes, arrays of ids or lists of messages; None where the value is null."""
  types = library("pyarrow.types", "a column")
  kind = column.type
  if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
    is_ids = types.is_integer(kind.value_type)
    for value in column:
      is_array = value.is_valid and is_ids
      yield value.values.to_numpy(zero_copy_only=False) if is_array else value.as_py()
    return
  if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
    # pyarrow would raise where a value is not UTF-8, and not say of which row.
    column = column.cast("large_binary" if types.is_large_string(kind) else "binary")
  for value in column:
    yield value.as_py()


_MAGIC = b"ARROW1"


def _arrow_size(key: str, file: SourceFile) -> int:
  """Returns the number of rows, by the headers of all batches: the contents are not read."""
  with _opened_arrow(key, file, is_mapped=True) as (_, batches):
    return sum(batch.num_rows for batch in batches)


def _read_arrow(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened_arrow(key, file) as (schema, batches):
    check_columns(key, file, schema, column, weights)
    first = 0
    for batch in batches:
      if first >= stop:
        return
      inside = range(max(start - first, 0), min(stop - first, batch.num_rows))
      if inside:
        part = batch.slice(inside.start, len(inside))
        result = zip(values(part.column(column)), weights_of(part, weights), strict=True)
        for place, (value, weight) in enumerate(result, start=first + inside.start):
          yield Record(place, value, weight)
      first += batch.num_rows


@contextlib.contextmanager
def _opened_arrow(
  key: str, file: SourceFile, *, is_mapped: bool = False
) -> Iterator[tuple[Any, Iterator[Any]]]:
  """Opens a file; yields its schema and batches. If mapped, all that was read stays in memory."""
  pyarrow, ipc = library("pyarrow", file.path), library("pyarrow.ipc", file.path)
  open_file = pyarrow.memory_map if is_mapped else pyarrow.OSFile
  with (
    naming_errors(key, file, "Arrow", pyarrow.ArrowException),
    open_file(file.local_path) as stream,
  ):
    is_file = stream.read(len(_MAGIC)) == _MAGIC
    stream.seek(0)
    if is_file:
      opened = ipc.open_file(stream)
      yield opened.schema, map(opened.get_batch, range(opened.num_record_batches))
    else:
      _check_end(key, file)
      opened = ipc.open_stream(stream)
      yield opened.schema, iter(opened)


def _check_end(key: str, file: SourceFile) -> None:
  """Refuses a stream that was truncated between two batches, which pyarrow takes for its end."""
  with open(file.local_path, "rb") as stream:
    stream.seek(max(0, file.size_bytes - 8))
    if stream.read() != b"\xff\xff\xff\xff\0\0\0\0":
      raise damaged(key, file, "Arrow", "it ends without the mark of a stream's end")


ARROW = RecordFormat(
  suffix=r"\.(arrow|feather|ipc)$",
  size=_arrow_size,
  read=_read_arrow,
  # A stream of batches is read from its beginning; datasets divide them into files of 500 MB.
  can_be_divided=lambda file: False,
)


# All of a batch is in memory, and records may be large.
_BATCH_BYTES = 8 * 2**20
_MOST_ROWS = 1024


def _parquet_size(key: str, file: SourceFile) -> int:
  with _opened_parquet(key, file) as opened:
    return opened.metadata.num_rows


def _read_parquet(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened_parquet(key, file) as opened:
    check_columns(key, file, opened.schema_arrow, column, weights)
    firsts = _first_rows(opened)
    ends = enumerate(itertools.pairwise(firsts))
    groups = [group for group, (first, end) in ends if first < stop and end > start]
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
  """Returns where the next row group begins: to read the last row of one, all of it is read."""
  with _opened_parquet(key, file) as opened:
    return next(first for first in _first_rows(opened) if first >= place)


def _first_rows(opened: Any) -> list[int]:
  groups = range(opened.num_row_groups)
  counts = (opened.metadata.row_group(group).num_rows for group in groups)
  return [0, *itertools.accumulate(counts)]


def _rows_at_once(opened: Any, column: str, groups: Sequence[int]) -> int:
  """Returns how many rows to read at once, by the mean of the row group with the largest."""
  means = []
  for group in groups:
    metadata = opened.metadata.row_group(group)
    leaves = (metadata.column(number) for number in range(metadata.num_columns))
    own = [leaf for leaf in leaves if f"{leaf.path_in_schema}.".startswith(f"{column}.")]
    means.append(sum(leaf.total_uncompressed_size for leaf in own) // max(metadata.num_rows, 1))
  return min(max(_BATCH_BYTES // max(1, *means), 1), _MOST_ROWS)


@contextlib.contextmanager
def _opened_parquet(key: str, file: SourceFile) -> Iterator[Any]:
  pyarrow = library("pyarrow", file.path)
  parquet = library("pyarrow.parquet", file.path)
  with (
    naming_errors(key, file, "Parquet", pyarrow.ArrowException),
    parquet.ParquetFile(file.local_path, pre_buffer=False, buffer_size=2**20) as opened,
  ):
    yield opened


PARQUET = RecordFormat(
  suffix=r"\.(parquet|pq)$",
  size=_parquet_size,
  read=_read_parquet,
  can_be_divided=lambda file: True,
  next_cut=_next_row_group,
)
