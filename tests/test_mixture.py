"""Mixtures: each source in exact shares and epochs of its own, and what the keys may say."""

import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from support import base, configured

from maxbatch.config.load import without_effect
from maxbatch.config.schema import DataConfig
from maxbatch.data.input_report import given_files
from maxbatch.data.mixed import mixed_paths, source_names
from maxbatch.data.mixture import (
  JoinedRows,
  MixedRows,
  Mixture,
  MixturePhase,
  MixtureStream,
  SampleStream,
  sample_stream,
  source_seed,
)
from maxbatch.data.reading import ReadOrder
from maxbatch.data.registry import build_dataset, check_epochs
from maxbatch.data.rows import Arrays, Dataset
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class Numbered:
  """Row i of source s holds s and i."""

  source: int
  num_rows: int

  def __len__(self) -> int:
    return self.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    inputs = np.stack([np.full(len(indices), self.source), indices], axis=1).astype(np.int32)
    return {"inputs": inputs, "targets": inputs, "weights": np.ones_like(inputs, np.float32)}


def mixed(lengths: list[int], phases: list[tuple[int, tuple[int, ...]]]) -> MixedRows:
  names = tuple("abcdefgh"[: len(lengths)])
  mixture = Mixture(names, tuple(MixturePhase(*phase) for phase in phases))
  return MixedRows(tuple(Numbered(i, n) for i, n in enumerate(lengths)), mixture)


def read(rows: MixedRows, samples: np.ndarray, seed: int = 3) -> list[tuple[int, int]]:
  """Source and row of each sample."""
  inputs = ReadOrder(rows, seed)(samples)["inputs"]
  return [(int(source), int(row)) for source, row in inputs]


def slow(rows: MixedRows, count: int, seed: int = 3) -> list[tuple[int, int]]:
  """The first samples one after the other: each source's own stream, as far as it has come."""
  sources, _ = rows.mixture(np.arange(count))
  streams = [SampleStream(len(each), source_seed(seed, i)) for i, each in enumerate(rows.sources)]
  given, result = [0] * len(streams), []
  for source in sources.tolist():
    result.append((source, int(streams[source](np.array([given[source]]))[0])))
    given[source] += 1
  return result


THREE = [(0, (7, 3, 0)), (41, (1, 1, 1)), (100, (0, 1, 5))]


def test_each_source_goes_on_where_it_stands_when_weights_change():
  rows = mixed([11, 5, 20], THREE)
  assert read(rows, np.arange(300)) == slow(rows, 300)


def test_each_phase_is_exact_by_itself():
  rows = mixed([11, 5, 20], THREE)
  sources, _ = rows.mixture(np.arange(300))
  for (first, weights), end in zip(THREE, (41, 100, 300), strict=True):
    given = np.zeros(3)
    for sample in range(first, end):
      wanted = (sample - first) * np.array(weights) / sum(weights)
      assert (np.abs(given - wanted) < 1).all()
      given[sources[sample]] += 1
  for count in (0, 1, 40, 41, 42, 99, 100, 101, 300):
    assert rows.mixture.counts(count) == np.bincount(sources[:count], minlength=3).tolist()


def test_each_source_is_read_in_epochs_of_its_own_each_in_another_order():
  rows = mixed([10, 4], [(0, (1, 1))])
  result = read(rows, np.arange(80))
  for source, length in ((0, 10), (1, 4)):
    epochs = np.array([row for s, row in result if s == source]).reshape(-1, length)
    assert (np.sort(epochs) == np.arange(length)).all()
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_sources_of_equal_length_have_orders_of_their_own():
  result = read(mixed([50, 50], [(0, (1, 1))]), np.arange(100))
  first, second = ([row for s, row in result if s == source] for source in (0, 1))
  assert first != second


def test_one_source_alone_is_a_plain_dataset():
  samples = np.arange(100)
  result = read(mixed([37], [(0, (5,))]), samples)
  assert [row for _, row in result] == SampleStream(37, 3)(samples).tolist()


def test_the_stream_is_pinned():
  # Another stream must come with another VERSION.
  stream = MixtureStream(mixed([10, 6], [(0, (2, 1))]), 0)
  assert stream(np.arange(12)).tolist() == [1, 2, 11, 4, 5, 15, 9, 7, 10, 8, 6, 14]


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 10**12), max_size=6))
def test_any_sample_can_be_read_first(samples):
  rows = mixed([11, 5, 20], THREE)
  together = read(rows, np.array(samples, np.int64))
  for sample, result in reversed(list(zip(samples, together, strict=True))):
    assert read(mixed([11, 5, 20], THREE), np.array([sample])) == [result]


def test_what_is_read_does_not_depend_on_what_was_sent_to_a_worker():
  rows = mixed([11, 5, 20], THREE)
  order = ReadOrder(rows, 3)
  before = order(np.arange(50))["inputs"]
  sent = cloudpickle.loads(cloudpickle.dumps(order))
  np.testing.assert_array_equal(sent(np.arange(50))["inputs"], before)


def test_rows_of_several_sources_keep_their_places():
  joined = JoinedRows((Numbered(0, 3), Numbered(1, 2)))
  assert len(joined) == 5
  result = joined.rows(np.array([4, 0, 3, 3, 2]))["inputs"].tolist()
  assert result == [[1, 1], [0, 0], [1, 0], [1, 0], [0, 2]]
  assert joined.rows(np.array([], np.int64))["inputs"].shape == (0, 2)


def test_a_source_that_is_no_mixture_has_the_plain_stream():
  assert isinstance(sample_stream(Numbered(0, 5), 3), SampleStream)


def test_the_report_counts_samples_and_epochs():
  assert mixed([10, 4], [(0, (3, 1))]).report(16) == (
    "Samples by source: a 12 (75.00%, 1.20 epochs), b 4 (25.00%, 1.00 epochs)"
  )


# --- keys ------------------------------------------------------------------------------------------


def keys(*arguments: str) -> DataConfig:
  return configured(*arguments).data


def refused(*arguments: str) -> str:
  with pytest.raises(UserError) as caught:
    mixed_paths(keys(*arguments))
  return str(caught.value)


def phases(*arguments: str) -> list[tuple[int, tuple[int, ...]]]:
  result = mixed_paths(keys(*arguments))
  assert result is not None
  return [(phase.first_sample, phase.weights) for phase in result.mixture.phases]


def test_maxtexts_globs_with_weights():
  result = mixed_paths(keys("dataset_type=grain", "grain_train_files=w/*.jsonl,0.7;c/*.jsonl, 0.3"))
  assert result is not None
  assert (result.paths, result.mixture.names) == (("w/*.jsonl", "c/*.jsonl"), ("w", "c"))
  assert result.mixture.phases[0].weights == (7, 3)
  # Files of text may be called so.
  assert mixed_paths(keys("dataset_path=a,1;b,2")) is None


@pytest.mark.parametrize("files", ["a;b", "a,1;b", "a,1;,2", "a,1;b,x", "a,1;b,-1", "a,1;"])
def test_globs_without_weights_are_refused(files):
  message = refused("dataset_type=grain", f"grain_train_files={files}")
  assert message.startswith(f"grain_train_files={files}: ")
  assert "must be a path, a comma and a weight" in message


def test_without_keys_there_is_no_mixture():
  assert mixed_paths(base().data) is None


def test_weights_are_exact_whatever_they_add_up_to():
  assert phases("dataset_mixture=[[a, 0.7], [b, 0.3]]") == [(0, (7, 3))]
  assert phases("dataset_mixture=[[a, 1/3], [b, 1/6]]") == [(0, (2, 1))]
  assert phases("dataset_mixture=[[a, 1400], [b, 600]]") == [(0, (7, 3))]


def test_a_schedule_has_a_sample_and_a_weight_for_each_source():
  mixture = "dataset_mixture=[[a, 0.7], [b, 0.3]]"
  schedule = "mixture_schedule=[[1000, 0.5, 0.5], [20000, 0, 1]]"
  assert phases(mixture, schedule) == [(0, (7, 3)), (1000, (1, 1)), (20000, (0, 1))]
  # A source may begin later.
  assert phases("dataset_mixture=[[a, 1], [b, 0]]", "mixture_schedule=[[9, 1, 1]]")[0] == (
    0,
    (1, 0),
  )


def test_maxtexts_file(tmp_path):
  path = tmp_path / "mixture.json"
  path.write_text(
    '{"web": {"path": "w/*.txt", "weight": 0.7}, "code": {"path": "c", "weight": 3e-1}}'
  )
  result = mixed_paths(keys(f"grain_train_mixture_config_path={path}"))
  assert result is not None
  assert (result.paths, result.mixture.names) == (("w/*.txt", "c"), ("web", "code"))
  assert result.mixture.phases[0].shares == (Fraction(7, 10), Fraction(3, 10))


@pytest.mark.parametrize(
  ("paths", "names"),
  [
    (["/data/texts", "/data/code/*.py"], ("texts", "code")),
    (["a/train.jsonl.gz", "b/train.jsonl.gz"], ("a_train", "b_train")),
    (["s3://bucket/web/**/*.parquet", "stdlib"], ("web", "stdlib")),
    (["x/*.txt", "x/*.md"], ("x_1", "x_2")),
    (["*.txt"], (".txt",)),
    ([".hidden"], (".hidden",)),
    (["my texts", "übung"], ("my_texts", "übung")),
  ],
)
def test_short_names_for_paths(paths, names):
  assert source_names(paths) == names


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      ["mixture_schedule=[[10, 1, 1]]"],
      "mixture_schedule=[[10, 1, 1]] changes the weights of a mixture, but there is none; for "
      "example dataset_mixture=[[texts, 0.7], [code, 0.3]], or mixture_schedule=[]",
    ),
    (
      ["dataset_mixture=[[a, 0], [b, 0]]"],
      "dataset_mixture: all weights are 0; at least one source needs a weight above 0",
    ),
    (["dataset_mixture=[[a, 1], [b, 0]]"], "the weight of b is always 0; leave it out"),
    (
      ["dataset_mixture=[[a, 1], [a, 2]]"],
      "dataset_mixture: a is given twice; give it once, with the sum of the weights",
    ),
    (["dataset_mixture=[[a, 1], [./b/../a/, 2]]"], "dataset_mixture: ./b/../a/ is given twice"),
    (["dataset_mixture=[[s3://b/a, 1], [s3://b/a/, 2]]"], "s3://b/a/ is given twice"),
    (
      ["dataset_mixture=[[a, 1], [b, 1e-9]]"],
      "the share of b is 1e-09 of the samples, and must be at least 1/1,048,576",
    ),
    (
      ["dataset_mixture=[[a, 0.1234567890123], [b, 0.8765432109876]]"],
      "must be at most 1,099,511,627,776 together; give weights of fewer digits",
    ),
    (
      ["dataset_mixture=[[a, 1]]", "dataset_path=texts"],
      "dataset_mixture takes the place of dataset_path=texts, which would not be read; set "
      "dataset_path=stdlib, or make it one of the mixture's sources",
    ),
    (
      ["dataset_mixture=[[a, 1], [b, 1]]", "mixture_schedule=[[10, 1]]"],
      "mixture_schedule: [10, 1] must be a sample and 2 weights (a's b's); for example [10, 1, 1]",
    ),
    (
      ["dataset_mixture=[[a, 1], [b, 1]]", "mixture_schedule=[[9, 1, 2], [9, 2, 1]]"],
      "mixture_schedule: [9, 2, 1] must begin at a whole sample after 9, where the weights before "
      "it begin; for example [10009, 2, 1]",
    ),
    (
      ["dataset_mixture=[[a, 1], [b, 1]]", "mixture_schedule=[[0.5, 1, 2]]"],
      "must begin at a whole sample after 0",
    ),
    (
      ["dataset_mixture=[[a, 1], [b, 1]]", "mixture_schedule=[[5, 0, 0]]"],
      "mixture_schedule: [5, 0, 0]: all weights are 0",
    ),
    (
      ["dataset_type=grain", "dataset_mixture=[[a, 1]]", "grain_train_files=texts"],
      "takes the place of grain_train_files=texts, which would not be read; set "
      'grain_train_files="", or make it one',
    ),
    (
      ["dataset_type=hf", "dataset_mixture=[[a, 1]]", "hf_path=texts"],
      'takes the place of hf_path=texts, which would not be read; set hf_path=""',
    ),
    (
      ["grain_train_mixture_config_path=/absent.json"],
      "cannot be read: No such file or directory; give a JSON file that is on this machine, for "
      'example {"texts": {"path": "texts", "weight": 0.7}',
    ),
    (
      ["grain_train_mixture_config_path=x.json", "dataset_mixture=[[a, 1]]"],
      "one of them; for example dataset_mixture=[]",
    ),
  ],
)
def test_what_is_refused(tmp_path, monkeypatch, arguments, message):
  monkeypatch.chdir(tmp_path)
  Path("x.json").write_text('{"a": {"path": "a", "weight": 1}}')
  assert message in refused(*arguments)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("{", "is not JSON"),
    ("[]", "must hold an object with a source for each name"),
    ("{}", "must hold an object with a source for each name"),
    ('{"a": 1}', "a must be an object with path, a text, and weight, a number of at least 0"),
    ('{"a": {"path": "a"}}', "a must be an object"),
    ('{"a": {"path": "a", "weight": -1}}', "a must be an object"),
    ('{"a": {"path": "a", "weight": true}}', "a must be an object"),
    ('{"a": {"path": "a", "weight": 1, "columns": 2}}', "and nothing else"),
    (
      '{"a": {"path": "a", "weight": 1e999999999}}',
      "is not JSON (1e999999999 is too large or too long",
    ),
    (
      '{"a": {"path": "a", "weight": 1}, "a": {"path": "b", "weight": 1}}',
      "not JSON (a is there twi",
    ),
    ("[" * 100_000, "is not JSON (maximum recursion depth"),
    ('{"": {"path": "a", "weight": 1}}', "'' cannot be shown in logs and metrics"),
    ('{"a\\nb": {"path": "a", "weight": 1}}', "'a\\nb' cannot be shown in logs and metrics"),
  ],
)
def test_files_that_hold_no_mixture(tmp_path, content, message):
  path = tmp_path / "mixture.json"
  path.write_text(content)
  text = refused(f"grain_train_mixture_config_path={path}")
  assert text.startswith(f"grain_train_mixture_config_path={path}")
  assert message in text


# --- the dataset -----------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
  """Two folders of text, in the working directory."""
  for name, letter, count in (("low", "a", 90), ("high", "A", 40)):
    folder = tmp_path / name
    folder.mkdir()
    for number in range(4):
      (folder / f"{number}.txt").write_text(letter * count + str(number))
  monkeypatch.chdir(tmp_path)
  return tmp_path


def build(*arguments: str) -> Dataset:
  given = ["dataset_cache_directory=cache", "eval_fraction=0.3", *arguments]
  return build_dataset(configured(*given).data, 8)


MIXTURE = "dataset_mixture=[[low, 0.75], [high, 0.25]]"


def test_a_mixture_of_two_folders(texts):
  dataset = build(MIXTURE)
  assert isinstance(dataset.train, MixedRows)
  inputs = ReadOrder(dataset.train, 0)(np.arange(200))["inputs"]
  high = [bool(np.isin(row, np.frombuffer(b"A", np.uint8)).any()) for row in inputs]
  assert sum(high) == 50
  lines = dataset.description.splitlines()
  assert lines[0] == (
    f"mixture: 75% low ({len(dataset.train.sources[0]):,} rows), "
    f"25% high ({len(dataset.train.sources[1]):,} rows)"
  )
  assert lines[1].startswith("low: low: ")
  assert any(line.startswith("high: high: ") for line in lines)
  assert {name.partition(": ")[0] for name in dataset.train_files} == {"low", "high"}


def test_validation_is_by_source_and_its_shares_are_those_of_the_last_phase(texts):
  dataset = build(MIXTURE, "mixture_schedule=[[100, 1, 4]]")
  assert [(part.name, part.share) for part in dataset.validation_by_source] == [
    ("low", 0.2),
    ("high", 0.8),
  ]
  low = dataset.validation_by_source[0].rows
  assert (low.rows(np.arange(len(low)))["inputs"] == ord("a")).any()
  assert dataset.validation is not None
  assert len(dataset.validation) == sum(len(part.rows) for part in dataset.validation_by_source)


def test_one_validation_set_for_all_is_no_part_of_the_sources(texts):
  (texts / "held.txt").write_text("held out" * 9)
  dataset = build(MIXTURE, "eval_dataset_path=held.txt")
  assert dataset.validation_by_source == ()
  assert dataset.validation is not None
  assert not isinstance(dataset.validation, JoinedRows)


def test_without_validation(texts):
  dataset = build(MIXTURE, "eval_fraction=0")
  assert (dataset.validation, dataset.validation_by_source) == (None, ())


@pytest.mark.parametrize(
  "other",
  [
    ["dataset_mixture=[[low, 0.76], [high, 0.24]]"],
    ["dataset_mixture=[[high, 0.25], [low, 0.75]]"],
    [MIXTURE, "mixture_schedule=[[100, 1, 1]]"],
    [MIXTURE, "grain_packing_type=best_fit"],
    ["dataset_path=low"],
  ],
)
def test_another_mixture_is_another_dataset(texts, other):
  assert build(*other).fingerprint != build(MIXTURE).fingerprint


def test_the_same_mixture_however_it_is_written_is_the_same_dataset(texts):
  (texts / "m.json").write_text(
    json.dumps({"x": {"path": "low", "weight": 3}, "y": {"path": "high", "weight": 1}})
  )
  result = build("grain_train_mixture_config_path=m.json")
  assert result.fingerprint == build(MIXTURE).fingerprint
  assert [part.name for part in result.validation_by_source] == ["x", "y"]


def test_a_source_that_cannot_be_used_is_named(texts):
  with pytest.raises(UserError) as caught:
    build("dataset_mixture=[[low, 1], [absent, 1]]")
  assert str(caught.value).startswith(
    "dataset_mixture, source absent: dataset_path=absent: no such file"
  )
  # So it is where only its files are looked at.
  with pytest.raises(UserError, match="source absent: dataset_path=absent: no such"):
    list(given_files(keys("dataset_mixture=[[low, 1], [absent, 1]]")))


def test_sources_are_files_of_any_dataset_type(texts):
  for name in ("low", "high"):
    lines = [json.dumps({"text": f"{name} {n}" * 5}) for n in range(20)]
    (texts / f"{name}.jsonl").write_text("\n".join(lines))
  of_files = build("dataset_type=grain", "dataset_mixture=[[low.jsonl, 3], [high.jsonl, 1]]")
  of_globs = build("dataset_type=grain", "grain_train_files=low.jsonl,3;high.jsonl,1")
  assert of_files.fingerprint == of_globs.fingerprint
  assert [part.name for part in of_files.validation_by_source] == ["low", "high"]
  assert len(of_files.train) > 100
  given = "grain_eval_files=low.jsonl"
  whole = build("dataset_type=grain", "dataset_mixture=[[high.jsonl, 1]]", given)
  assert whole.validation_by_source == ()


def test_num_epoch_limits_each_source():
  rows = mixed([10, 4], [(0, (3, 1))])
  check_epochs(keys("num_epoch=1"), rows, 12)
  check_epochs(keys("num_epoch=2"), rows, 26)
  with pytest.raises(UserError, match=r"takes 1\.2 epochs of a; use num_epoch=2, num_epoch=-1"):
    check_epochs(keys("num_epoch=1"), rows, 16)


def test_random_tokens_have_no_sources():
  dataset = build_dataset(configured("dataset_type=synthetic", MIXTURE).data, 8)
  assert not isinstance(dataset.train, MixedRows)
  assert without_effect(configured("dataset_type=synthetic", MIXTURE)) == [
    "Without effect: dataset_mixture=[['low', 0.75], ['high', 0.25]], with dataset_type=synthetic; there "
    "is one with dataset_type=text"
  ]
