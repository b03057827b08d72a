"""Which files a `dataset_path` means."""

import codecs
import collections
import dataclasses
import glob
import gzip
import hashlib
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from maxbatch.data.object_store import OpenStore, is_url, names_within
from maxbatch.errors import UserError

STDLIB = "stdlib"
# About 8 MB of the standard library: a first run starts within seconds.
STDLIB_BYTES = 8_000_000
STDLIB_SKIPPED_FOLDERS = frozenset(
  {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "_bundled"}
)
_PROSE = {"txt", "text", "md", "markdown", "rst", "tex", "org", "adoc", "srt", "vtt", "log"}
_RECORDS = {"csv", "tsv", "json", "jsonl", "ndjson", "xml", "html", "htm", "yaml", "yml", "toml"}
_SETTINGS = {"ini", "cfg", "conf", "css", "sql", "sh", "bash", "lua", "r", "jl", "ipynb", "tsx"}
_CODE = {"py", "pyi", "c", "h", "cc", "cpp", "cxx", "hpp", "cu", "java", "kt", "scala", "go", "rs"}
_MORE_CODE = {"js", "mjs", "ts", "jsx", "rb", "php", "pl", "pm", "swift", "hs", "ml", "ex", "lisp"}
TEXT_SUFFIXES = frozenset(_PROSE | _RECORDS | _SETTINGS | _CODE | _MORE_CODE)

_BEGIN_BYTES = 65_536
"""First bytes of a file, which tell whether it may be text."""
_EXAMPLE = f"'texts/**/*.txt', or {STDLIB} for the text of the Python standard library"

Kind = Literal["file", "folder", "glob", "stdlib"]


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """One input file; `name` is its path relative to the dataset, equal on every machine."""

  name: str
  path: str
  """Absolute, or the URL of an object."""
  size_bytes: int
  modified_ns: int
  version: str = ""
  """Version of an object, in place of the time: what its store changes with its contents."""
  md5: str = ""
  """MD5 of an object, if its store says so."""
  copy: str = ""
  """Local copy of an object's contents while they are tokenized."""

  @property
  def local_path(self) -> str:
    return self.copy or self.path


@dataclasses.dataclass(frozen=True)
class Sources:
  """The files a path means, sorted by name, and how many others are skipped, by reason."""

  key: str
  path: str
  kind: Kind
  files: tuple[SourceFile, ...]
  skipped: tuple[tuple[str, int], ...] = ()
  format: str = "text"
  """text: a file is a document; else the name of a format of records, each of them a document."""
  column: str = ""
  """The column of a record that holds the document."""
  is_tokenized: bool = False
  """The records hold token ids instead of text."""
  weights_column: str = ""
  """The column of a record that says which of its tokens count; empty: all do."""

  @property
  def size_bytes(self) -> int:
    return sum(file.size_bytes for file in self.files)


@dataclasses.dataclass(frozen=True)
class Document:
  """The part of a file from the fraction `begin` to the fraction `end`, of its bytes or records.

  A long part is read in `num_pieces` pieces, and is one document all the same where a file is.
  """

  file: SourceFile
  begin: float = 0.0
  end: float = 1.0
  piece: int = 0
  num_pieces: int = 1


def part_of(document: Document, size: int) -> tuple[int, int]:
  """Returns first and end of the document in its file of `size` bytes or records; never empty."""

  if size == 0:
    return 0, 0

  def boundary(fraction: float) -> int:
    return min(max(round(fraction * size), 1), size - 1)

  start = boundary(document.begin) if document.begin > 0 else 0
  return start, boundary(document.end) if document.end < 1 else size


@dataclasses.dataclass(frozen=True)
class Wanted:
  """What is read of a folder, and what errors say about it."""

  what: str
  """Such files, as in: the folder holds no …"""
  reason_to_skip: Callable[[str], str]
  """Why a file of that name, met in a folder, is not read; empty when it is."""
  example: str
  """What to give instead of a path that is not there, after: …, or"""
  offer: Callable[[str, str, Sequence[Path]], str]
  """From (key, path, skipped files) to what to write instead of a folder with nothing to read."""


def resolve(key: str, path: str) -> Sources:
  """Finds the text files that `path`, the value of the configuration key `key`, stands for. Raises
  UserError: nothing is there, nothing in it is text, or it cannot be read."""
  if path == STDLIB:
    return _stdlib(key)
  return listed(key, path, Wanted("text files", _no_text, _EXAMPLE, _offer))


def listed(key: str, path: str, wanted: Wanted) -> Sources:
  """Finds the files that `path` stands for: a file, those of a folder that are wanted, or of a
  glob. Raises UserError: nothing is there, nothing in it is wanted, or it cannot be read."""
  expanded = os.path.expanduser(path)
  if not path:
    raise UserError(f"{key} is empty: give a file, a folder, a glob such as {wanted.example}")
  if is_url(path):
    return _objects(key, path, wanted)
  if os.path.isdir(expanded):
    return _folder(key, path, Path(expanded), wanted)
  if os.path.lexists(expanded):
    return Sources(key, path, "file", (_source_file(key, Path(expanded), Path(expanded).parent),))
  if glob.has_magic(expanded):
    return _glob(key, path, expanded)
  raise UserError(
    f"{key}={path}: no such file or folder; use a path that exists or {wanted.example}"
  )


def rank(name: str, purpose: str) -> float:
  """Returns a number in [0, 1) drawn from the name; each purpose has its own draw."""
  digest = hashlib.blake2b(f"{purpose}\0{name}".encode(errors="surrogateescape"), digest_size=6)
  return int.from_bytes(digest.digest(), "big") / 2**48


def _source_file(key: str, path: Path, root: Path) -> SourceFile:
  name = path.relative_to(root).as_posix()
  try:
    status = path.stat()
  except OSError as error:
    raise UserError(f"{key}: cannot read {path}: {error.strerror}") from error
  if not stat.S_ISREG(status.st_mode):
    raise UserError(f"{key}: {path} is not a regular file; give a text file, a folder or a glob")
  return SourceFile(name, str(path.absolute()), status.st_size, status.st_mtime_ns)


def _folder(key: str, path: str, root: Path, wanted: Wanted) -> Sources:
  kept: list[SourceFile] = []
  skipped: collections.Counter[str] = collections.Counter()
  others: list[Path] = []
  for file in _walk(key, root, lambda name: not name.startswith(".") and name != "__pycache__"):
    if reason := _reason_to_skip(file.name, wanted, is_folder=file.is_dir()):
      skipped[reason] += 1
      others.append(file)
    else:
      kept.append(_source_file(key, file, root))
  return _found_in_folder(key, path, kept, skipped, wanted, others)


def _found_in_folder(
  key: str,
  path: str,
  kept: list[SourceFile],
  skipped: collections.Counter[str],
  wanted: Wanted,
  others: Sequence[Path] = (),
) -> Sources:
  if not kept:
    seen = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no files at all"
    raise UserError(
      f"{key}={path}: the folder holds no {wanted.what} ({seen}); {wanted.offer(key, path, others)}"
    )
  return Sources(key, path, "folder", _by_name(kept), tuple(sorted(skipped.items())))


def _objects(key: str, url: str, wanted: Wanted) -> Sources:
  scheme, _, path = url.partition("://")
  results = {each.path: each for each in OpenStore.of(key, url).listed(url)}
  is_glob = glob.has_magic(path)
  if not results:
    reason = "the glob matches no object" if is_glob else "no such object, and none below it"
    raise UserError(f"{key}={url}: {reason}; use a URL that exists or {wanted.example}")
  root = os.path.commonpath(list(map(os.path.dirname, results))) if is_glob else path.rstrip("/")
  kind: Kind = "glob" if is_glob else "file" if root in results else "folder"
  if kind == "file":
    root = os.path.dirname(root)
  kept: list[SourceFile] = []
  skipped: collections.Counter[str] = collections.Counter()
  for place, name in names_within(root, list(results)):
    each = results[place]
    if kind == "folder" and (reason := _reason_to_skip(os.path.basename(name), wanted)):
      skipped[reason] += 1
    else:
      where = f"{scheme}://{place}"
      kept.append(SourceFile(name, where, each.size_bytes, 0, each.version, each.md5))
  if kind == "folder":
    return _found_in_folder(key, url, kept, skipped, wanted)
  return Sources(key, url, kind, _by_name(kept))


def _offer(key: str, path: str, others: Sequence[Path]) -> str:
  """Suggests what to write instead of a folder in which nothing is read."""
  for file in others:
    if file.is_dir():
      return f"for example {key}={file}"
    if file.is_file() and _begins_as_text(file):
      hidden = "." if file.name.startswith(".") else ""
      return f"for example {key}='{path.rstrip('/')}/**/{hidden}*{file.suffix}'"
  return f"what is read is text in UTF-8, for example {key}={STDLIB}"


def _begins_as_text(file: Path) -> bool:
  try:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
      begin = opened.read(_BEGIN_BYTES)
    codecs.getincrementaldecoder("utf-8")().decode(begin)
  except (OSError, EOFError, zlib.error, UnicodeDecodeError):
    return False
  return bool(begin) and b"\0" not in begin


def _reason_to_skip(name: str, wanted: Wanted, *, is_folder: bool = False) -> str:
  """Returns why a file or a linked folder met in a folder is not read; empty when it is."""
  if is_folder:
    return "symbolic link to a folder (name its files with a glob)"
  return "hidden" if name.startswith(".") else wanted.reason_to_skip(name)


def _no_text(name: str) -> str:
  suffixes = [suffix[1:].lower() for suffix in Path(name).suffixes]
  if suffixes and suffixes[-1] == "gz":
    suffixes.pop()
  if not suffixes or suffixes[-1] in TEXT_SUFFIXES:
    return ""
  return f".{suffixes[-1]}"


def _walk(key: str, root: Path, enter) -> Iterator[Path]:
  """Yields all files below `root`, in the subfolders whose name `enter` accepts, and symbolic links
  to such subfolders, which are not entered: they may lead anywhere, and in circles."""

  def refuse(error: OSError):
    raise UserError(f"{key}: cannot read the folder {error.filename}: {error.strerror}") from error

  for folder, subfolders, names in os.walk(root, onerror=refuse):
    subfolders[:] = sorted(name for name in subfolders if enter(name))
    links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
    yield from (Path(folder, name) for name in sorted([*names, *links]))


def _glob(key: str, path: str, pattern: str) -> Sources:
  matches = map(Path, glob.glob(pattern, recursive=True))
  paths = sorted(match for match in matches if not match.is_dir())
  if not paths:
    raise UserError(f"{key}={path}: the glob matches no file; '**' reaches into subfolders")
  root = Path(os.path.commonpath([match.parent for match in paths]))
  files = _by_name([_source_file(key, file, root) for file in paths])
  return Sources(key, path, "glob", files)


def _stdlib(key: str) -> Sources:
  """Returns Python's own library, without tests and caches: each time the same megabytes."""
  root = Path(sysconfig.get_path("stdlib"))
  skip = STDLIB_SKIPPED_FOLDERS | {"__pycache__"}
  walk = _walk(key, root, lambda name: name not in skip)
  results = [_source_file(key, file, root) for file in walk if file.suffix in (".py", ".txt")]
  results = [file for file in results if file.size_bytes]
  if len(results) < 2:
    raise UserError(
      f"{key}={STDLIB}: this Python has no source text in {root}; give {key} a text file or folder"
    )
  kept, total = [], 0
  for file in sorted(results, key=lambda file: (rank(file.name, "stdlib"), file.name)):
    if total < STDLIB_BYTES:
      kept.append(file)
      total += file.size_bytes
  return Sources(key, STDLIB, "stdlib", _by_name(kept))


def _by_name(files: list[SourceFile]) -> tuple[SourceFile, ...]:
  return tuple(sorted(files, key=lambda file: file.name))
