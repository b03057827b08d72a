"""What a format of records offers, and what the column of a record holds: text, token ids, or neither.

The format that needs no library is here: JSON Lines, an object a line, plain or compressed with gzip or zstd.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol

import numpy as np

from maxbatch.config.registry import library
from maxbatch.data.sources import SourceFile
from maxbatch.errors import UserError

MAX_RECORD_BYTES = 64 * 2**20
"""Bytes of one record; longer ones are refused to bound memory. Files of text may be longer."""


@dataclasses.dataclass(frozen=True)
class Bad:
  """What is wrong with a record that holds no document."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Record:
  """One record: its place in the file, and what its column holds."""

  place: int
  value: object
  """Text, bytes or a sequence of ids; None where it is null; or `Bad`."""
  weights: object = None
  """What the column of weights holds, if one is read; or `Bad`."""


class Read(Protocol):
  """Reads the records that begin in [start, stop), in the units of `RecordFormat.size`: what a
  column holds, and what that of weights does if it is named."""

  def __call__(
    self, key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
  ) -> Iterator[Record]: ...


@dataclasses.dataclass(frozen=True)
class RecordFormat:
  """A format of files in which a record is a document."""

  suffix: str
  """A regular expression that names of such files match somewhere, in lower case."""
  size: Callable[[str, SourceFile], int]
  """From (key, file) to its length, in the units by which `read` divides it."""
  read: Read
  can_be_divided: Callable[[SourceFile], bool]
  """Whether a part can be read without all that stands before it."""
  next_cut: Callable[[str, SourceFile, int], int] = lambda key, file, place: place
  """From (key, file, place) to the first place from there on that can be read by itself."""
  named: Callable[[str, SourceFile, int], str] = lambda key, file, place: f"record {place}"
  """From (key, file, place) to how a person finds that record; from 0, as libraries count."""


def damaged(key: str, file: SourceFile, kind: str, reason: object) -> UserError:
  """Returns the error for a file that as a whole cannot be read as what it should be."""
  text = " ".join(str(reason).split())[:300] or type(reason).__name__
  return UserError(
    f"{key}: {file.path} is not a whole {kind} file ({text}); copy or write it again, or give {key} "
    "a glob that leaves it out"
  )


@contextlib.contextmanager
def naming_errors(
  key: str, file: SourceFile, kind: str, *damage: type[Exception]
) -> Iterator[None]:
  """Turns what is wrong with a file, or with its gzip, into a UserError that names it; a context.

  `damage` are the errors that say that it is no whole `kind`.
  """
  try:
    yield
  except damage as error:
    raise damaged(key, file, kind, error) from error
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise damaged(key, file, "gzip", error) from error
  except OSError as error:
    if error.errno is None:  # Of pyarrow, about the contents.
      raise damaged(key, file, kind, error) from error
    raise UserError(f"{key}: cannot read {file.path}: {error.strerror or error}") from error


def text_of(record: Record) -> bytes | Bad:
  """Returns the document's text in UTF-8, or why there is none."""
  value = record.value
  if isinstance(value, Bad):
    return value
  try:
    content = value.encode() if isinstance(value, str) else value
    if isinstance(value, bytes):
      value.decode()
  except UnicodeEncodeError as error:
    return Bad(f"character {error.start} is a lone surrogate, which is no Unicode")
  except UnicodeDecodeError as error:
    return Bad(f"not text: byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8")
  if not isinstance(content, bytes):
    return Bad(_instead_of(value, "text", "tokenize_train_data=false"))
  if len(content) > MAX_RECORD_BYTES:
    return Bad(f"longer than {MAX_RECORD_BYTES:,} bytes; a longer document can be a file of text")
  if b"\0" in content:
    return Bad(f"not text: a NUL byte at {content.index(0)}")
  return content


def ids_of(record: Record, vocab_size: int) -> np.ndarray | Bad:
  """Returns the document's token ids as they are, or why there are none."""
  value = record.value
  if isinstance(value, Bad):
    return value
  try:
    ids = np.asarray(value) if isinstance(value, list | np.ndarray) else None
  except ValueError:  # Lists of different lengths in a list.
    ids = None
  if ids is not None and ids.shape == (0,):
    return ids.astype(np.int64)
  if ids is None or ids.dtype.kind not in "iu" or ids.ndim != 1:
    return Bad(_instead_of(value, "a list of token ids", "tokenize_train_data=true"))
  wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
  if wrong.size:
    return Bad(
      f"token id {ids[wrong[0]]} at {wrong[0]} is not below the tokenizer's {vocab_size} ids"
    )
  return ids


def _instead_of(value: object, wanted: str, key: str) -> str:
  if value is None:
    return f"null instead of {wanted}"
  is_other = isinstance(value, list | np.ndarray | str | bytes)
  if isinstance(value, list) and value and isinstance(value[0], dict):
    return f"a list of messages instead of {wanted} (use_chat_template=true reads it)"
  name = "a list" if isinstance(value, list | np.ndarray) else type(value).__name__
  return f"{name} instead of {wanted}" + (f" ({key} reads it)" if is_other else "")


_CHUNK_BYTES = 2**20
_SHOWN_KEYS = 5


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
    names = ", ".join(list(record)[:_SHOWN_KEYS]) or "nothing"
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
