"""TFRecord: records one after the other, each with its length and checksums; plain or with gzip.

https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

import contextlib
import functools
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from maxbatch.data.formats.format import (
  MAX_RECORD_BYTES,
  Bad,
  Record,
  RecordFormat,
  damaged,
  unreadable,
)
from maxbatch.data.formats.tf_example import feature
from maxbatch.data.optional import library
from maxbatch.data.sources import SourceFile

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def _size(key: str, file: SourceFile) -> int:
  """In records, by going from length to length."""
  with _opened(key, file) as stream:
    return sum(1 for _ in _lengths(key, file, stream))


def _read(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened(key, file) as stream:
    for place, length in enumerate(_lengths(key, file, stream)):
      if place >= stop:
        return
      if place < start:
        continue
      if length > MAX_RECORD_BYTES:
        yield Record(place, Bad(f"longer than {MAX_RECORD_BYTES:,} bytes"))
        continue
      content, checksum = stream.read(length), stream.read(_CHECKSUM.size)
      if len(content) + len(checksum) < length + _CHECKSUM.size:
        raise damaged(key, file, "TFRecord", f"record {place} is cut off")
      if _CHECKSUM.unpack(checksum) != (_masked(content),):
        raise damaged(key, file, "TFRecord", f"record {place} does not match its checksum")
      found = feature(content, weights) if weights else None
      yield Record(place, feature(content, column), found)


def _lengths(key: str, file: SourceFile, stream: IO[bytes]) -> Iterator[int]:
  """The length of each record, at whose first byte the stream then is."""
  position, place = 0, 0
  while header := stream.read(_LENGTH.size):
    length, checksum = _LENGTH.unpack(header) if len(header) == _LENGTH.size else (0, -1)
    if checksum != _masked(header[:8]):
      raise damaged(
        key, file, "TFRecord", f"where record {place} should begin, at byte {position}, is none"
      )
    yield length
    position += _LENGTH.size + length + _CHECKSUM.size
    _go_to(key, file, stream, position, place)
    place += 1


def _go_to(key: str, file: SourceFile, stream: IO[bytes], end: int, place: int) -> None:
  """Moves to the end of a record, which must be there."""
  stream.seek(end - 1)
  if not stream.read(1):
    raise damaged(key, file, "TFRecord", f"record {place} is cut off")


def _masked(content: bytes) -> int:
  """The masked CRC-32C that follows a length, and a record."""
  crc = _crc32c()(content)
  return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
  return library("google_crc32c", "TFRecord").value


@contextlib.contextmanager
def _opened(key: str, file: SourceFile) -> Iterator[Any]:
  try:
    with (
      gzip.open(file.local_path) if ".gz" in file.name else open(file.local_path, "rb") as stream
    ):
      yield stream
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise damaged(key, file, "gzip", error) from error
  except OSError as error:
    raise unreadable(key, file, error) from error


TFRECORD = RecordFormat(
  suffix=r"\.tfrecords?\b",
  size=_size,
  read=_read,
  # To find a record, all lengths before it are read.
  can_be_divided=lambda file: False,
)
