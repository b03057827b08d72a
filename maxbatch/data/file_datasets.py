"""Datasets made of files: text (dataset_type=text), records (grain), and those of Hugging Face (hf).

Which documents are for training and which are held out, by their names or by share of bytes.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from maxbatch.config.registry import library
from maxbatch.config.schema import DataConfig
from maxbatch.data.object_store import OpenStore, is_url
from maxbatch.data.record_files import AUTO, Columns, resolve_records
from maxbatch.data.sources import Document, SourceFile, Sources, rank, resolve
from maxbatch.errors import UserError, first_of

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
    eval_fraction: the share of bytes to hold out; 0: none, and what names hold out is left out.
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
  """Returns the bytes of each document's file by its name; of very many, all in one entry."""
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


def find_text(data: DataConfig) -> Given:
  """Finds the files of `dataset_path` and `eval_dataset_path`. Raises UserError: one is missing, or
  is to hold weights or token ids."""
  if data.weights_column:
    raise UserError(
      f"weights_column={data.weights_column}: files of text have no columns; set "
      "weights_column='', or use dataset_type=grain grain_train_files='data/*.parquet'"
    )
  train, evaluation = data.tokenize_train_data, data.tokenize_eval_data
  ids = {"tokenize_train_data": train, "tokenize_eval_data": evaluation}
  if ids_keys := [key for key, tokenize in ids.items() if not tokenize]:
    raise UserError(
      f"{ids_keys[0]}=false: files of text hold no token ids; set {ids_keys[0]}=true, or use "
      "dataset_type=grain grain_train_files='data/*.parquet'"
    )
  sources = resolve("dataset_path", data.dataset_path)
  validation = None
  if data.eval_dataset_path:
    validation = resolve("eval_dataset_path", data.eval_dataset_path)
  return Given(sources, validation, "eval_dataset_path")


def train_columns(data: DataConfig) -> Columns:
  """Returns the columns of a training record that make up its document."""
  names, tokenize = data.train_data_columns, data.tokenize_train_data
  return Columns("train_data_columns", names, tokenize, data.weights_column)


def eval_columns(data: DataConfig) -> Columns:
  """Returns the columns of a validation record that make up its document."""
  names, tokenize = data.eval_data_columns, data.tokenize_eval_data
  return Columns("eval_data_columns", names, tokenize, data.weights_column)


def find_grain(data: DataConfig) -> Given:
  """Finds the files of `grain_train_files` and `grain_eval_files`. Raises UserError: one is
  missing, or is of another format."""
  form = data.grain_file_type, "grain_file_type"
  columns, eval_key, validation = train_columns(data), "grain_eval_files", None
  train = resolve_records("grain_train_files", data.grain_train_files, columns, *form)
  if data.grain_eval_files:
    validation = resolve_records(eval_key, data.grain_eval_files, eval_columns(data), *form)
  return Given(train, validation, eval_key)


_BUILDERS = {"parquet": "parquet", "json": "jsonl", "arrow": "arrow"}
"""Builders of the datasets library whose files are read here as formats."""
_EVAL_WORDS = ("valid", "validation", "val", "eval", "dev", "test")


def find_hf(data: DataConfig) -> Given | None:
  """Finds the files of `hf_path`; None for a name, which the datasets library has to look up.
  Raises UserError: an input is missing, or of another format."""
  if not data.hf_path:
    raise UserError(
      "dataset_type=hf needs hf_path: a dataset's folder, a name such as allenai/c4, or "
      "hf_path=parquet with hf_train_files='data/*.parquet'"
    )
  folder = os.path.expanduser(data.hf_path)
  if data.hf_path in _BUILDERS:
    return _of_files(data)
  if is_url(folder):
    OpenStore.of("hf_path", folder)  # It names a bucket: what is joined to it may look like one.
  elif not os.path.isdir(folder):
    return None
  return _of_folder(data, os.path.join(folder, data.hf_data_dir))


def _of_files(data: DataConfig) -> Given:
  """Returns the files of a format that hf_path names."""
  split = "" if data.train_split == "train" else data.train_split
  splits = {"train_split": split, "hf_eval_split": data.hf_eval_split}
  _refuse("a format", data.hf_path, hf_name=data.hf_name, **splits)
  form, folder = _BUILDERS[data.hf_path], data.hf_data_dir
  train_files = data.hf_train_files or folder
  train = resolve_records("hf_train_files", train_files, train_columns(data), form, "hf_path")
  validation = None
  if data.hf_eval_files:
    columns = eval_columns(data)
    validation = resolve_records("hf_eval_files", data.hf_eval_files, columns, form, "hf_path")
  return Given(train, validation, "hf_eval_files")


def _of_folder(data: DataConfig, folder: str) -> Given:
  """Returns the files of a folder as save_to_disk writes it, with or without splits, or of a folder
  of records."""
  _refuse("a folder", data.hf_path, hf_name=data.hf_name)
  if _is_file(os.path.join(folder, "dataset_dict.json")):
    _refuse("a folder of splits", data.hf_path, hf_train_files=data.hf_train_files)
    train = _split(data.train_split, "train_split", folder, train_columns(data))
    if not data.hf_eval_split:
      return Given(train, None, "hf_eval_split")
    validation = _split(data.hf_eval_split, "hf_eval_split", folder, eval_columns(data))
    return Given(train, validation, "hf_eval_split")
  if data.train_split != "train" or data.hf_eval_split not in ("", *_EVAL_WORDS):
    raise UserError(
      f"hf_path={data.hf_path}: train_split={data.train_split} hf_eval_split={data.hf_eval_split}: "
      "this folder has no splits but what its files' names say; use train_split=train "
      "hf_eval_split=validation, or hf_train_files and hf_eval_files"
    )
  key = "hf_train_files" if data.hf_train_files else "hf_path"
  files = _within(folder, data.hf_train_files)
  train = resolve_records(key, files, train_columns(data), AUTO, "hf_path")
  validation = None
  if data.hf_eval_files:
    files = _within(folder, data.hf_eval_files)
    validation = resolve_records("hf_eval_files", files, eval_columns(data), AUTO, "hf_path")
  return Given(train, validation, "hf_eval_files")


def _within(folder: str, files: str) -> str:
  return files if is_url(files) else os.path.join(folder, files)


def _is_file(path: str) -> bool:
  if is_url(path):
    return bool(OpenStore.of("hf_path", path).listed(path))
  return os.path.isfile(path)


def _split(name: str, key: str, folder: str, columns: Columns) -> Sources:
  path = os.path.join(folder, name)
  if not is_url(path) and not os.path.isdir(path):
    there = ", ".join(sorted(path.name for path in Path(folder).iterdir() if path.is_dir()))
    raise UserError(f"{key}={name}: {folder} has no such split; it has {there or 'none'}")
  return resolve_records(key, path, columns, "arrow", "hf_path")


def of_name(data: DataConfig) -> Given:
  """Returns a dataset that the datasets library finds by name and keeps as Arrow files."""
  train = _loaded(data, "train_split", data.train_split, data.hf_train_files, train_columns(data))
  if not (data.hf_eval_split or data.hf_eval_files):
    return Given(train, None, "hf_eval_split")
  # Files that are given without splits are all of the split "train".
  split = data.hf_eval_split or "train"
  validation = _loaded(data, "hf_eval_split", split, data.hf_eval_files, eval_columns(data))
  return Given(train, validation, "hf_eval_split")


def _loaded(data: DataConfig, key: str, split: str, files: str, columns: Columns) -> Sources:
  given = f"hf_path={data.hf_path}"
  datasets = library("datasets", given, extra="hf")
  try:
    loaded = datasets.load_dataset(
      data.hf_path,
      name=data.hf_name or None,
      data_dir=data.hf_data_dir or None,
      data_files=files or None,
      split=split,
    )
  except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
    text = " ".join(str(error).split())[:500]
    raise UserError(
      f"{given} {key}={split}: it is not a local folder, and the datasets library cannot load it "
      f"({text}); give a folder of files, or a name and split that exist"
    ) from error
  paths = [Path(entry["filename"]) for entry in loaded.cache_files]
  if not paths:
    raise UserError(f"{given} {key}={split}: the dataset has no files in the library's cache")
  results = tuple(
    SourceFile(path.name, str(path.absolute()), status.st_size, status.st_mtime_ns)
    for path, status in ((path, path.stat()) for path in paths)
  )
  return columns.of(Sources(key, data.hf_path, "folder", results), "arrow")


def _refuse(what: str, path: str, **given: str) -> None:
  if unread := [f"{key}={value}" for key, value in given.items() if value]:
    raise UserError(
      f"hf_path={path} is {what}, beside which {' '.join(unread)} has no effect; leave it out"
    )
