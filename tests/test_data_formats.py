"""Files of records: every format gives the same documents, whatever its pieces and its makers."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_imports import WhenUsed
from record_files import WRITERS, example, framed, jsonl, parquet, table
from support import base
from token_caches import starts_of

from maxbatch.config.load import load_config, without_effect
from maxbatch.data import token_cache, workers
from maxbatch.data.document_rows import TokenWindows
from maxbatch.data.formats.tf_records import feature
from maxbatch.data.registry import SyntheticRows, build_dataset, check_epochs
from maxbatch.data.rows import Dataset
from maxbatch.data.token_cache import TokenCache
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.errors import UserError

datasets = WhenUsed("datasets")

BYTES = ByteTokenizer()
DOCUMENTS = [f"Document {n}: naïve 🎉\n" + "word " * (n % 7) for n in range(40)]
"""No two are equal."""


def build(place: Path, **keys: object) -> Dataset:
  given = {"dataset_cache_directory": str(place / "cache"), "eval_fraction": 0.0} | keys
  return build_dataset(dataclasses.replace(base().data, **given), 4)


def grain(place: Path, path: Path | str, **keys: object) -> Dataset:
  return build(place, **({"dataset_type": "grain", "grain_train_files": str(path)} | keys))


def refusal(place: Path, **keys: object) -> str:
  with pytest.raises(UserError) as caught:
    build(place, **keys)
  return str(caught.value)


def cache_of(rows: object) -> TokenCache:
  assert isinstance(rows, TokenWindows)
  return rows.cache


def documents(rows: object) -> list[str]:
  """The text of every document, taken apart by the index of documents."""
  cache = cache_of(rows)
  starts = starts_of(cache)
  parts = [cache.read(*pair) for pair in zip(starts, [*starts[1:], cache.num_tokens], strict=True)]
  assert all(part[0] == BYTES.bos_id and part[-1] == BYTES.eos_id for part in parts)
  return [BYTES.decode(part) for part in parts]


@pytest.mark.parametrize("name", WRITERS)
def test_a_record_is_a_document(tmp_path, name):
  WRITERS[name](tmp_path / name, DOCUMENTS)
  dataset = grain(tmp_path, tmp_path / name)
  assert documents(dataset.train) == DOCUMENTS
  assert "column text" in dataset.description
  assert "40 documents" in dataset.description


@pytest.mark.parametrize("name", WRITERS)
def test_the_last_records_are_held_out(tmp_path, name):
  WRITERS[name](tmp_path / name, DOCUMENTS)
  dataset = grain(tmp_path, tmp_path / name, eval_fraction=0.25)
  train, kept = documents(dataset.train), documents(dataset.validation)
  assert train + kept == DOCUMENTS
  assert 6 <= len(kept) <= 14


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", [*WRITERS, "a.txt"])
def test_pieces_and_processes_change_nothing(tmp_path, monkeypatch, name, processes):
  """Many shards, made by this process or by two others, hold what one shard does."""
  keys = {"dataset_type": "grain", "grain_train_files": str(tmp_path / name)}
  if name == "a.txt":
    (tmp_path / name).write_text("".join(DOCUMENTS))
    keys = {"dataset_type": "text", "dataset_path": str(tmp_path / name)}
  else:
    WRITERS[name](tmp_path / name, DOCUMENTS)
  whole = build(tmp_path / "whole", **keys, eval_fraction=0.25)
  monkeypatch.setattr(token_cache, "SHARD_BYTES", (tmp_path / name).stat().st_size // 5)
  monkeypatch.setattr(workers.os, "cpu_count", lambda: processes)
  pieces = build(tmp_path / "pieces", **keys, eval_fraction=0.25)
  assert documents(pieces.train) == documents(whole.train)
  assert documents(pieces.validation) == documents(whole.validation)
  assert pieces.fingerprint == whole.fingerprint
  is_divided = len(cache_of(pieces.train).shards) > 1
  assert is_divided == (name in ("a.jsonl", "a.parquet", "a.txt") or "array_record" in name)
  left = {path.suffix for path in (tmp_path / "pieces" / "cache").iterdir()}
  assert left == {".tokens", ".documents", ".json"}, "no claims, no temporary files"


@pytest.mark.parametrize("name", WRITERS)
def test_records_of_token_ids(tmp_path, name):
  ids = [[5, 6, 7], [8], [], [100, 258, 0]]
  WRITERS[name](tmp_path / name, ids, column="input_ids")
  keys = {"tokenize_train_data": False, "train_data_columns": ("input_ids",)}
  dataset = grain(tmp_path, tmp_path / name, **keys)
  cache = cache_of(dataset.train)
  assert cache.read(0, 100).tolist() == [5, 6, 7, 8, 100, 258, 0]
  assert starts_of(cache) == [0, 3, 4]
  assert "1 empty" in dataset.description


def test_a_folder_of_several_files_in_order_of_names(tmp_path):
  folder = tmp_path / "in"
  (folder / "sub").mkdir(parents=True)
  for number, place in enumerate(["b.parquet", "a.parquet", "sub/c.parquet"]):
    parquet(folder / place, DOCUMENTS[number * 5 : number * 5 + 5])
  (folder / "README.md").write_text("about it")
  (folder / "dataset_info.json").write_text("{}")
  dataset = grain(tmp_path, folder)
  wanted = DOCUMENTS[5:10] + DOCUMENTS[:5] + DOCUMENTS[10:15]
  assert documents(dataset.train) == wanted
  assert "files and records skipped: 1 .json, 1 .md" in dataset.description
  assert documents(grain(tmp_path, f"{folder}/**/*.parquet").train) == wanted


def test_validation_files_with_columns_of_their_own(tmp_path):
  parquet(tmp_path / "a.parquet", DOCUMENTS[:9], column="body")
  jsonl(tmp_path / "b.jsonl", DOCUMENTS[9:12])
  dataset = grain(
    tmp_path,
    tmp_path / "a.parquet",
    train_data_columns=("body",),
    grain_eval_files=str(tmp_path / "b.jsonl"),
  )
  assert documents(dataset.train) == DOCUMENTS[:9]
  assert documents(dataset.validation) == DOCUMENTS[9:12]


def test_names_say_what_is_for_validation(tmp_path):
  for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
    parquet(tmp_path / f"{name}.parquet", [name])
  dataset = grain(tmp_path, tmp_path / "*.parquet", eval_fraction=0.05)
  assert documents(dataset.train) == ["train-00000-of-00002", "train-00001-of-00002"]
  assert documents(dataset.validation) == ["validation-00000-of-00001"]


def test_a_given_format_needs_no_name_that_says_it(tmp_path):
  jsonl(tmp_path / "corpus.data", DOCUMENTS[:3])
  keys = {"dataset_type": "grain", "grain_train_files": str(tmp_path / "corpus.data")}
  assert "does not say its format; give it, for example grain_file_type=parquet" in refusal(
    tmp_path, **keys
  )
  assert documents(build(tmp_path, **keys, grain_file_type="jsonl").train) == DOCUMENTS[:3]
  assert "Did you mean jsonl?" in refusal(tmp_path, **keys, grain_file_type="json")
  assert "there is no such format" in refusal(tmp_path, **keys, grain_file_type="os:sep")


def test_an_example_is_read_as_tensorflow_writes_it():
  record = b"\x0a\x10\x0a\x0e\x0a\x04text\x12\x06\x0a\x04\x0a\x02ab"
  assert feature(record, "text") == b"ab"
  assert example("ab") == record
  packed = b"\x0a\x0f\x0a\x0d\x0a\x03ids\x12\x06\x1a\x04\x0a\x02\x07\x08"
  assert feature(packed, "ids") == [7, 8]
  assert framed(b"")[:12] == bytes(8) + bytes.fromhex("29039807")


def test_a_changed_file_is_read_again_and_the_others_are_not(tmp_path, monkeypatch):
  monkeypatch.setattr(token_cache, "SHARD_BYTES", 10)
  monkeypatch.setattr(workers.os, "cpu_count", lambda: 1)
  for name in "abc":
    jsonl(tmp_path / f"{name}.jsonl", [f"document {name}"])
  first = grain(tmp_path, tmp_path / "*.jsonl")
  jsonl(tmp_path / "b.jsonl", ["another"])
  os.utime(tmp_path / "b.jsonl", ns=(5, 5))
  second = grain(tmp_path, tmp_path / "*.jsonl")
  assert documents(second.train) == ["document a", "another", "document c"]
  assert first.fingerprint != second.fingerprint, "a run that resumes compares it"
  same = set(cache_of(first.train).shards) & set(cache_of(second.train).shards)
  assert len(same) > 1
  paths = [Path(shard.path) for shard in same]
  assert max(path.stat().st_mtime_ns for path in paths) < min(
    path.stat().st_mtime_ns
    for path in (tmp_path / "cache").glob("*.tokens")
    if path not in paths and str(path) not in {s.path for s in cache_of(first.train).shards}
  )


@pytest.mark.parametrize("splits", [False, True])
def test_a_dataset_saved_to_disk(tmp_path, splits):
  made = datasets.Dataset(table(DOCUMENTS))
  keys = {"dataset_type": "hf", "hf_path": str(tmp_path / "saved")}
  if splits:
    parts: Any = {"train": made.select(range(30)), "validation": made.select(range(30, 40))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    keys["hf_eval_split"] = "validation"
  else:
    made.save_to_disk(tmp_path / "saved", num_shards=3)
  dataset = build(tmp_path, **keys)
  assert documents(dataset.train) == DOCUMENTS[: 30 if splits else 40]
  if splits:
    assert documents(dataset.validation) == DOCUMENTS[30:]
    assert "it has train, validation" in refusal(tmp_path, **(keys | {"hf_eval_split": "test"}))
  else:
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    message = refusal(tmp_path, **keys)
    assert "1 of 00003 numbered files are missing: data-00001-of-00003.arrow" in message


def test_a_dataset_s_folder_of_parquet(tmp_path):
  folder = tmp_path / "repository" / "en"
  folder.mkdir(parents=True)
  parquet(folder / "train-00000-of-00001.parquet", DOCUMENTS[:30])
  parquet(folder / "validation-00000-of-00001.parquet", DOCUMENTS[30:])
  keys = {"dataset_type": "hf", "hf_path": str(tmp_path / "repository"), "hf_data_dir": "en"}
  dataset = build(tmp_path, **keys, eval_fraction=0.05)
  assert documents(dataset.train) == DOCUMENTS[:30]
  assert documents(dataset.validation) == DOCUMENTS[30:]
  files = {"hf_train_files": "train-*.parquet", "hf_eval_files": "validation-*.parquet"}
  assert documents(build(tmp_path, **keys, **files).validation) == DOCUMENTS[30:]


@pytest.mark.parametrize(("hf_path", "name"), [("parquet", "a.parquet"), ("json", "a.jsonl")])
def test_files_of_a_format_as_datasets_names_it(tmp_path, hf_path, name):
  WRITERS[name](tmp_path / name, DOCUMENTS)
  keys = {"dataset_type": "hf", "hf_path": hf_path, "hf_train_files": str(tmp_path / name)}
  assert documents(build(tmp_path, **keys).train) == DOCUMENTS
  assert "hf_name=en has no effect" in refusal(tmp_path, **keys, hf_name="en")


def test_a_dataset_by_name_through_the_library(tmp_path, monkeypatch):
  """csv, which is a name to it, needs no network."""
  monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "library")
  lines = ["text", *(f'"{text}"' for text in DOCUMENTS)]
  (tmp_path / "a.csv").write_text("\n".join(lines))
  keys = {"dataset_type": "hf", "hf_path": "csv", "hf_train_files": str(tmp_path / "a.csv")}
  assert documents(build(tmp_path, **keys).train) == DOCUMENTS
  message = refusal(tmp_path, **(keys | {"hf_train_files": str(tmp_path / "no.csv")}))
  assert "hf_path=csv train_split=train: it is not a local folder" in message
  assert "no.csv" in message


HUNDRED = SyntheticRows(0, 0, 100, 4, packing=False, ids=np.arange(3))


def test_epochs_are_limited_only_if_asked_for():
  data = dataclasses.replace(base().data, num_epoch=2)
  check_epochs(data, HUNDRED, num_samples=200)
  check_epochs(base().data, HUNDRED, num_samples=10**9)
  with pytest.raises(UserError) as caught:
    check_epochs(data, HUNDRED, num_samples=201)
  assert str(caught.value) == (
    "num_epoch=2: 100 rows are 200 samples, and the run takes 201; use total_samples=200 (with "
    "steps=-1), num_epoch=3, or num_epoch=-1 for as many as it takes"
  )


def test_keys_of_another_dataset_type_are_refused(tmp_path):
  (tmp_path / "a.txt").write_text("some words " * 9)
  keys = {"dataset_path": str(tmp_path / "a.txt"), "grain_train_files": "x.parquet"}
  for given in ("grain_train_files=x.parquet", "grain_file_type=arrow", "hf_name=en"):
    with pytest.raises(UserError, match=f"{given} has no effect with dataset_type=text"):
      without_effect(load_config(["config=base", given]))
  with pytest.raises(UserError, match=r"train_data_columns=\['a'\] has no effect"):
    without_effect(load_config(["config=base", "train_data_columns=[a]"]))
  with pytest.raises(UserError, match="tokenize_train_data=false: files of text hold no token ids"):
    build(tmp_path, dataset_path=keys["dataset_path"], tokenize_train_data=False)
  jsonl(tmp_path / "a.jsonl", ["some words " * 9])
  given = {"dataset_type": "grain", "grain_train_files": str(tmp_path / "a.jsonl")}
  with pytest.raises(UserError, match=r"dataset_path=other/ has no effect with dataset_type=grain"):
    without_effect(
      load_config(["config=base", "dataset_path=other/", *map("=".join, given.items())])
    )
  assert starts_of(cache_of(build(tmp_path, **keys).train)) == [0]
