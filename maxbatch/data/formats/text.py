"""Text files, each one document: reads them as bytes, and refuses by name what is no text."""

import codecs
import gzip
import itertools
import zlib
from collections.abc import Iterable, Iterator

from maxbatch.data.sources import Document, SourceFile, part_of
from maxbatch.errors import UserError

# Of these a piece is made that is tokenized at once, which takes a hundred times their memory.
_CHUNK_BYTES = 2**20


class NotTextError(UserError):
  """A file whose bytes are not UTF-8 text."""


def can_be_divided(file: SourceFile) -> bool:
  """Returns whether a part can be read without all that stands before it."""
  return not file.name.endswith(".gz")


def checked_range(key: str, document: Document) -> tuple[int, int]:
  """Returns the first byte and the end of the document's piece in its uncompressed file, all of
  which is text. Raises NotTextError: with the offset of the first byte that is not UTF-8, or is
  NUL; UserError: the file cannot be read."""
  file = document.file
  if document.num_pieces == 1:
    return part_of(document, _checked(key, file, 0, None))
  start, stop = part_of(document, file.size_bytes)
  pieces = (document.piece, document.piece + 1)
  ends = [start + (stop - start) * piece // document.num_pieces for piece in pieces]
  first, last = (end if end in (start, stop) else _next_line(key, file, end, stop) for end in ends)
  _checked(key, file, first, last)
  return first, last


def _checked(key: str, file: SourceFile, start: int, stop: int | None) -> int:
  decoder = codecs.getincrementaldecoder("utf-8")()
  position = start
  # The empty chunk at the end lets the decoder refuse an incomplete last character.
  for chunk in itertools.chain(_chunks(key, file, start, stop), [b""]):
    carried = len(decoder.getstate()[0])
    nul = chunk.find(0)
    try:
      decoder.decode(chunk if nul < 0 else chunk[:nul], final=not chunk or nul >= 0)
    except UnicodeDecodeError as error:
      bad = error.object[error.start]
      raise _not_text(key, file, position - carried + error.start, bad) from None
    if nul >= 0:
      raise _not_text(key, file, position + nul, 0)
    position += len(chunk)
  return position


def text_chunks(key: str, document: Document, start: int, stop: int) -> Iterator[bytes]:
  """Yields the bytes [start, stop) of the document's file, chunk by chunk. Raises UserError: it has
  fewer of them than when they were checked, or more where it is read whole."""
  position = start
  # One byte more tells whether a file has grown whose end was the end of what is read.
  is_whole = document.num_pieces == 1 and document.end == 1
  for chunk in _chunks(key, document.file, start, None if is_whole else stop):
    if piece := chunk[: max(stop - position, 0)]:
      yield piece
    position += len(chunk)
  if position != stop:
    raise UserError(
      f"{key}: {document.file.path} changed from {stop} to {position} bytes while it was read; "
      "start again when no other program writes to it"
    )


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
  """Yields the same bytes in pieces that end with a line, or with a character in a long one."""
  pending = b""
  for chunk in chunks:
    end = _last_line_end(pending)
    if end:
      yield pending[:end]
    pending = pending[end:] + chunk
  if pending:
    yield pending


def _last_line_end(chunk: bytes) -> int:
  """Returns where the chunk's last line ends; without one, where its last character begins."""
  end = chunk.rfind(b"\n") + 1
  if end:
    return end
  end = max(len(chunk) - 1, 0)
  while end > 0 and chunk[end] & 0xC0 == 0x80:
    end -= 1
  return end


def _next_line(key: str, file: SourceFile, offset: int, stop: int) -> int:
  """Returns where the line after `offset` begins; if it is far away, the next character."""
  chunk = next(_chunks(key, file, offset, stop), b"")
  line_end = chunk.find(b"\n") + 1
  if line_end:
    return offset + line_end
  begins = (place for place, byte in enumerate(chunk[:4]) if byte & 0xC0 != 0x80)
  return offset + next(begins, 0)


def _chunks(key: str, file: SourceFile, start: int, stop: int | None) -> Iterator[bytes]:
  """Yields the file's bytes [start, stop), decompressed if its name ends in .gz; None: all."""
  try:
    with (
      gzip.open(file.local_path)
      if file.name.endswith(".gz")
      else open(file.local_path, "rb") as stream
    ):
      stream.seek(start)
      left = stop - start if stop is not None else _CHUNK_BYTES
      while chunk := stream.read(min(left, _CHUNK_BYTES)):
        yield chunk
        left -= len(chunk) if stop is not None else 0
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
