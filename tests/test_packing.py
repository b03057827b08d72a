"""Documents as rows, against slow references: nothing lost, nothing twice, nothing seen across."""

import dataclasses
import json
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_caches import written_cache

from maxbatch.data import pack_index
from maxbatch.data.document_rows import PackedRows
from maxbatch.data.pack_index import Fit, Layout, open_or_build, pack
from maxbatch.data.rows import RowPart
from maxbatch.data.token_cache import TokenCache
from maxbatch.errors import UserError

PAD = 9999


def offsets_of(sizes: list[int]) -> np.ndarray:
  return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def cached(folder: Path, sizes: list[int], shards: int = 1) -> TokenCache:
  """Documents of so many tokens; the tokens count up from 0."""
  starts = offsets_of(sizes)
  return written_cache(
    folder / "tokens", range(starts[-1]), starts=starts[:-1].tolist(), shards=shards
  )


def built(folder: Path, sizes: list[int], layout: Layout, shards: int = 1) -> PackedRows:
  cache = cached(folder, sizes, shards)
  return PackedRows(cache, open_or_build(folder, "train", cache, layout), PAD, segmented=True)


def slow_rows(sizes: list[int], length: int, fit: Fit, truncate: bool) -> list[list[int]]:
  """Sizes of the pieces of every row, by packing one document after the other."""
  closed: list[list[int]] = []
  opened: list[list[int]] = []
  for size in sizes:
    places = min(size - 1, length) if truncate else size - 1
    closed += [[length]] * (max(places, 0) // length)
    rest = max(places, 0) % length
    if rest and fit == "alone":
      closed.append([rest])
    elif rest:
      fitting = [row for row in opened if sum(row) + rest <= length]
      if fitting:
        row = fitting[0] if fit == "first_fit" else max(fitting, key=sum)
      else:
        row = []
        if len(opened) == pack_index._OPEN_ROWS:
          fullest = max(opened, key=sum)
          closed.append(fullest)
          opened = [other for other in opened if other is not fullest]
        opened.append(row)
      row.append(rest)
  return closed + opened


sizes_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=300).filter(
  lambda sizes: max(sizes) > 1
)
fits = st.sampled_from(["first_fit", "best_fit", "alone"])


@given(sizes_of_documents, st.integers(1, 24), fits, st.booleans())
def test_rows_are_those_of_packing_one_document_after_the_other(sizes, length, fit, truncate):
  pieces = pack(offsets_of(sizes), length, fit, len(sizes), truncate=truncate)
  ends = np.cumsum(pieces.counts)
  rows = [pieces.lengths[a:b].tolist() for a, b in zip(ends - pieces.counts, ends, strict=True)]
  assert sorted(rows) == sorted(slow_rows(sizes, length, fit, truncate))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
  sizes_of_documents,
  st.integers(1, 24),
  fits,
  st.booleans(),
  st.integers(1, 50),
  st.integers(1, 3),
)
def test_every_target_once_and_only_after_its_own_document(
  tmp_path_factory, sizes, length, fit, truncate, group, shards
):
  folder = tmp_path_factory.mktemp("packed")
  with pytest.MonkeyPatch.context() as patch:
    # Several groups and chunks, as there are with millions of documents.
    patch.setattr(pack_index, "group_documents", lambda *_: min(group, max(len(sizes), 1)))
    patch.setattr(pack_index, "_CHUNK_DOCUMENTS", 2 * group)
    source = built(folder, sizes, Layout(length, fit, truncate), shards)
  rows = source.rows(np.arange(len(source)))
  document_of = np.repeat(np.arange(len(sizes)), sizes)
  targets = []
  for row in range(len(source)):
    one = {name: array[row] for name, array in rows.items()}
    real = one["weights"] == 1
    filled = int(real.sum())
    assert filled > 0
    assert real[:filled].all()
    assert (one["inputs"][filled:] == PAD).all()
    assert (one["targets"][filled:] == PAD).all()
    assert not one["segment_ids"][filled:].any()
    assert not one["positions"][filled:].any()
    inputs, segments = one["inputs"][:filled], one["segment_ids"][:filled]
    assert (one["targets"][:filled] == inputs + 1).all()
    assert (document_of[inputs] == document_of[inputs + 1]).all()
    assert segments[0] == 1
    assert (np.diff(segments) == (np.diff(inputs) != 1) | (one["positions"][1:filled] == 0)).all()
    for segment in np.unique(segments):
      assert len(set(document_of[inputs[segments == segment]])) == 1
      positions = one["positions"][:filled][segments == segment]
      assert positions.tolist() == list(range(len(positions)))
    targets += one["targets"][:filled].tolist()
  begins = offsets_of(sizes)
  kept = [min(size, length + 1) if truncate else size for size in sizes]
  wanted = [begins[i] + j for i, size in enumerate(kept) for j in range(1, size)]
  assert sorted(targets) == wanted


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes_of_documents, st.integers(1, 5), st.integers(1, 6), fits)
def test_parts_of_rows_are_those_of_whole_rows(tmp_path_factory, sizes, ways, each, fit):
  """Documents that begin before a part, in it, or go on behind it; and parts of padding alone."""
  source = built(tmp_path_factory.mktemp("packed"), sizes, Layout(ways * each, fit, False))
  indices = np.arange(len(source))
  rows = source.rows(indices)
  for first in range(ways):
    for end in {first + 1, ways}:
      part = source.part_of_rows(indices, RowPart(first, end, ways))
      assert set(part) == set(rows)
      for name, array in part.items():
        wanted = rows[name][:, first * each : end * each]
        np.testing.assert_array_equal(array, wanted, err_msg=f"{name} {first} {end}")


@pytest.mark.parametrize("fit", ["first_fit", "best_fit"])
def test_little_is_padded_and_documents_that_fit_are_whole(fit):
  sizes = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int) + 2
  pieces = pack(offsets_of(sizes.tolist()), 1024, fit, len(sizes), truncate=False)
  assert pieces.lengths.sum() == (sizes - 1).sum()
  assert (sizes - 1).sum() / (len(pieces.counts) * 1024) > 0.99
  fits_whole = sizes - 1 <= 1024
  assert np.isin(offsets_of(sizes.tolist())[:-1][fits_whole], pieces.starts).all()


def test_a_group_is_long_enough_for_the_rows_it_leaves_open():
  assert pack_index.group_documents(10**7, 10**7 * 300, 2048) == 2**14
  assert pack_index.group_documents(10**7, 10**7 * 300, 131_072) == 111_849
  assert pack_index.group_documents(100, 3000, 2048) == 100
  assert pack_index.group_documents(0, 0, 2048) == 1


def test_what_packing_came_to_is_said(tmp_path):
  sizes = [5, 3, 12, 1]
  assert str(built(tmp_path, sizes, Layout(5, "best_fit", False)).index) == (
    "4 rows: best fit, 15.00% padding; 1 of 3 documents are longer than a row and divided"
  )
  assert str(built(tmp_path, sizes, Layout(5, "alone", True)).index) == (
    "3 rows: 26.67% padding; 1 of 3 documents are longer than a row and cut, with 35.29% of the tokens"
  )
  assert str(built(tmp_path, sizes, Layout(11, "first_fit", False)).index) == (
    "2 rows: first fit, 22.73% padding"
  )


def forbid_packing(monkeypatch) -> None:
  def fail(*_):
    raise AssertionError("the index was built again")

  monkeypatch.setattr(pack_index, "pack", fail)


BEST = Layout(8, "best_fit", False)


def test_built_once_and_small_to_send_to_workers(tmp_path, monkeypatch):
  first = built(tmp_path, [4, 9, 3], BEST)
  wanted = first.rows(np.arange(len(first)))
  forbid_packing(monkeypatch)
  again = built(tmp_path, [4, 9, 3], BEST)
  assert again.index == first.index
  sent = cloudpickle.dumps(first)
  assert len(sent) < 2000
  for name, array in cloudpickle.loads(sent).rows(np.arange(len(first))).items():
    np.testing.assert_array_equal(array, wanted[name])


@pytest.mark.parametrize("change", ["length", "fit", "truncate", "documents", "tokens"])
def test_another_index_for_other_rows(tmp_path, change):
  cache = cached(tmp_path, [4, 9, 3])
  first = open_or_build(tmp_path, "train", cache, BEST)
  layouts = {"length": Layout(9, "best_fit", False), "fit": Layout(8, "first_fit", False)}
  layouts["truncate"] = Layout(8, "best_fit", True)
  changed = {"tokens": {"fingerprint": "x"}, "documents": {"documents_fingerprint": "x"}}
  shard = dataclasses.replace(cache.shards[0], **changed.get(change, {}))
  cache = dataclasses.replace(cache, shards=(shard,))
  second = open_or_build(tmp_path, "train", cache, layouts.get(change, BEST))
  assert second.path != first.path


@pytest.mark.parametrize("damage", ["cut", "flipped", "metadata", "no metadata", "no index"])
def test_a_damaged_index_is_built_again_and_says_so(tmp_path, damage, caplog):
  first = built(tmp_path, [4, 9, 3], BEST).index
  path, metadata = Path(first.path), Path(f"{first.path}.json")
  data = path.read_bytes()
  if damage == "no index":
    path.unlink()
  elif damage == "no metadata":
    metadata.unlink()
  elif damage == "metadata":
    metadata.write_text(json.dumps({"packed": {"rows": 3}}))
  else:
    path.write_bytes({"cut": data[:-2], "flipped": b"\x07" + data[1:]}[damage])
  again = built(tmp_path, [4, 9, 3], BEST).index
  assert again == first
  assert path.read_bytes() == data
  assert ("pack index" in caplog.text) == (not damage.startswith("no "))


def test_an_index_cut_under_a_run_is_an_error_not_other_rows(tmp_path):
  index = built(tmp_path, [4, 9, 3], BEST).index
  path = Path(index.path)
  path.write_bytes(path.read_bytes()[:-2])
  with pytest.raises(OSError, match="holds 58 bytes instead of 60"):
    index.pieces(np.array([0]))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"dataset_cache_directory=.*cannot write the pack index"):
    open_or_build(tmp_path / "file", "train", cached(tmp_path, [4]), BEST)
