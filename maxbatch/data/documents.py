"""Reads documents as bytes, and refuses by name what is not readable text."""

import codecs
import gzip
import itertools
import zlib
from collections.abc import Iterable, Iterator

from maxbatch.data.sources import Document, SourceFile
from maxbatch.errors import UserError

_CHUNK_BYTES = 4 * 2**20


class NotTextError(UserError):
  """A file whose bytes are not UTF-8 text."""


def checked_size(key: str, file: SourceFile) -> int:
  """The length of `file` in bytes, uncompressed, after checking that all of it is text.

  Raises:
    NotTextError: with the offset of the first byte that is not UTF-8, or is NUL.
    UserError: the file cannot be read.
  """
  decoder = codecs.getincrementaldecoder("utf-8")()
  size = 0
  # The empty chunk at the end lets the decoder refuse an incomplete last character.
  for chunk in itertools.chain(_chunks(key, file), [b""]):
    carried = len(decoder.getstate()[0])
    nul = chunk.find(0)
    try:
      decoder.decode(chunk if nul < 0 else chunk[:nul], final=not chunk or nul >= 0)
    except UnicodeDecodeError as error:
      bad = error.object[error.start]
      raise _not_text(key, file, size - carried + error.start, bad) from None
    if nul >= 0:
      raise _not_text(key, file, size + nul, 0)
    size += len(chunk)
  return size


def text_chunks(key: str, document: Document, size: int) -> Iterator[bytes]:
  """The document's bytes, piece by piece; `size` is the whole file's, from `checked_size`."""
  start, stop = byte_range(document, size)
  position = 0
  for chunk in _chunks(key, document.file):
    piece = chunk[max(start - position, 0) : max(stop - position, 0)]
    if piece:
      yield piece
    position += len(chunk)
  if position != size:
    raise UserError(
      f"{key}: {document.file.path} changed from {size} to {position} bytes while it was read; "
      "start again when no other program writes to it"
    )


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
  """The same bytes in pieces that end where lines end, or where characters do in a long line."""
  pending = b""
  for chunk in chunks:
    end = _last_line_end(pending)
    if end:
      yield pending[:end]
    pending = pending[end:] + chunk
  if pending:
    yield pending


def _last_line_end(chunk: bytes) -> int:
  """Where the last line that ends here does; without one, where the last character begins."""
  end = chunk.rfind(b"\n") + 1
  if end:
    return end
  end = max(len(chunk) - 1, 0)
  while end > 0 and chunk[end] & 0xC0 == 0x80:
    end -= 1
  return end


def byte_range(document: Document, size: int) -> tuple[int, int]:
  """First byte and end of the document in its file of `size` bytes; never an empty part."""

  def boundary(fraction: float) -> int:
    return min(max(round(fraction * size), 1), size - 1)

  start = boundary(document.begin) if document.begin > 0 else 0
  return start, boundary(document.end) if document.end < 1 else size


def _chunks(key: str, file: SourceFile) -> Iterator[bytes]:
  """The file's bytes, decompressed when its name ends in .gz."""
  try:
    with gzip.open(file.path) if file.name.endswith(".gz") else open(file.path, "rb") as stream:
      while chunk := stream.read(_CHUNK_BYTES):
        yield chunk
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise UserError(
      f"{key}: {file.path} is not a whole gzip file ({error}); compress it again, or take the .gz "
      "off its name if it is plain text"
    ) from error
  except OSError as error:
    raise UserError(f"{key}: cannot read {file.path}: {error.strerror or error}") from error


def _not_text(key: str, file: SourceFile, offset: int, byte: int) -> NotTextError:
  what = "a NUL byte" if byte == 0 else f"byte 0x{byte:02x}, not UTF-8,"
  return NotTextError(
    f"{key}: {file.path} is not text: {what} at offset {offset}; convert the file to UTF-8, or "
    f"leave it out by giving {key} a glob such as 'texts/**/*.txt'"
  )
