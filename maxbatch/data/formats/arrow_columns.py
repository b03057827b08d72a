"""Columns of Parquet and Arrow files: which may be read, and their values one by one."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from maxbatch.data.optional import library
from maxbatch.data.sources import SourceFile
from maxbatch.errors import UserError


def check_column(key: str, file: SourceFile, schema: Any, column: str) -> None:
  """Refuses a file without that column, or where it is neither text nor lists of integers.

  Raises:
    UserError: names the columns that there are.
  """
  types = library("pyarrow.types", file.path)
  if column not in schema.names:
    raise UserError(
      f"{key}: {file.path} has no column {column}, named by train_data_columns or eval_data_columns;"
      f" its columns: {', '.join(schema.names) or 'none'}"
    )
  type_ = schema.field(column).type
  kind = type_.value_type if types.is_dictionary(type_) else type_
  is_text = any(
    is_kind(kind)
    for is_kind in (
      types.is_string,
      types.is_large_string,
      types.is_string_view,
      types.is_binary,
      types.is_large_binary,
    )
  )
  is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
  holds = types.is_null(kind) or (is_list and _is_ids_or_messages(types, kind.value_type))
  if not (is_text or holds):
    raise UserError(
      f"{key}: the column {column} of {file.path} is of type {type_}, and is to hold text, or token "
      "ids with tokenize_train_data=false; name another column in train_data_columns"
    )


def check_weights(key: str, file: SourceFile, schema: Any, column: str) -> None:
  """Refuses a file without that column of weights; empty: none is read.

  Raises:
    UserError: names the columns that there are.
  """
  if column and column not in schema.names:
    raise UserError(
      f"{key}: {file.path} has no column {column}, named by weights_column; its columns: "
      f"{', '.join(schema.names)}"
    )


def _is_ids_or_messages(types: Any, kind: Any) -> bool:
  return types.is_integer(kind) or types.is_struct(kind)


def weights_of(batch: Any, column: str) -> Iterable[object]:
  """What the column of weights holds, for every row; empty: None."""
  return values(batch.column(column)) if column else itertools.repeat(None, batch.num_rows)


def values(column: Any) -> Iterator[object]:
  """Text, bytes, arrays of ids or lists of messages; None where it is null."""
  types = library("pyarrow.types", "a column")
  kind = column.type
  if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
    is_ids = types.is_integer(kind.value_type)
    for value in column:
      if value.is_valid and is_ids:
        yield value.values.to_numpy(zero_copy_only=False)
      else:
        yield value.as_py()
    return
  if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
    # pyarrow would raise where a value is not UTF-8, and not say of which row.
    column = column.cast("large_binary" if types.is_large_string(kind) else "binary")
  for value in column:
    yield value.as_py()
