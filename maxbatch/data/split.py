"""Which documents are for training and which are held out, by their names or by share of bytes."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from maxbatch.data.sources import Document, SourceFile, Sources, rank
from maxbatch.errors import first_of

_Role = Literal["train", "validation", "test"]

_ROLES: dict[str, _Role] = {
  "train": "train",
  "valid": "validation",
  "validation": "validation",
  "val": "validation",
  "eval": "validation",
  "dev": "validation",
  "test": "test",
}
_SHOWN = 3
"""Names of documents in a description, before the rest is counted."""
_MOST_LISTED = 1000
"""Every checkpoint has the list: a record of some tens of kilobytes at most."""


class Given(NamedTuple):
  """The files that the keys of a dataset name."""

  train: Sources
  validation: Sources | None
  """None: a part of `train`."""
  eval_key: str


class Split(NamedTuple):
  """The documents of each side, and those that are on neither."""

  train: tuple[Document, ...]
  validation: tuple[Document, ...]
  left_out: tuple[Document, ...] = ()


def split(sources: Sources, eval_fraction: float) -> Split:
  """Divides the files into training and validation documents.

  Files that their names, or those of their folders, call valid, validation, val, eval or dev are
  for validation, and files called test where there are none of these; beside them test files are
  left out. Where no name says so, the split goes by share of bytes, see `_by_share`.

  Args:
    eval_fraction: the share of bytes to hold out; 0: no validation, and what names keep out of
      training is left out.
  """
  if sources.kind == "stdlib":
    return _by_share(sources.files, eval_fraction, sources.size_bytes)
  roles = _roles(sources.files)
  held_out = [file for file in sources.files if roles.get(file.name, "train") != "train"]
  if not held_out or len(held_out) == len(sources.files):
    return _by_share(sources.files, eval_fraction, eval_fraction * sources.size_bytes)
  wanted = "validation" if "validation" in roles.values() else "test"
  validation = [file for file in held_out if eval_fraction and roles[file.name] == wanted]
  return Split(
    train=tuple(Document(file) for file in sources.files if file not in held_out),
    validation=tuple(map(Document, validation)),
    left_out=tuple(Document(file) for file in held_out if file not in validation),
  )


def described(documents: Sequence[Document]) -> str:
  """Lists the first few names, with the part of a file that is meant if it is not all of it."""
  return first_of(list(map(_name, documents)), _SHOWN)


def sizes_by_name(documents: Sequence[Document]) -> dict[str, int]:
  """Returns the bytes of each document's file, by its name; of very many files, all in one
  entry."""
  if len(documents) > _MOST_LISTED:
    return {f"{len(documents):,} files": sum(each.file.size_bytes for each in documents)}
  return {_name(document): document.file.size_bytes for document in documents}


def _name(document: Document) -> str:
  if document.begin > 0:
    return f"{document.file.name} (its last {100 * (1 - document.begin):.4g}%)"
  if document.end < 1:
    return f"{document.file.name} (its first {100 * document.end:.4g}%)"
  return document.file.name


def _by_share(files: tuple[SourceFile, ...], eval_fraction: float, largest_whole: float) -> Split:
  """Puts each file of up to `largest_whole` bytes on one side, by its name alone, so that adding a
  file moves none of the others. A larger one, more than what is held out of all, is divided by
  position: its last `eval_fraction` is validation."""
  if eval_fraction == 0:
    return Split(tuple(map(Document, files)), ())
  whole = [file for file in files if file.size_bytes <= largest_whole and len(files) > 1]
  ranked = sorted(whole, key=lambda file: (rank(file.name, "split"), file.name))
  wanted = sum(rank(file.name, "split") < eval_fraction for file in ranked)
  if len(whole) == len(files):
    wanted = min(max(wanted, 1), len(files) - 1)
  kept = {file.name for file in ranked[:wanted]}
  on_one_side = {file.name for file in whole}
  train, validation = [], []
  for file in files:
    if file.name not in on_one_side:
      train.append(Document(file, end=1 - eval_fraction))
      validation.append(Document(file, begin=1 - eval_fraction))
    else:
      (validation if file.name in kept else train).append(Document(file))
  return Split(tuple(train), tuple(validation))


def _roles(files: tuple[SourceFile, ...]) -> dict[str, _Role]:
  """Returns the roles that file names imply, by name; files without such a name are not in it."""
  words = {file.name: _words(file.name) for file in files}
  roles = {}
  for name, (folders, stem) in words.items():
    # foo_test.go is a file like others, unless there is a foo_train.go.
    pair = (folders, (*stem[:-1], "train"))
    if stem and stem[-1] in _ROLES and (len(stem) == 1 or pair in words.values()):
      roles[name] = _ROLES[stem[-1]]
    elif named := [folder for folder in folders if folder in _ROLES]:
      roles[name] = _ROLES[named[-1]]
  return roles


def _words(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  path = PurePosixPath(re.sub(r"\.(gz|zstd?)$", "", name.lower()))
  words = re.split(r"[._-]+", path.stem)
  return path.parent.parts, tuple(word for word in words if word != "of" and not word.isdigit())
