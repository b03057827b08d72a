"""Damaged and unsuitable input: each is named with file and record, and nothing half is cached."""

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grain_datasets import build, refusal
from processes import PATIENCE_SECONDS
from record_files import (
  WRITERS,
  array_record,
  arrow_stream,
  framed,
  jsonl,
  jsonl_gz,
  parquet,
  tfrecord,
)
from vocabularies import tiktoken_file

from maxbatch import train
from maxbatch.data import token_cache, tokenize, workers
from maxbatch.data.document_rows import TokenWindows
from maxbatch.data.formats import format as record_format
from maxbatch.data.formats.format import JSONL
from maxbatch.data.rows import Dataset
from maxbatch.data.sources import Document, resolve
from maxbatch.data.token_cache import TokenCache
from maxbatch.data.tokenize import Recipe
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.errors import UserError

GOOD = ["first document", "second document", "third document"]


def cache_of(dataset: Dataset) -> TokenCache:
  assert isinstance(dataset.train, TokenWindows)
  return dataset.train.cache


def cached_files(place: Path) -> list[str]:
  return sorted(path.name for path in (place / "cache").glob("*"))


LINES = {
  "not JSON": (b'{"text": "cut', "line 2: not JSON: "),
  "not an object": (b"[1, 2]", "line 2: list instead of an object with the column text"),
  "another column": (b'{"id": 1, "body": "x"}', "line 2: no column text; it has id, body"),
  "null": (b'{"text": null}', "line 2: null instead of text"),
  "a number": (b'{"text": 7}', "line 2: int instead of text"),
  "ids": (
    b'{"text": [1, 2]}',
    "line 2: a list instead of text (tokenize_train_data=false reads it",
  ),
  "not UTF-8": (b'{"text": "a\xff"}', "line 2: byte 0xff is not UTF-8"),
  "a lone surrogate": (b'{"text": "a\\ud800"}', "line 2: character 1 is a lone surrogate"),
  "NUL": (b'{"text": "ab\\u0000"}', "line 2: not text: a NUL byte at 2"),
  "garbage": (bytes(range(128, 200)), "line 2: byte 0x80 is not UTF-8"),
  "too deep": (b"[" * 100_000, "line 2: nested too deeply"),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_is_named_or_skipped(tmp_path, kind, name):
  line, reason = LINES[kind]
  good = [json.dumps({"text": text}).encode() for text in GOOD]
  content = b"\n".join([good[0], line, good[1], b"", good[2]])
  (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
  message = refusal(tmp_path, tmp_path / name)
  assert message.startswith(f"grain_train_files: {tmp_path / name}, {reason}")
  assert "max_bad_records" in message
  assert cached_files(tmp_path) == []
  dataset = build(tmp_path, tmp_path / name, max_bad_records=1)
  assert cache_of(dataset).num_documents == 3
  assert "files and records skipped: 1 bad" in dataset.description
  # What has been skipped is not forgotten with the run that allowed it.
  assert "1 bad records, and max_bad_records=0; correct them" in refusal(tmp_path, tmp_path / name)


VALUES: list[tuple[str, list[Any], str]] = [
  ("a.parquet", ["one", None, "three"], "record 1: null instead of text"),
  ("stream.arrow", ["one", None, "three"], "record 1: null instead of text"),
  ("a.tfrecord", ["one", 1.5, "three"], "record 1: the feature text holds float_list instead of"),
  ("a.tfrecord", ["one", b"\xff\xfe", "x"], "record 1: not text: byte 0xff at 0 is not UTF-8"),
  ("a.array_record", ["one", [1, 2], "x"], "record 1: a list instead of text"),
  ("a.parquet", ["one", "a\0b", "x"], "record 1: not text: a NUL byte at 1"),
]


@pytest.mark.parametrize(("name", "values", "reason"), VALUES)
def test_a_bad_record_of_a_binary_format_is_named(tmp_path, name, values, reason):
  writer = array_record if name == "a.array_record" else WRITERS[name]
  writer(tmp_path / name, values)
  message = refusal(tmp_path, tmp_path / name)
  assert message.startswith(f"grain_train_files: {tmp_path / name}, {reason}")
  assert cache_of(build(tmp_path, tmp_path / name, max_bad_records=5)).num_documents == 2


def test_text_that_is_not_utf8_in_parquet(tmp_path):
  column = pa.array([b"good", b"bad \xff", b"fine"]).view(pa.string())
  pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
  message = refusal(tmp_path, tmp_path / "a.parquet")
  assert "a.parquet, record 1: not text: byte 0xff at 4 is not UTF-8" in message


def test_a_record_that_is_no_example(tmp_path):
  (tmp_path / "a.tfrecord").write_bytes(framed(b"hello, world"))
  assert "record 0: not a tf.train.Example" in refusal(tmp_path, tmp_path / "a.tfrecord")


@pytest.mark.parametrize("writer", [parquet, arrow_stream])
def test_a_column_that_is_not_there_or_of_another_type(tmp_path, writer):
  path = tmp_path / ("a.parquet" if writer is parquet else "a.arrow")
  writer(path, GOOD, "body")
  message = refusal(tmp_path, path)
  assert f"{path} has no column text, named by train_data_columns" in message
  assert message.endswith("its columns: id, body")
  build(tmp_path, path, train_data_columns=("body",))
  writer(path, [1.5, 2.5], "text")
  assert f"the column text of {path} is of type double" in refusal(tmp_path, path)
  assert "a document is one column" in refusal(tmp_path, path, train_data_columns=("a", "b"))


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "no bytes"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
  path = tmp_path / name
  WRITERS[name](path, [text * 500 for text in GOOD * 9])
  content = path.read_bytes()
  random = np.random.default_rng(0).bytes(5000)
  path.write_bytes(
    {"cut": content[: len(content) * 2 // 3 + 7], "garbage": random}.get(damage, b"")
  )
  message = refusal(tmp_path, path)
  assert str(path) in message
  is_empty_stream = damage == "no bytes" and name.endswith((".gz", ".zst", "a.tfrecord"))
  wanted = "is empty: a run needs text" if is_empty_stream else f"{path} is not a whole "
  assert wanted in message
  assert not [file for file in cached_files(tmp_path) if not is_empty_stream]


def test_a_stream_cut_between_two_batches_is_no_shorter_dataset(tmp_path):
  path = tmp_path / "a.arrow"
  arrow_stream(path, GOOD)
  path.write_bytes(path.read_bytes()[:-8])
  assert "it ends without the mark of a stream's end" in refusal(tmp_path, path)


def test_a_flipped_byte_in_an_array_record_is_found(tmp_path):
  path = tmp_path / "a.array_record"
  array_record(path, [text * 500 for text in GOOD])
  content = bytearray(path.read_bytes())
  place = content.index(b"first document")
  content[place] ^= 1
  path.write_bytes(content)
  assert "is not a whole ArrayRecord file" in refusal(tmp_path, path)


def test_ids_beyond_the_tokenizer_and_text_among_ids(tmp_path):
  keys = {"tokenize_train_data": False, "max_bad_records": 0}
  for values, reason in [
    ([[1, 2], [3, 259]], "line 2: token id 259 at 1 is not below the tokenizer's 259 ids"),
    ([[1, 2], [-1]], "line 2: token id -1 at 0 is not below"),
    ([[1, 2], "text"], "line 2: str instead of a list of token ids (tokenize_train_data=true"),
    ([[1, 2], [1.5]], "line 2: a list instead of a list of token ids"),
    ([[1, 2], [[1], [2]]], "line 2: a list instead of a list of token ids"),
    ([[1, 2], [[1], [2, 3]]], "line 2: a list instead of a list of token ids"),
    ([[1, 2], [10**30]], "line 2: a list instead of a list of token ids"),
    ([[1, 2], [True]], "line 2: a list instead of a list of token ids"),
    ([[1, 2], None], "line 2: null instead of a list of token ids"),
  ]:
    jsonl(tmp_path / "a.jsonl", values)
    message = refusal(tmp_path, tmp_path / "a.jsonl", **keys)
    assert f"a.jsonl, {reason}" in message, values


def test_documents_of_no_and_of_a_hundred_million_characters(tmp_path, monkeypatch):
  path = tmp_path / "a.jsonl"
  jsonl(path, ["first", "", "x" * 10**8, "last"])
  message = refusal(tmp_path, path)
  assert f"{path}, line 3: longer than 67,108,864 bytes" in message
  dataset = build(tmp_path, path, max_bad_records=1)
  assert cache_of(dataset).num_documents == 2
  assert "skipped: 1 bad, 1 empty" in dataset.description
  monkeypatch.setattr(record_format, "MAX_RECORD_BYTES", 99)
  parquet(tmp_path / "a.parquet", ["first", "x" * 100])
  message = refusal(tmp_path, tmp_path / "a.parquet")
  assert "record 1: longer than 99 bytes; a longer document can be a file of text" in message


def test_more_bad_records_than_may_be_in_all_shards_together(tmp_path, monkeypatch):
  monkeypatch.setattr(token_cache, "SHARD_BYTES", 30)
  monkeypatch.setattr(workers.os, "cpu_count", lambda: 1)
  for name in "abc":
    jsonl(tmp_path / f"{name}.jsonl", ["good text of " + name, None])
  message = refusal(tmp_path, tmp_path / "*.jsonl", max_bad_records=2)
  assert message.startswith("3 bad records, and max_bad_records=2; correct them, or raise it")
  assert f"The first: grain_train_files: {tmp_path}/a.jsonl, line 2: null" in message
  assert "skipped: 3 bad" in build(tmp_path, tmp_path / "*.jsonl", max_bad_records=3).description


def test_text_files_that_are_not_text_count_too(tmp_path):
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "a.txt").write_text("words " * 9)
  (tmp_path / "in" / "b.txt").write_bytes(b"\xff\xfe")
  keys = {"dataset_type": "text", "dataset_path": str(tmp_path / "in")}
  assert "b.txt is not text" in refusal(tmp_path, "", **keys)
  assert "files skipped: 1 bad" in build(tmp_path, "", **keys, max_bad_records=1).description


def test_a_folder_that_mixes_formats(tmp_path):
  folder = tmp_path / "in"
  folder.mkdir()
  parquet(folder / "a.parquet", GOOD)
  jsonl(folder / "b.jsonl", GOOD)
  jsonl(folder / "c.jsonl", GOOD)
  for path in (folder, folder / "*"):
    message = refusal(tmp_path, path)
    assert (
      f"={path} mixes formats: 2 jsonl (b.jsonl), 1 parquet (a.parquet); give a glob" in message
    )
  assert cache_of(build(tmp_path, f"{folder}/*.jsonl")).num_documents == 6
  result = build(tmp_path, folder, grain_file_type="parquet")
  assert cache_of(result).num_documents == 3
  assert "skipped: 2 .jsonl" in result.description


def test_a_missing_numbered_file(tmp_path):
  for number in (0, 2, 3):
    parquet(tmp_path / f"train-{number:05}-of-00005.parquet", GOOD)
  message = refusal(tmp_path, tmp_path)
  assert message.startswith(
    "grain_train_files: 2 of 00005 numbered files are missing: train-00001-of-00005.parquet, "
    "train-00004-of-00005.parquet; fetch them"
  )
  one = tmp_path / "train-00002-of-00005.parquet"
  assert cache_of(build(tmp_path, one)).num_documents == 3


@pytest.mark.parametrize(
  ("path", "what"),
  [
    ("abfs://bucket/a.parquet", "abfs:// is not read here. Known: s3://, gs://, and files"),
    ("a.parquet,0.3", "a mixture is two or more paths with weights in grain_train_files"),
    ("", "grain_train_files is empty: give a file, a folder, a glob such as 'data/*.parquet'"),
    ("no.parquet", "no such file or folder"),
  ],
)
def test_paths_that_mean_nothing_here(tmp_path, path, what):
  assert what in refusal(tmp_path, path)


def test_a_library_that_is_not_installed(tmp_path, monkeypatch):
  parquet(tmp_path / "a.parquet", GOOD)
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  message = refusal(tmp_path, tmp_path / "a.parquet")
  assert f"{tmp_path}/a.parquet needs the package pyarrow" in message
  assert "pip install 'maxbatch[data]'" in message


def test_the_command_ends_with_a_sentence_and_code_2(tmp_path, capsys):
  jsonl_gz(tmp_path / "a.jsonl.gz", GOOD * 99)
  content = (tmp_path / "a.jsonl.gz").read_bytes()
  (tmp_path / "a.jsonl.gz").write_bytes(content[:-20])
  keys = [f"grain_train_files={tmp_path}/a.jsonl.gz", f"dataset_cache_directory={tmp_path}/cache"]
  arguments = ["config=base", "validate_only=true", "dataset_type=grain", *keys]
  assert train.main(arguments) == 2
  assert f"error: grain_train_files: {tmp_path}/a.jsonl.gz is not a whole gzip file" in (
    capsys.readouterr().err
  )


def test_an_error_in_another_process_is_the_run_s(tmp_path, monkeypatch):
  monkeypatch.setattr(token_cache, "SHARD_BYTES", 50)
  monkeypatch.setattr(workers.os, "cpu_count", lambda: 2)
  jsonl(tmp_path / "a.jsonl", [*GOOD * 9, None])
  message = refusal(tmp_path, tmp_path / "a.jsonl")
  assert message.startswith(f"grain_train_files: {tmp_path}/a.jsonl, line 28: null instead of text")
  assert not [name for name in cached_files(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("change", ["grow", "edit", "remove"])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, change):
  path = tmp_path / "a.jsonl"
  jsonl(path, GOOD)
  inner = tokenize.text_of

  def meddle(record):
    if change == "remove":
      path.unlink(missing_ok=True)
    else:
      with path.open("a" if change == "grow" else "r+") as file:
        file.write('{"text": "more"}\n')
    return inner(record)

  monkeypatch.setattr(tokenize, "text_of", meddle)
  message = refusal(tmp_path, path)
  gone = "a.jsonl: No such file or directory"
  assert (gone if change == "remove" else "a.jsonl changed from ") in message
  assert cached_files(tmp_path) == []


class Killing(ByteTokenizer):
  """Kills its process, as the system does when memory is short."""

  def encode(self, text: bytes) -> np.ndarray:
    os.kill(os.getpid(), signal.SIGKILL)
    return super().encode(text)


def test_a_killed_process_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(token_cache, "SHARD_BYTES", 10)
  monkeypatch.setattr(workers.os, "cpu_count", lambda: 2)
  (tmp_path / "a.txt").write_text("some words\n" * 9)
  sources = resolve("dataset_path", str(tmp_path / "a.txt"))
  documents = [Document(file) for file in sources.files]
  with pytest.raises(UserError, match="a tokenizing process ended with exit code -9; "):
    token_cache.open_or_build(documents, tmp_path / "cache", "train", Recipe(sources, Killing()))


BUILD = """
import dataclasses, sys
from maxbatch.config.load import load_config
from maxbatch.data import token_cache
from maxbatch.data.corpus import build_corpus
from maxbatch.data.file_datasets import find_grain
from maxbatch.data.tokenizers.libraries import build_tiktoken as build_tokenizer
token_cache.SHARD_BYTES = 30_000
place, vocabulary = sys.argv[1:]
data = dataclasses.replace(
  load_config(["config=base"]).data,
  dataset_cache_directory=place + "/cache",
  grain_train_files=place + "/a.jsonl",
  tokenizer_path=vocabulary,
  eval_fraction=0.0,
)
print(build_corpus(data, build_tokenizer(data), 4, *find_grain(data)).fingerprint)
"""


def test_an_interrupted_build_goes_on_where_it_was(tmp_path):
  """Killed with its processes; the next one makes only what is missing, and the same."""
  vocabulary = tiktoken_file(tmp_path / "vocabulary")
  for place in ("killed", "whole"):
    (tmp_path / place).mkdir()
    jsonl(tmp_path / place / "a.jsonl", [f"the line {n} in the text " * 500 for n in range(40)])
  env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}

  def start(place: str) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILD, str(tmp_path / place), str(vocabulary)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

  run, folder = start("killed"), tmp_path / "killed" / "cache"
  end = time.monotonic() + PATIENCE_SECONDS
  while len(list(folder.glob("*.json"))) < 3:
    assert time.monotonic() < end
    assert run.poll() is None, "it ended before it could be killed"
    time.sleep(0.005)
  run.send_signal(signal.SIGKILL)
  run.communicate()
  made = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
  outputs = [start(place).communicate(timeout=PATIENCE_SECONDS)[0] for place in ("killed", "whole")]
  assert outputs[0] == outputs[1] != ""
  assert len(made) >= 3
  assert all(path.stat().st_mtime_ns == when for path, when in made.items())
  assert not list(folder.glob(".*")), "claims and temporary files of processes that ended"


ENDING = """
import os, pathlib, signal, sys
from maxbatch.data import workers

def make_shards(jobs, recipe, report, wait):
  temporary = jobs[0].path.with_name(".temporary")
  try:
    temporary.touch()
    report(1)
  finally:
    os.kill(os.getpid(), signal.SIGTERM)
    temporary.unlink()

workers.make_shards = make_shards
read_end, write_end = os.pipe()
os.close(read_end)
workers._main("0", str(write_end))
"""


def test_a_worker_whose_parent_is_killed_removes_its_files_however_often_it_is_told(tmp_path):
  work = pickle.dumps(([types.SimpleNamespace(path=tmp_path / "shard")], None))
  pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
  with subprocess.Popen([sys.executable, "-c", ENDING], **pipes) as worker:
    assert worker.stdin is not None
    assert worker.stderr is not None
    worker.stdin.write(work)
    worker.stdin.flush()
    assert worker.wait(PATIENCE_SECONDS) == 1
    assert worker.stderr.read() == b""
  assert list(tmp_path.iterdir()) == []


def test_a_line_is_read_from_wherever_a_piece_begins(tmp_path):
  path = tmp_path / "a.jsonl"
  jsonl(path, GOOD)
  size = path.stat().st_size
  (file,) = resolve("key", str(path)).files
  read = JSONL.read
  whole = list(read("key", file, "text", 0, size))
  for cut in range(size + 1):
    parts = [*read("key", file, "text", 0, cut), *read("key", file, "text", cut, size)]
    assert parts == whole


def test_a_flipped_bit_in_a_tfrecord_is_named_with_its_record(tmp_path):
  path = tmp_path / "a.tfrecord"
  tfrecord(path, GOOD)
  content = bytearray(path.read_bytes())
  content[content.index(b"second")] ^= 1  # Text all the same.
  path.write_bytes(content)
  message = refusal(tmp_path, path, max_bad_records=9)
  assert f"{path} is not a whole TFRecord file (record 1 does not match its checksum)" in message
  assert cached_files(tmp_path) == []


def test_a_tfrecord_whose_length_is_damaged(tmp_path):
  path = tmp_path / "a.tfrecord"
  tfrecord(path, GOOD)
  content = bytearray(path.read_bytes())
  content[1] ^= 1
  path.write_bytes(content)
  assert "where record 0 should begin, at byte 0, is none" in refusal(tmp_path, path)
