"""Which tokens count, as a column of the records says it: from every format to the rows' weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain_datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_files import framed

from maxbatch.config.registry import library
from maxbatch.data.formats import tf_records
from maxbatch.data.rows import Dataset

IDS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
MASKS = [[0, 1, 1], [1, 0, 0, 1], [0, 1]]


MASKED = {"weights_column": "mask", "grain_packing_type": "first_fit"}


def build(place: Path, path: Path, **keys: object) -> Dataset:
  return grain_datasets.build(place, path, **(MASKED | keys))


def refusal(place: Path, path: Path, **keys: object) -> str:
  return grain_datasets.refusal(place, path, **(MASKED | keys))


def targets(dataset: Dataset) -> dict[int, float]:
  """The weight of every target; no id is a target twice."""
  rows = dataset.train.rows(np.arange(len(dataset.train)))
  is_real = rows["segment_ids"] > 0
  pairs = zip(rows["targets"][is_real].tolist(), rows["weights"][is_real].tolist(), strict=True)
  return dict(pairs)


def examples(ids: list[Any], masks: list[Any]) -> list[bytes]:
  made = []
  for one, mask in zip(ids, masks, strict=True):
    example = tf_records.example_class()()
    example.features.feature["text"].int64_list.value.extend(one)
    example.features.feature["mask"].int64_list.value.extend(mask)
    made.append(example.SerializeToString())
  return made


def jsonl(path: Path, ids: list[Any], masks: list[Any]) -> None:
  pairs = zip(ids, masks, strict=True)
  path.write_text("".join(json.dumps({"mask": mask, "text": one}) + "\n" for one, mask in pairs))


def parquet(path: Path, ids: list[Any], masks: list[Any]) -> None:
  pq.write_table(pa.table({"mask": masks, "text": ids}), path, row_group_size=2)


def arrow(path: Path, ids: list[Any], masks: list[Any]) -> None:
  table = pa.table({"mask": [[bool(each) for each in mask] for mask in masks], "text": ids})
  with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
    writer.write_table(table, max_chunksize=2)


def tfrecord(path: Path, ids: list[Any], masks: list[Any]) -> None:
  path.write_bytes(b"".join(map(framed, examples(ids, masks))))


def array_record(path: Path, ids: list[Any], masks: list[Any]) -> None:
  module = library("array_record.python.array_record_module", "the test")
  writer = module.ArrayRecordWriter(str(path), "group_size:1")
  for each in examples(ids, masks):
    writer.write(each)
  writer.close()


WRITERS: dict[str, Callable[[Path, list[Any], list[Any]], None]] = {
  "a.jsonl": jsonl,
  "a.parquet": parquet,
  "a.arrow": arrow,
  "a.tfrecord": tfrecord,
  "a.array_record": array_record,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_weights_of_ids_are_those_of_the_targets(tmp_path, name):
  WRITERS[name](tmp_path / name, IDS, MASKS)
  # The first of each document is no target.
  wanted = {2: 1, 3: 1, 5: 0, 6: 0, 7: 1, 9: 1}
  assert targets(build(tmp_path, tmp_path / name, tokenize_train_data=False)) == wanted
  whole = build(tmp_path, tmp_path / name, tokenize_train_data=False, weights_column="")
  assert set(targets(whole).values()) == {1}
  windows = build(
    tmp_path,
    tmp_path / name,
    tokenize_train_data=False,
    grain_packing_type="concat_then_split",
  )
  rows = windows.train.rows(np.arange(len(windows.train)))
  weights = dict(zip(rows["targets"].flat, rows["weights"].flat, strict=True))
  assert {each: weights[each] for each in wanted} == wanted
  assert weights[4] == weights[8] == 0  # Nothing before them in their document predicts them.
  assert len({each.fingerprint for each in (whole, windows)}) == 2


def test_one_weight_for_a_document_of_text(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "ab", "mask": 1}\n{"text": "cd", "mask": 0}\n')
  bytes_of = {ord("b"): 1, ord("d"): 0, ord("a"): 1, ord("c"): 0}
  result = targets(build(tmp_path, tmp_path / "a.jsonl"))
  assert {byte: result[byte] for byte in bytes_of} == bytes_of


@pytest.mark.parametrize(
  ("mask", "reason"),
  [
    ([0, 1], "2 weights for its 3 ids"),
    ([0, 0.5, 1], "its weights are [0, 0.5, 1], which must be 0 or 1"),
    (None, "its weights are None"),
    ("on", "its weights are on"),
    ([[0], [1, 1]], "its weights are [[0], [1, 1]]"),
  ],
)
def test_weights_that_are_none_make_a_bad_record(tmp_path, mask, reason):
  jsonl(tmp_path / "a.jsonl", IDS[:1] * 2, [[1, 1, 1], mask])
  message = refusal(tmp_path, tmp_path / "a.jsonl", tokenize_train_data=False)
  assert f"a.jsonl, line 2: {reason}" in message
  skipping = {"tokenize_train_data": False, "max_bad_records": 1}
  assert build(tmp_path, tmp_path / "a.jsonl", **skipping).num_skipped_records == 1


def test_weights_that_cannot_be_meant(tmp_path):
  for mask in ([1, 0, 1, 0], []):
    jsonl(tmp_path / "a.jsonl", ["some text", "more"], [1, mask])
    said = f"{len(mask)} weights for a text, which has one weight"
    assert said in refusal(tmp_path, tmp_path / "a.jsonl")
  jsonl(tmp_path / "b.jsonl", ["some text", "more"], [0, 0])
  assert "no token counts in the loss, since all weights are 0" in (
    refusal(tmp_path, tmp_path / "b.jsonl")
  )
  parquet(tmp_path / "a.parquet", IDS, MASKS)
  message = refusal(tmp_path, tmp_path / "a.parquet", weights_column="weights")
  assert "has no column weights, named by weights_column; its columns: mask, text" in message
  assert "line 1: no column weights; it has mask, text" in (
    refusal(tmp_path, tmp_path / "a.jsonl", weights_column="weights")
  )
  texts = {"dataset_type": "text", "grain_train_files": ""}
  assert "files of text have no columns" in refusal(tmp_path, tmp_path, **texts)
