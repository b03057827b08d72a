"""The input function report: what it finds of files and token cache, without making anything."""

import gzip
import itertools
import json
import pathlib
import re
from typing import Any

import pytest
from support import TINY, configured

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.data import input_report as module
from maxbatch.data.file_datasets import Given
from maxbatch.data.input_report import InputReport, input_report, tokenize_rate
from maxbatch.data.registry import FILES, build_dataset
from maxbatch.data.sources import Document, SourceFile, Sources
from maxbatch.data.tokenize import Recipe
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.modes.compile_only import input_function

LINE = b'{"text": "the same words again and again"}\n'


def written(path: pathlib.Path, content: bytes) -> SourceFile:
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(content)
  return SourceFile(path.name, str(path), len(content), path.stat().st_mtime_ns)


def report_of(folder: pathlib.Path, *keys: str, hosts: int = 1, build: bool = False) -> InputReport:
  """The report of a small run on 8 devices, with a token cache in the folder."""
  sizes = [f"{key}={value}" for key, value in TINY.items()]
  config = configured(*sizes, f"dataset_cache_directory={folder / 'cache'}", *keys)
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  if build:
    build_dataset(config.data, plan.max_target_length)
  return input_report(config.data, plan, hosts)


def test_a_cold_cache_is_named_with_its_bytes_and_a_warm_one_with_its_tokens(tmp_path):
  written(tmp_path / "a" / "words.jsonl", 30_000 * LINE)
  keys = ["dataset_type=grain", f"grain_train_files={tmp_path / 'a'}"]
  cold = report_of(tmp_path, *keys)
  (source,) = cold.sources
  assert (source.format, source.num_files, source.size_bytes) == ("jsonl", 1, 30_000 * len(LINE))
  assert (source.cold_bytes, source.num_tokens) == (30_000 * len(LINE), 0)
  assert source.rate is not None
  assert cold.headline == "1 file, 1.29 MB, 1.29 MB to tokenize first"
  assert re.match(
    r"the token cache is cold: 1\.29 MB are tokenized before the first step, about \d+ s on 1 core",
    cold.missing[0],
  )
  assert not (tmp_path / "cache").exists()
  warm = report_of(tmp_path, *keys, build=True)
  # Of a single file, a part is held out.
  assert (warm.sources[0].cold_bytes, warm.sources[0].num_documents) == (0, 28_500)
  assert (warm.headline, warm.missing) == ("1 file, 1.29 MB, tokenized already", ())
  assert json.loads(json.dumps(warm.as_dict()))["sources"][0]["num_tokens"] == 28_500 * 32


def test_a_compressed_file_that_cannot_be_divided_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(module, "SHARD_BYTES", 40)
  written(tmp_path / "a.jsonl.gz", gzip.compress(100 * LINE, mtime=0))
  keys = ["dataset_type=grain", f"grain_train_files={tmp_path / 'a.jsonl.gz'}"]
  (one,) = [line for line in report_of(tmp_path, *keys).missing if "a.jsonl.gz" in line]
  assert one.startswith("no part of a.jsonl.gz (")
  assert one.endswith(" can be read alone, so that one process tokenizes it while others wait; for "
                      "example 3 files of 40 bytes")  # fmt: skip
  assert not report_of(tmp_path, *keys, build=True).missing
  plain = ["dataset_type=grain", f"grain_train_files={tmp_path / 'a.jsonl'}"]
  written(tmp_path / "a.jsonl", 100 * LINE)
  assert not any("read alone" in line for line in report_of(tmp_path, *plain).missing)


def test_who_loads_and_too_few_shards_for_them(tmp_path):
  written(tmp_path / "a.txt", 100 * LINE)
  keys = [f"dataset_path={tmp_path / 'a.txt'}", "batch_size=32"]
  all_hosts = report_of(tmp_path, *keys, hosts=4, build=True)
  assert all_hosts.missing == (
    "fewer shards (1) than loading hosts (4), so that hosts read the same file; for example "
    "loading_hosts=[0]",
  )
  assert "loads: hosts 0 to 3, 8 rows per step each" in all_hosts.lines()
  one = report_of(tmp_path, *keys, "expansion_factor_real_data=4", hosts=4)
  assert not one.missing
  assert "loads: host 0, 32 rows per step" in one.lines()
  assert "loads: hosts 1 to 3, nothing" in one.lines()
  assert "a load is 128 samples of all hosts together" in one.lines()
  (half,) = report_of(tmp_path, *keys, "expansion_factor_real_data=2", hosts=4).missing
  example = half.partition("for example ")[2].split()
  assert not report_of(tmp_path, *keys, "expansion_factor_real_data=2", *example, hosts=4).missing


def test_each_source_of_a_mixture_has_a_line(tmp_path):
  for name in ("code", "texts"):
    written(tmp_path / name / "a.txt", 50 * LINE)
  paths = [str(tmp_path / name) for name in ("texts", "code")]
  report = report_of(tmp_path, f"dataset_mixture=[[{paths[0]}, 0.7], [{paths[1]}, 0.3]]")
  assert [(one.name, one.path) for one in report.sources] == list(
    zip(("texts", "code"), paths, strict=True)
  )
  assert report.headline.startswith("2 files, 4.3 kB")


@pytest.mark.parametrize(
  "keys", [["dataset_type=synthetic"], ["dataset_type=hf", "hf_path=a/name"]]
)
def test_what_has_no_files_here_is_not_looked_up(tmp_path, keys):
  report = report_of(tmp_path, *keys)
  assert report.sources == ()
  assert "its files, if any, are not known beforehand" in report.headline


def test_what_is_in_an_object_store_is_not_read_for_the_report(tmp_path, monkeypatch):
  url = "s3://bucket/a.txt"
  file = SourceFile("a.txt", url, 10**9, 0)
  given = Given(Sources("dataset_path", url, "file", (file,)), None, "eval_dataset_path")
  monkeypatch.setitem(FILES, "text", lambda _: given)
  report = report_of(tmp_path, "eval_fraction=0")
  assert report.sources[0].rate is None
  assert report.missing == ("the token cache is cold: 1 GB are tokenized before the first step",)


def test_the_rate_of_tokenizing_is_that_of_the_time_it_took(tmp_path):
  files = [written(tmp_path / f"{n}.txt", b"word" * 250) for n in range(9)]
  recipe = Recipe(Sources("dataset_path", "", "glob", ()), ByteTokenizer())
  clock: Any = itertools.count().__next__  # A second passes with every look at it.
  documents = [Document(file) for file in files]
  rate = tokenize_rate(recipe, documents, 5.5, clock)
  # Each text is written as its begin, itself and its end: the time is over in the second text.
  assert rate.tokens_per_second == pytest.approx((1002 + 1 + 1000 + 1) / 7, abs=0.01)
  assert rate.text_bytes_per_second == pytest.approx(rate.tokens_per_second * 2000 / 2004)
  everything = tokenize_rate(recipe, documents, 1000, clock)
  assert everything.tokens_per_second == pytest.approx(9 * 1002 / 28)


def test_data_that_are_not_here_do_not_keep_a_step_from_being_compiled(capsys):
  config = configured("dataset_path=/absent")
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  assert input_function(config, plan, 1) is None
  said = capsys.readouterr().out
  assert said.startswith("The run's data are not looked at: dataset_path=/absent: no such file")
