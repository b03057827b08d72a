"""JSON Lines: an object a line, plain or compressed with gzip or zstd."""

import contextlib
import gzip
import io
import json
from collections.abc import Iterator
from typing import IO, Any

from maxbatch.config.registry import library
from maxbatch.data.formats.format import MAX_RECORD_BYTES, Bad, Record, RecordFormat, naming_errors
from maxbatch.data.sources import SourceFile

_CHUNK_BYTES = 2**20
_SHOWN = 5


def _is_plain(file: SourceFile) -> bool:
  return not file.name.endswith((".gz", ".zst", ".zstd"))


def _size(key: str, file: SourceFile) -> int:
  """Returns the file's size in bytes, uncompressed."""
  if _is_plain(file):
    return file.size_bytes
  size = 0
  with _opened(key, file) as stream:
    while chunk := stream.read(_CHUNK_BYTES):
      size += len(chunk)
  return size


def _read(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  if _is_plain(file):
    stop = min(stop, file.size_bytes)  # What is written meanwhile is not read without end.
  with _opened(key, file) as stream:
    position = 0
    if start > 0:
      # The line that byte start - 1 belongs to begins before `start`.
      _skip(stream, start - 1, is_seekable=_is_plain(file))
      position = start - 1 + _rest_of_line(stream)
    while position < stop:
      line = stream.readline(MAX_RECORD_BYTES + 1)
      if not line:
        return
      place = position
      position += len(line)
      if len(line) > MAX_RECORD_BYTES:
        position += _rest_of_line(stream)
        yield Record(place, Bad(f"longer than {MAX_RECORD_BYTES:,} bytes"))
      elif not line.isspace():
        record = _object(line, column)
        result = _value(record, weights) if weights else None
        yield Record(place, _value(record, column), result)


def _skip(stream: IO[bytes], num_bytes: int, *, is_seekable: bool) -> None:
  if is_seekable:
    stream.seek(num_bytes)
  while not is_seekable and num_bytes:
    num_bytes -= len(stream.read(min(num_bytes, _CHUNK_BYTES)) or b" " * num_bytes)


def _rest_of_line(stream: IO[bytes]) -> int:
  """Skips to the end of the line; returns the number of bytes skipped."""
  skipped = 0
  while line := stream.readline(_CHUNK_BYTES):
    skipped += len(line)
    if line.endswith(b"\n"):
      break
  return skipped


def _object(line: bytes, column: str) -> dict[str, Any] | Bad:
  try:
    record = json.loads(line)
  except UnicodeDecodeError as error:
    return Bad(f"byte 0x{error.object[error.start]:02x} is not UTF-8")
  except ValueError as error:
    return Bad(f"not JSON: {error}")
  except RecursionError:
    return Bad("nested too deeply")
  if not isinstance(record, dict):
    return Bad(f"{type(record).__name__} instead of an object with the column {column}")
  return record


def _value(record: dict[str, Any] | Bad, column: str) -> Any:
  if isinstance(record, Bad):
    return record
  if column not in record:
    names = ", ".join(list(record)[:_SHOWN]) or "nothing"
    return Bad(f"no column {column}; it has {names}")
  return record[column]


def _named(key: str, file: SourceFile, place: int) -> str:
  """Names a record by its line from 1, as editors count, found by reading up to it."""
  line, position = 1, 0
  with _opened(key, file) as stream:
    while position < place and (chunk := stream.read(min(_CHUNK_BYTES, place - position))):
      line += chunk.count(b"\n")
      position += len(chunk)
  return f"line {line}"


@contextlib.contextmanager
def _opened(key: str, file: SourceFile) -> Iterator[IO[bytes]]:
  """Opens the uncompressed bytes. What is wrong with the file while it is read is a UserError."""
  with naming_errors(key, file, "zstd"), _stream(file) as stream:
    yield stream


def _stream(file: SourceFile) -> Any:
  if _is_plain(file):
    return open(file.local_path, "rb")
  if file.name.endswith(".gz"):
    return gzip.open(file.local_path)
  # pyarrow's reader says where a file is truncated; those of zstandard take that for its end.
  stream = library("pyarrow", file.path).input_stream(file.local_path, compression="zstd")
  return io.BufferedReader(stream, _CHUNK_BYTES)


JSONL = RecordFormat(
  suffix=r"\.(jsonl|ndjson|json)(\.gz|\.zstd?)?$",
  size=_size,
  read=_read,
  can_be_divided=_is_plain,
  named=_named,
)
