"""The keys that say how documents become rows, from text files to what a row holds."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support import base

from maxbatch.data.document_rows import PackedRows, TokenWindows
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Dataset
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.errors import UserError

BOS, EOS, PAD = ByteTokenizer.bos_id, ByteTokenizer.eos_id, ByteTokenizer.pad_id
TEXTS = [b"ab", b"cdefghi", b"j", b"klmn", b"o"]


@pytest.fixture
def texts(tmp_path) -> Path:
  folder = tmp_path / "texts"
  folder.mkdir()
  for number, text in enumerate(TEXTS):
    (folder / f"{number}.txt").write_bytes(text)
  return folder


def build(texts: Path, length: int = 6, **keys: object) -> Dataset:
  changes = {
    "dataset_path": str(texts),
    "eval_fraction": 0.0,
    "dataset_cache_directory": str(texts.parent / "cache"),
  }
  return build_dataset(dataclasses.replace(base().data, **(changes | keys)), length)


def rows_of(dataset: Dataset) -> list[dict[str, np.ndarray]]:
  """Every row, by its fields."""
  rows = dataset.train.rows(np.arange(len(dataset.train)))
  return [{name: array[i] for name, array in rows.items()} for i in range(len(dataset.train))]


def documents_of(row: dict[str, np.ndarray]) -> list[bytes]:
  """The pieces in a row, as text with < and > for their begin and end."""
  results = []
  for segment in range(1, row["segment_ids"].max() + 1):
    here = row["segment_ids"] == segment
    tokens = [*row["inputs"][here], row["targets"][here][-1]]
    results.append(bytes(b"<>"[t - BOS] if t >= BOS else int(t) for t in tokens))
  return results


def test_best_fit_keeps_documents_whole_and_says_what_is_padded(texts):
  dataset = build(texts, grain_packing_type="best_fit")
  rows = [documents_of(row) for row in rows_of(dataset)]
  assert sorted(piece for row in rows for piece in row) == sorted(
    [b"<ab>", b"<cdefgh", b"hi>", b"<j>", b"<klmn>", b"<o>"]
  )
  assert "training: 4 rows: best fit, 16.67% padding; 1 of 5 documents are longer" in (
    dataset.description
  )


def test_one_document_a_row_and_nothing_says_which(texts):
  dataset = build(texts, packing=False)
  rows = rows_of(dataset)
  assert set(rows[0]) == {"inputs", "targets", "weights"}
  inputs = [bytes(int(t) for t in row["inputs"] if t < BOS) for row in rows]
  assert inputs == [b"ab", b"cdefg", b"hi", b"j", b"klmn", b"o"]
  assert rows[0]["targets"].tolist() == [*b"ab", EOS, PAD, PAD, PAD]
  assert rows[0]["weights"].tolist() == [1, 1, 1, 0, 0, 0]


def test_truncation_keeps_the_beginning(texts):
  dataset = build(texts, packing=False, use_truncation=True)
  assert len(dataset.train) == 5
  assert "1 of 5 documents are longer than a row and cut, with 10.00% of the" in dataset.description


@pytest.mark.parametrize(
  ("keys", "kind", "fields"),
  [
    ({}, TokenWindows, {"segment_ids", "positions"}),
    ({"block_cross_document_attention": False}, TokenWindows, set()),
    ({"grain_packing_type": "first_fit"}, PackedRows, {"segment_ids", "positions"}),
    ({"grain_packing_type": "first_fit", "block_cross_document_attention": False}, PackedRows, ()),
    ({"packing": False}, PackedRows, set()),
    # As in MaxText, how to pack does not matter where nothing is packed.
    ({"packing": False, "grain_packing_type": "best_fit"}, PackedRows, set()),
  ],
)
def test_which_rows_the_keys_mean(texts, keys, kind, fields):
  dataset = build(texts, **keys)
  assert isinstance(dataset.train, kind)
  assert set(rows_of(dataset)[0]) == {"inputs", "targets", "weights", *fields}


def test_other_rows_of_the_same_text_are_another_dataset(texts):
  """A resume compares fingerprints; that of the default is the text's alone, as it always was."""
  keys = [
    {},
    {"block_cross_document_attention": False},
    {"packing": False},
    {"packing": False, "use_truncation": True},
    {"grain_packing_type": "best_fit"},
    {"grain_packing_type": "best_fit", "use_truncation": True},
    {"grain_packing_type": "first_fit"},
    {"grain_packing_type": "first_fit", "block_cross_document_attention": False},
  ]
  fingerprints = [build(texts, **each).fingerprint for each in keys]
  assert len(set(fingerprints)) == len(keys)
  assert all(each.startswith(fingerprints[0]) for each in fingerprints)


def test_concatenated_documents_cannot_be_truncated(texts):
  with pytest.raises(UserError, match="use_truncation=true: grain_packing_type=concat_then_split"):
    build(texts, use_truncation=True)


def test_text_shorter_than_a_row_is_no_problem_where_rows_are_padded(texts):
  assert len(build(texts, length=1000, grain_packing_type="best_fit").train) == 1
  assert len(build(texts, length=1000, packing=False).train) == 5
  with pytest.raises(UserError, match="too short"):
    build(texts, length=1000)
