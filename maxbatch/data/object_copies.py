"""Copies of a store's objects on this machine, for as long as they are tokenized.

Every format reads files, some of them back and forth and more than once, so an object is copied as a
whole and then read like any file. A copy appears whole, checked, and is removed once every shard that
needs it is made: what is on disk at one time is what the processes work on. Copies of an interrupted
run are there for the next one.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxbatch.data.object_store import OpenStore, Range, is_url
from maxbatch.data.sources import Document, SourceFile
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import claimed, replacing

_RANGE_BYTES = 8 * 2**20
_BYTES_AT_ONCE = 64 * 2**20
"""In memory; asked for in ranges at the same time."""
_OBJECTS_AT_ONCE = 64
_TIMES_COPIED = 3
"""Before an object is said to be damaged."""


class _DamagedError(Exception):
  """What has arrived is not what the store has."""


def is_object(file: SourceFile) -> bool:
  return is_url(file.path)


def with_copies(documents: Sequence[Document], folder: Path) -> tuple[Document, ...]:
  """Returns the documents, those of objects with a place in `folder` for their copies."""
  return tuple(
    dataclasses.replace(each, file=_with_copy(each.file, folder)) if is_object(each.file) else each
    for each in documents
  )


def _with_copy(file: SourceFile, folder: Path) -> SourceFile:
  content = f"{file.path}\0{file.version}\0{file.size_bytes}"
  name = hashlib.blake2b(content.encode(errors="surrogateescape"), digest_size=12).hexdigest()
  return dataclasses.replace(file, copy=str(folder / name))


def copy_objects(key: str, documents: Sequence[Document]) -> None:
  """Copies the objects that the documents lie in, each once for all who need it. Raises UserError:
  the store does not answer, an object has changed or is damaged, or a copy cannot be written."""
  files = {each.file.copy: each.file for each in documents if is_object(each.file)}
  for group in _groups([file for file in files.values() if not _is_there(file)]):
    copy = Path(group[0].copy)
    try:
      # A large object is alone in its group, and other processes may want other parts of it.
      with claimed(copy.with_name(f".{copy.name}.claim"), wait=True):
        _copy_group(key, [file for file in group if not _is_there(file)])
    except OSError as error:
      needed = sum(file.size_bytes for file in group)
      raise UserError(
        f"{key}: cannot write the copy {copy} of {group[0].path}: {error.strerror or error}; it needs "
        f"{needed} bytes until it is tokenized; free some space there, or set "
        "dataset_cache_directory to a folder you can write to"
      ) from error


def _is_there(file: SourceFile) -> bool:
  copy = Path(file.copy)
  return copy.is_file() and copy.stat().st_size == file.size_bytes


def _groups(files: Sequence[SourceFile]) -> Iterator[list[SourceFile]]:
  """Yields large objects one by one, small ones together: each request costs a round trip."""
  group: list[SourceFile] = []
  for file in files:
    if file.size_bytes > _RANGE_BYTES:
      yield [file]
      continue
    if len(group) == _OBJECTS_AT_ONCE or sum(each.size_bytes for each in group) > _BYTES_AT_ONCE:
      yield group
      group = []
    group.append(file)
  if group:
    yield group


def _copy_group(key: str, files: Sequence[SourceFile]) -> None:
  """Copies some objects; again if one of them does not arrive as it is in the store."""
  if not files:
    return
  store = OpenStore.of(key, files[0].path)
  for number in range(1, _TIMES_COPIED + 1):
    try:
      _copy_once(store, files)
      return
    except _DamagedError as error:
      if number == _TIMES_COPIED:
        raise UserError(
          f"{key}: {error}, {number} times; write the object again, or leave it out"
        ) from error


def _copy_once(store: OpenStore, files: Sequence[SourceFile]) -> None:
  with contextlib.ExitStack() as stack:
    opened = {file.path: stack.enter_context(replacing(Path(file.copy))) for file in files}
    digests = {file.path: hashlib.md5(usedforsecurity=False) for file in files}
    for batch in _batches(files):
      for part, content in zip(batch, store.read(batch), strict=True):
        opened[part.url].write(content)
        digests[part.url].update(content)
    for file in files:
      _check(store, file, digests[file.path].hexdigest())


def _batches(files: Sequence[SourceFile]) -> Iterator[list[Range]]:
  """Yields all bytes of the files in ranges, in order, as many at a time as fit in memory."""
  batch: list[Range] = []
  for file in files:
    for start in range(0, file.size_bytes, _RANGE_BYTES):
      if sum(each.stop - each.start for each in batch) + _RANGE_BYTES > _BYTES_AT_ONCE:
        yield batch
        batch = []
      batch.append(Range(file.path, start, min(start + _RANGE_BYTES, file.size_bytes)))
  if batch:
    yield batch


def _check(store: OpenStore, file: SourceFile, md5: str) -> None:
  """Compares what has arrived with what was listed. Raises UserError: it changed; _DamagedError."""
  if md5 == file.md5:
    return
  now = store.current(file.path)
  if (now.version, now.size_bytes) != (file.version, file.size_bytes):
    raise UserError(
      f"{store.key}: {file.path} is not what it was when its bucket was listed (ETag {now.version} "
      f"instead of {file.version}, {now.size_bytes} bytes instead of {file.size_bytes}); start again "
      "when no other program writes to it"
    )
  if file.md5 and store.has_md5(file.path):
    raise _DamagedError(f"{file.path} arrives with the MD5 {md5}, and its store says {file.md5}")
