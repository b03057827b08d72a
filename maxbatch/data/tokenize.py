"""From documents to token ids: what is read, what is refused, and what may be skipped."""

import array
import collections
import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np

from maxbatch.data.chat import Chat, Conversation
from maxbatch.data.formats import text
from maxbatch.data.formats.format import Bad, Record, ids_of, text_of
from maxbatch.data.record_files import FORMATS
from maxbatch.data.sources import Document, SourceFile, Sources, part_of
from maxbatch.data.tokenizer import Tokenizer, token_dtype
from maxbatch.errors import UserError

_STARTS_AT_ONCE = 65_536
_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How documents become tokens."""

  sources: Sources
  """Where they come from; without its files."""
  tokenizer: Tokenizer
  add_bos: bool = True
  add_eos: bool = True
  max_bad_records: int = 0
  """So many are skipped; one more is refused."""
  chat: Chat | None = None
  """What makes tokens of records that are conversations."""

  @property
  def has_weights(self) -> bool:
    """Whether it is noted of each token if it counts as a target; else all do."""
    of_answers = self.chat is not None and self.chat.completion_only
    return of_answers or bool(self.sources.weights_column)


@dataclasses.dataclass
class Written:
  """What has been written of some documents."""

  num_tokens: int = 0
  num_documents: int = 0
  num_bad: int = 0
  first_bad: str = ""
  skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  """Documents that are passed over, by reason."""
  fingerprint: str = ""
  weights_fingerprint: str = ""
  """Likewise of which tokens count; empty where all do."""


def new_hash():
  return hashlib.blake2b(digest_size=16)


def tokenize(
  recipe: Recipe,
  documents: Sequence[Document],
  tokens_file: BinaryIO,
  starts_file: BinaryIO,
  report: Callable[[int], None],
  weights_file: BinaryIO | None = None,
) -> Written:
  """Writes the tokens of all documents one after the other, and where each of them begins.

  Args:
    weights_file: if the recipe has weights, gets a byte for each token: 1 if it is a target.
    report: is given the bytes of each file, or piece of one, when it has been read.

  Raises UserError: a document cannot be read, or more records are bad than may be; names it;
  OSError: a file cannot be written.
  """
  out = _Output(recipe, tokens_file, starts_file, weights_file)
  for document in documents:
    if recipe.sources.format == "text":
      _add_text(out, document)
    else:
      _add_records(out, document)
    report(source_bytes(document))
  return out.finished()


def source_bytes(document: Document) -> int:
  """Estimates how many bytes of its file a document takes."""
  return round(document.file.size_bytes * (document.end - document.begin) / document.num_pieces)


class _Output:
  def __init__(
    self,
    recipe: Recipe,
    tokens_file: BinaryIO,
    starts_file: BinaryIO,
    weights_file: BinaryIO | None,
  ):
    self.recipe = recipe
    self.written = Written()
    self._dtype = token_dtype(recipe.tokenizer)
    self._tokens_file, self._starts_file = tokens_file, starts_file
    self._digest = new_hash()
    self._weights_file, self._weights_digest = weights_file, new_hash()
    self._starts = array.array("q")

  def begin(self) -> None:
    self._starts.append(self.written.num_tokens)
    if len(self._starts) == _STARTS_AT_ONCE:
      self._flush()
    self.written.num_documents += 1

  def add(self, ids: np.ndarray | Sequence[int]) -> None:
    tokens = np.ascontiguousarray(ids, self._dtype)
    self._tokens_file.write(tokens.data)
    self._digest.update(tokens.data)
    self.written.num_tokens += tokens.size

  def weigh(self, counted: np.ndarray) -> None:
    """Notes which of the tokens that have been added count, uint8."""
    if self._weights_file is not None:
      self._weights_file.write(counted.data)
      self._weights_digest.update(counted.data)

  def refuse(self, error: UserError) -> None:
    """Counts a bad record. Raises the error if it is one too many."""
    written, limit = self.written, self.recipe.max_bad_records
    written.num_bad += 1
    written.skipped["bad"] += 1
    written.first_bad = written.first_bad or str(error)
    if limit == 0:
      raise error
    if written.num_bad > limit:
      raise too_many(written.num_bad, limit, written.first_bad)

  def finished(self) -> Written:
    self._flush()
    self.written.fingerprint = self._digest.hexdigest()
    if self._weights_file is not None:
      self.written.weights_fingerprint = self._weights_digest.hexdigest()
    return self.written

  def _flush(self) -> None:
    self._starts_file.write(np.array(self._starts, "<i8").data)
    del self._starts[:]


def too_many(count: int, limit: int, first: str) -> UserError:
  """Returns the error for more bad records than may be skipped."""
  return UserError(
    f"{count} bad records, and max_bad_records={limit}; correct them, or raise it to skip more. "
    f"The first: {first}"
  )


def _add_text(out: _Output, document: Document) -> None:
  recipe = out.recipe
  key = recipe.sources.key
  try:
    start, stop = text.checked_range(key, document)
  except text.NotTextError as error:
    # The user did not choose the standard library's files one by one, so such a file is skipped.
    if recipe.sources.kind == "stdlib":
      out.written.skipped["not UTF-8"] += 1
    else:
      out.refuse(error)
    return
  if stop == 0:
    out.written.skipped["empty"] += 1
    return
  if document.piece == 0:
    out.begin()
    out.add([recipe.tokenizer.bos_id] if recipe.add_bos else [])
  for lines in text.whole_lines(text.text_chunks(key, document, start, stop)):
    out.add(recipe.tokenizer.encode(lines))
  if document.piece == document.num_pieces - 1:
    out.add([recipe.tokenizer.eos_id] if recipe.add_eos else [])
  if document.num_pieces > 1:
    check_unchanged(key, document.file)


def _add_records(out: _Output, document: Document) -> None:
  sources, file = out.recipe.sources, document.file
  form = FORMATS[sources.format]
  places = _range(sources, document)
  for record in form.read(sources.key, file, sources.column, *places, sources.weights_column):
    content = _content(record, out.recipe)
    weights = _weights(record, content) if sources.weights_column else None
    if isinstance(weights, Bad) and not isinstance(content, Bad):
      content = weights
    if isinstance(content, Bad):
      where = form.named(sources.key, file, record.place)
      out.refuse(
        UserError(
          f"{sources.key}: {file.path}, {where}: {content.reason}; correct it, or set "
          "max_bad_records to the number of such records that may be skipped"
        )
      )
    elif isinstance(content, Conversation):
      out.begin()
      out.add(content.ids)
      out.weigh(content.counted)
    elif not len(content):
      out.written.skipped["empty"] += 1
    else:
      before = out.written.num_tokens
      _add_document(out, content)
      if isinstance(weights, np.ndarray):
        num_tokens = out.written.num_tokens - before
        out.weigh(np.ascontiguousarray(np.broadcast_to(weights, num_tokens), np.uint8))
  check_unchanged(sources.key, file)


def check_unchanged(key: str, file: SourceFile) -> None:
  """Refuses a file that another program has written to since it was listed.

  A copy was checked when it was made. Raises UserError: it was written to, or is gone.
  """
  if file.copy:
    return
  try:
    status = os.stat(file.path)
  except OSError as error:
    raise UserError(f"{key}: cannot read {file.path}: {error.strerror or error}") from error
  if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.modified_ns):
    raise UserError(
      f"{key}: {file.path} changed from {file.size_bytes} to {status.st_size} bytes while it was "
      "read; start again when no other program writes to it"
    )


def _content(record: Record, recipe: Recipe) -> bytes | np.ndarray | Conversation | Bad:
  if recipe.chat is not None and not isinstance(record.value, Bad):
    return recipe.chat(record.value)
  if recipe.sources.is_tokenized:
    return ids_of(record, recipe.tokenizer.vocab_size)
  return text_of(record)


def _weights(record: Record, content: object) -> np.ndarray | Bad:
  """Returns which tokens of the document count: 0 or 1 for each id, or one for all."""
  value = record.weights
  if isinstance(value, Bad):
    return value
  try:
    weights = np.asarray(value)
  except ValueError:  # Lists of different lengths in a list.
    weights = np.asarray(None)
  is_number = weights.dtype.kind in "iufb" and weights.ndim < 2
  if not is_number or not np.isin(weights, (0, 1)).all():
    return Bad(f"its weights are {str(value)[:50]}, which must be 0 or 1, or a list of these")
  weights = weights.astype(np.uint8).reshape(-1)
  num_ids = len(content) if isinstance(content, np.ndarray) else None
  if len(weights) not in (1, num_ids):
    wanted = "a text, which has one weight" if num_ids is None else f"its {num_ids} ids"
    return Bad(f"{len(weights)} weights for {wanted}")
  return weights


def _add_document(out: _Output, content: bytes | np.ndarray) -> None:
  out.begin()
  if isinstance(content, np.ndarray):  # Whoever made the ids has begun and ended the documents.
    out.add(content)
    return
  recipe = out.recipe
  out.add([recipe.tokenizer.bos_id] if recipe.add_bos else [])
  slices = (content[i : i + _CHUNK_BYTES] for i in range(0, len(content), _CHUNK_BYTES))
  for lines in text.whole_lines(slices):
    out.add(recipe.tokenizer.encode(lines))
  out.add([recipe.tokenizer.eos_id] if recipe.add_eos else [])


def _range(sources: Sources, document: Document) -> tuple[int, int]:
  """Returns first and end of the records to read, in the units of the format."""
  if (document.begin, document.end, document.num_pieces) == (0, 1, 1):
    return 0, sys.maxsize  # Without asking how many there are, which may take long.
  form, key, file = FORMATS[sources.format], sources.key, document.file
  start, stop = part_of(document, form.size(key, file))
  pieces = (document.piece, document.piece + 1)
  ends = [start + (stop - start) * piece // document.num_pieces for piece in pieces]
  first, last = (
    end if end in (start, stop) else min(form.next_cut(key, file, end), stop) for end in ends
  )
  return first, last
