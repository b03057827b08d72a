"""ArrayRecord, by array_record; its records are tf.train.Example."""

import contextlib
from collections.abc import Iterator
from typing import Any

from maxbatch.data.formats.format import (
  MAX_RECORD_BYTES,
  Bad,
  Record,
  RecordFormat,
  damaged,
)
from maxbatch.data.formats.tf_example import feature
from maxbatch.data.optional import library
from maxbatch.data.sources import SourceFile

# All that is read at once is in memory, and records may be large.
_BYTES_AT_ONCE = 4 * 2**20
_MOST_AT_ONCE = 1024


def _size(key: str, file: SourceFile) -> int:
  """In records."""
  with _opened(key, file) as reader:
    return reader.num_records()


def _read(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened(key, file) as reader:
    count = reader.num_records()
    stop = min(stop, count)
    mean_bytes = max(file.size_bytes // max(count, 1), 1)
    at_once = min(max(_BYTES_AT_ONCE // mean_bytes, 1), _MOST_AT_ONCE)
    for first in range(start, stop, at_once):
      records = reader.read(first, min(first + at_once, stop))
      for place, content in enumerate(records, start=first):
        if len(content) > MAX_RECORD_BYTES:
          yield Record(place, Bad(f"longer than {MAX_RECORD_BYTES:,} bytes"))
        else:
          found = feature(content, weights) if weights else None
          yield Record(place, feature(content, column), found)


@contextlib.contextmanager
def _opened(key: str, file: SourceFile) -> Iterator[Any]:
  module = library("array_record.python.array_record_module", file.path)
  reader = module.ArrayRecordReader(file.local_path)
  try:
    if not reader.ok():
      reader.close()  # Which says what is wrong.
      raise damaged(key, file, "ArrayRecord", "its index cannot be read")
    yield reader
    reader.close()
  except RuntimeError as error:
    raise damaged(key, file, "ArrayRecord", error) from error


ARRAY_RECORD = RecordFormat(
  suffix=r"\.array_?record\b",
  size=_size,
  read=_read,
  can_be_divided=lambda file: True,
)
