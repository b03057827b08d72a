"""Arrow files, streams of batches or not: what Hugging Face's datasets are on disk; by pyarrow."""

import contextlib
from collections.abc import Iterator
from typing import Any

from maxbatch.data.formats.arrow_columns import (
  check_column,
  check_weights,
  values,
  weights_of,
)
from maxbatch.data.formats.format import (
  Record,
  RecordFormat,
  damaged,
  unreadable,
)
from maxbatch.data.optional import library
from maxbatch.data.sources import SourceFile

_MAGIC = b"ARROW1"


def _size(key: str, file: SourceFile) -> int:
  """In rows, by the headers of all batches: their contents are mapped and not read."""
  with _opened(key, file, is_mapped=True) as (_, batches):
    return sum(batch.num_rows for batch in batches)


def _read(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened(key, file) as (schema, batches):
    check_column(key, file, schema, column)
    check_weights(key, file, schema, weights)
    first = 0
    for batch in batches:
      if first >= stop:
        return
      inside = range(max(start - first, 0), min(stop - first, batch.num_rows))
      if inside:
        part = batch.slice(inside.start, len(inside))
        found = zip(values(part.column(column)), weights_of(part, weights), strict=True)
        for place, (value, weight) in enumerate(found, start=first + inside.start):
          yield Record(place, value, weight)
      first += batch.num_rows


@contextlib.contextmanager
def _opened(
  key: str, file: SourceFile, *, is_mapped: bool = False
) -> Iterator[tuple[Any, Iterator[Any]]]:
  """The schema and the batches; if they are mapped, all that was read stays in memory."""
  pyarrow, ipc = library("pyarrow", file.path), library("pyarrow.ipc", file.path)
  try:
    with (
      pyarrow.memory_map(file.local_path)
      if is_mapped
      else pyarrow.OSFile(file.local_path) as stream
    ):
      is_file = stream.read(len(_MAGIC)) == _MAGIC
      stream.seek(0)
      if is_file:
        opened = ipc.open_file(stream)
        batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
        yield opened.schema, batches
      else:
        _check_end(key, file)
        opened = ipc.open_stream(stream)
        yield opened.schema, iter(opened)
  except pyarrow.ArrowException as error:
    raise damaged(key, file, "Arrow", error) from error
  except OSError as error:
    if error.errno is None:  # Of pyarrow, about the contents.
      raise damaged(key, file, "Arrow", error) from error
    raise unreadable(key, file, error) from error


def _check_end(key: str, file: SourceFile) -> None:
  """Refuses a stream that was truncated between two batches, which pyarrow takes for its end."""
  with open(file.local_path, "rb") as stream:
    stream.seek(max(0, file.size_bytes - 8))
    if stream.read() != b"\xff\xff\xff\xff\0\0\0\0":
      raise damaged(key, file, "Arrow", "it ends without the mark of a stream's end")


ARROW = RecordFormat(
  suffix=r"\.(arrow|feather|ipc)$",
  size=_size,
  read=_read,
  # A stream of batches is read from its beginning; datasets divide them into files of 500 MB.
  can_be_divided=lambda file: False,
)
