"""What a format of records offers: how many there are, and those of a part of a file, one by one."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

from maxbatch.data.sources import SourceFile
from maxbatch.errors import UserError

MAX_RECORD_BYTES = 64 * 2**20
"""Of one record; a longer one is refused, so that memory has a bound. Files of text may be longer."""


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


def _anywhere(key: str, file: SourceFile, place: int) -> int:
  """Every place is one before which nothing has to be read."""
  del key, file
  return place


def _by_number(key: str, file: SourceFile, place: int) -> str:
  """A record named by its number from 0, as libraries count them."""
  del key, file
  return f"record {place}"


@dataclasses.dataclass(frozen=True)
class RecordFormat:
  """A format of files in which a record is a document."""

  suffix: str
  """A regular expression that names of such files match somewhere, in lower case."""
  size: Callable[[str, SourceFile], int]
  """Of (key, file): how long it is, in units that `read` divides it by."""
  read: Read
  can_be_divided: Callable[[SourceFile], bool]
  """Whether a part can be read without all that stands before it."""
  next_cut: Callable[[str, SourceFile, int], int] = _anywhere
  """Of (key, file, place): the first place from there on before which nothing has to be read."""
  named: Callable[[str, SourceFile, int], str] = _by_number
  """Of (key, file, place): how a person finds that record."""


def damaged(key: str, file: SourceFile, kind: str, reason: object) -> UserError:
  """The error that says that a file as a whole cannot be read as what it should be."""
  text = " ".join(str(reason).split())[:300] or type(reason).__name__
  return UserError(
    f"{key}: {file.path} is not a whole {kind} file ({text}); copy or write it again, or give {key} "
    "a glob that leaves it out"
  )


def unreadable(key: str, file: SourceFile, error: OSError) -> UserError:
  """The error that says that a file is there no more, or may not be read."""
  return UserError(f"{key}: cannot read {file.path}: {error.strerror or error}")
