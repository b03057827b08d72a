"""Rows against a slow reference: windows, padding, weights, segments, positions."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import base
from token_caches import written_cache

from maxbatch.data.document_rows import TokenWindows
from maxbatch.data.mixture import JoinedRows
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import WHOLE, Dataset, FirstRows, RowPart, part_of_rows
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.errors import UserError

BOS, EOS, PAD = ByteTokenizer.bos_id, ByteTokenizer.eos_id, ByteTokenizer.pad_id


def windows(
  path: Path, tokens: list[int], length: int, packing: bool, shards: int = 1
) -> TokenWindows:
  starts = [place for place, token in enumerate(tokens) if token == BOS]
  return TokenWindows(
    written_cache(path, tokens, starts=starts, shards=shards), length, packing, PAD
  )


def slow_row(tokens: list[int], index: int, length: int, packing: bool) -> dict[str, list]:
  """One row, token by token."""
  row: dict[str, list] = {
    name: [] for name in ("inputs", "targets", "weights", "segment_ids", "positions")
  }
  segment, position = 0, 0
  for column in range(length):
    place = index * length + column
    here = tokens[place] if place < len(tokens) else PAD
    there = tokens[place + 1] if place + 1 < len(tokens) else PAD
    if here == BOS or column == 0:
      segment, position = segment + 1, 0
    row["inputs"].append(here)
    row["targets"].append(there)
    row["weights"].append(float(there != PAD and not (packing and there == BOS)))
    row["segment_ids"].append(0 if here == PAD else segment)
    row["positions"].append(0 if here == PAD else position)
    position += 1
  return row


documents = st.lists(st.binary(max_size=9), min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
  documents,
  st.integers(1, 12),
  st.booleans(),
  st.integers(1, 5),
  st.randoms(use_true_random=False),
)
def test_rows_equal_the_slow_reference(tmp_path, texts, length, packing, shards, random):
  tokens = [token for text in texts for token in (BOS, *text, EOS)]
  source = windows(tmp_path / "a.tokens", tokens, length, packing, shards)
  indices = [random.randrange(len(source)) for _ in range(5)]
  rows = source.rows(np.array(indices))
  names = {"inputs", "targets", "weights"} | ({"segment_ids", "positions"} if packing else set())
  assert set(rows) == names
  for place, index in enumerate(indices):
    reference = slow_row(tokens, index, length, packing)
    for name in names:
      assert rows[name][place].tolist() == reference[name], name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_parts_of_rows_are_those_of_whole_rows(tmp_path, texts, ways, each, packing, shards):
  """Of all rows, the last one of which is padded, also where others are put before them."""
  tokens = [token for text in texts for token in (BOS, *text, EOS)]
  source = windows(tmp_path / "a.tokens", tokens, ways * each, packing, shards)
  indices, joined = np.arange(len(source)), JoinedRows((FirstRows(source, 2), source))
  rows, skipped = source.rows(indices), len(FirstRows(source, 2))
  for first in range(ways):
    for end in range(first + 1, ways + 1):
      part = RowPart(first, end, ways)
      for found in (
        source.part_of_rows(indices, part),
        joined.part_of_rows(indices + skipped, part),
      ):
        assert set(found) == set(rows)
        for name, array in found.items():
          wanted = rows[name][:, first * each : end * each]
          assert array.flags.c_contiguous
          assert array.dtype == wanted.dtype
          np.testing.assert_array_equal(array, wanted, err_msg=f"{name} {part}")


def test_a_part_of_a_row_is_read_alone(tmp_path, monkeypatch):
  """An eighth of a row's tokens, and as many targets; of a source that has no parts, all of it."""
  source, read = windows(tmp_path / "a.tokens", list(range(64)), 64, packing=True), []
  copied = type(source.cache).copy_tokens

  def counted(cache, starts, lengths, *others):
    read.append(int(lengths.sum()))
    copied(cache, starts, lengths, *others)

  monkeypatch.setattr(type(source.cache), "copy_tokens", counted)
  part = RowPart(3, 4, 8)
  part_of_rows(source, np.array([0]), part)
  part_of_rows(source, np.array([0]), WHOLE)
  assert read == [8, 8, 64, 63]
  made = synthetic(seed=3).train
  half = part_of_rows(made, np.array([5]), RowPart(1, 2, 2))
  np.testing.assert_array_equal(half["inputs"], made.rows(np.array([5]))["inputs"][:, 8:])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 60), st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_exactly_once(tmp_path, count, length):
  source = windows(tmp_path / "a.tokens", list(range(count)), length, packing=False)
  rows = source.rows(np.arange(len(source)))
  counted = rows["targets"][rows["weights"] == 1]
  assert counted.tolist() == list(range(1, count))


def test_the_last_window_is_padded_not_dropped(tmp_path):
  tokens = [BOS, 10, 11, 12, 13, EOS]
  source = windows(tmp_path / "a.tokens", tokens, 4, packing=True)
  assert len(source) == 2
  rows = source.rows(np.array([1]))
  assert rows["inputs"].tolist() == [[13, EOS, PAD, PAD]]
  assert rows["targets"].tolist() == [[EOS, PAD, PAD, PAD]]
  assert rows["weights"].tolist() == [[1, 0, 0, 0]]
  assert rows["segment_ids"].tolist() == [[1, 1, 0, 0]]
  assert rows["positions"].tolist() == [[0, 1, 0, 0]]


def test_dtypes_and_fresh_memory(tmp_path):
  source = windows(tmp_path / "a.tokens", [BOS, 1, 2, 3, EOS], 2, packing=True)
  first, second = source.rows(np.array([0])), source.rows(np.array([0]))
  for name, array in first.items():
    assert array.dtype == (np.float32 if name == "weights" else np.int32)
    assert not np.shares_memory(array, second[name])


SYNTHETIC = dataclasses.replace(base().data, dataset_type="synthetic", dataset_path="")


def synthetic(seed: int) -> Dataset:
  return build_dataset(dataclasses.replace(SYNTHETIC, data_shuffle_seed=seed), 16)


def test_synthetic_rows_are_a_pure_function_of_seed_and_index():
  source = synthetic(seed=3).train
  many = source.rows(np.array([5, 2**31 - 2, 5, 0]))
  for name, array in many.items():
    assert array.shape == (4, 16)
    np.testing.assert_array_equal(array[0], array[2])
    np.testing.assert_array_equal(array[1], source.rows(np.array([2**31 - 2]))[name][0])
  assert (many["inputs"][0] != many["inputs"][3]).any()
  np.testing.assert_array_equal(many["inputs"][0, 1:], many["targets"][0, :-1])
  assert many["inputs"].max() < BOS
  assert (many["weights"] == 1).all()
  other = synthetic(seed=4)
  assert (other.train.rows(np.array([5]))["inputs"] != many["inputs"][:1]).any()


def test_synthetic_data_without_validation():
  data = dataclasses.replace(SYNTHETIC, eval_fraction=0.0)
  assert build_dataset(data, 16).validation is None


def test_synthetic_validation_is_other_rows_and_ends():
  dataset = synthetic(seed=3)
  assert dataset.validation is not None
  assert len(dataset.validation) == 256
  first = np.array([0])
  assert (dataset.validation.rows(first)["inputs"] != dataset.train.rows(first)["inputs"]).any()


def test_an_unknown_dataset_is_refused_with_the_nearest_name():
  data = dataclasses.replace(SYNTHETIC, dataset_type="syntetic")
  with pytest.raises(UserError) as caught:
    build_dataset(data, 16)
  assert str(caught.value) == (
    "dataset_type=syntetic: there is no such dataset_type. Did you mean synthetic? "
    "Known: text, grain, hf, synthetic."
  )
