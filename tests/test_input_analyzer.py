"""Does the data keep up: the recommendation by arithmetic, and the command on small data."""

import dataclasses
import itertools
import json
import math
import pathlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numbered_rows import NumberedRows
from support import SMALLEST, configured

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.host_loads import loading_hosts
from maxbatch.config.load import load_config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.input_report import TokenizeRate, input_report
from maxbatch.data.mixture import MixedRows
from maxbatch.data.reading import ReadOrder
from maxbatch.data.registry import build_dataset
from maxbatch.errors import UserError
from maxbatch.input_analysis import analyze
from maxbatch.input_analysis.analyze import rows_to_measure
from maxbatch.input_analysis.measure import (
  Measured,
  Setting,
  measure,
  setting_of,
  settings_to_measure,
  stages,
)
from maxbatch.input_analysis.need import from_metrics, from_report
from maxbatch.input_analysis.recommend import (
  Bounds,
  Loading,
  Slurm,
  loading_options,
  recommend,
  slurm,
)
from maxbatch.input_analyzer import main

BOUNDS = Bounds(margin=1.5, step_seconds=2.0, row_bytes=100, load_bytes=1e9)
ALL, HALF, ONE = (
  Loading(hosts, Fraction(4, hosts), 64 // hosts, 256 // hosts**2, 4 // hosts - 1)
  for hosts in (4, 2, 1)
)
"""Of four hosts and steps of 64 samples: one host needs 8, two 16 and all four 32 samples a second."""


def read(speed: float, *setting: int, slowest: float = 0.1) -> Measured:
  return Measured(Setting(*setting), 16, speed, 1.0, slowest)


def plan_of(*keys: str) -> BatchPlan:
  config = configured(*keys)
  return plan_batches(config.batch, config.run, topology(config.mesh, 8))


# --- the recommendation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("speeds", "setting", "hosts", "keeps_up"),
  [
    # One host that loads for all needs 32 samples a second, and with the margin 48.
    ({(0, 1): 48.0, (1, 1): 99.0}, (0, 1), 1, True),
    ({(0, 1): 47.9, (1, 1): 99.0}, (0, 1), 2, True),
    ({(0, 1): 12.0, (1, 1): 99.0}, (0, 1), 4, True),
    ({(0, 1): 11.9, (1, 1): 99.0}, (1, 1), 1, True),
    ({(0, 1): 11.9, (0, 2): 13.0, (1, 1): 99.0}, (0, 2), 4, True),
    ({(0, 1): 11.9, (1, 1): 11.0, (2, 1): 30.0, (4, 1): 99.0}, (2, 1), 2, True),
    ({(0, 1): 9.0, (1, 1): 11.9, (2, 1): 7.0}, (1, 1), 4, False),
  ],
)
def test_the_smallest_setting_and_then_the_fewest_hosts_that_keep_up(
  speeds, setting, hosts, keeps_up
):
  measured = [read(speed, *given) for given, speed in reversed(speeds.items())]
  result = recommend(measured, [ONE, HALF, ALL], BOUNDS)
  assert (result.setting.worker_count, result.setting.num_threads) == setting
  assert (result.loading.num_hosts, result.keeps_up) == (hosts, keeps_up)
  assert result.ratio == result.samples_per_second / (32 / hosts)


def test_loads_for_which_hosts_have_no_memory_are_not_recommended():
  tight = dataclasses.replace(BOUNDS, load_bytes=30_000)
  # One host for all would hold 3 loads of 256 samples of 100 bytes, two hosts 3 of 64.
  assert recommend([read(1e6, 0, 1)], [ONE, HALF, ALL], tight).loading == HALF


@pytest.mark.parametrize(
  ("setting", "slowest", "buffer"),
  [
    ((0, 1), 0.0, 1),
    ((0, 1), 2.0, 2),
    ((0, 1), 2.1, 3),
    ((2, 1), 6.0, 2),
    ((0, 4), 0.1, 4),
    ((0, 1), 1e9, 1000),
  ],
)
def test_as_many_loads_are_ahead_as_the_slowest_took_steps(setting, slowest, buffer):
  result = recommend([read(1e6, *setting, slowest=slowest)], [ALL], BOUNDS)
  assert result.setting.buffer_size == buffer


def test_a_larger_load_takes_as_much_longer_as_reading_is_fast():
  # 240 samples more than were measured take 5 s at 48 a second; a load lasts 4 steps of 2 s.
  result = recommend([read(48.0, slowest=3.0)], [ONE], BOUNDS)
  assert result.setting.buffer_size == 2
  assert recommend([read(48.0, slowest=3.1)], [ONE], BOUNDS).setting.buffer_size == 3


def test_hosts_that_load_are_all_of_them_half_and_so_on_as_the_plan_has_it():
  options = loading_options(plan_of("batch_size=64"), 8, streamed=False)
  assert [(one.num_hosts, one.factor, one.samples_per_step) for one in options] == [
    (1, 8, 64),
    (2, 4, 32),
    (4, 2, 16),
    (8, 1, 8),
  ]
  assert [one.samples_per_load for one in options] == [512, 128, 32, 8]
  assert [one.num_rounds for one in options] == [7, 3, 1, 0]
  (named,) = loading_options(plan_of("batch_size=64", "loading_hosts=[1,3]"), 4, streamed=False)
  assert (named.num_hosts, named.samples_per_step, named.factor) == (2, 32, 1)


def test_a_task_has_a_core_for_each_that_reads_and_one_more():
  assert slurm(Setting(4), 16, 8) == Slurm(nodes=2, tasks_per_node=8, cpus_per_task=5)
  assert slurm(Setting(0, 2), 4, 1) == Slurm(nodes=4, tasks_per_node=1, cpus_per_task=3)
  with pytest.raises(UserError, match=r"tasks_per_node=3 must divide the 4 .*tasks_per_node=2$"):
    slurm(Setting(), 4, 3)


def test_what_the_configuration_has_is_measured_first_and_nothing_beyond_the_cores():
  given = setting_of(configured("grain_worker_count=3", "grain_per_worker_buffer_size=5").data)
  assert given == Setting(3, 1, 5)
  result = settings_to_measure(given, 6)
  assert result[:2] == [given, Setting()]
  assert {one.worker_count for one in result} == {0, 1, 2, 3, 4}
  assert {one.num_threads for one in result} == {1, 2, 4}
  keys = [f"{name}={value}" for one in result for name, value in one.keys().items()]
  assert setting_of(configured(*keys).data) == result[-1]


# --- what is measured -----------------------------------------------------------------------------


def ticking() -> Any:
  """A clock that is a second further each time."""
  return itertools.count().__next__


def test_the_speed_of_a_reader_is_that_of_the_loads_after_those_read_ahead():
  order = ReadOrder(NumberedRows(), 7)
  result = measure(order, Setting(buffer_size=2), 5, 10.0, ticking())
  assert result == Measured(Setting(buffer_size=2), 5, 5.0, 1.0, 1.0)


def test_each_stage_has_the_time_between_two_looks_at_the_clock():
  result = stages(ReadOrder(NumberedRows(), 7), 4, 12.0, ticking())
  # Rows that come from no token cache are read and packed at once.
  assert [stage.name for stage in result] == ["order", "pack", "check"]
  assert [stage.seconds for stage in result] == [0.25, 0.25, 0.25]


def texts(folder: pathlib.Path, *names: str) -> list[str]:
  for name in names:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "a.txt").write_text(f"the words of {name}\n" * 400)
  return [str(folder / name) for name in names]


def keys_of(folder: pathlib.Path, *more: str) -> list[str]:
  sizes = [f"{key}={value}" for key, value in SMALLEST.items()]
  (path,) = texts(folder, "texts")
  paths = [f"dataset_path={path}", f"dataset_cache_directory={folder / 'cache'}"]
  return [*sizes, *paths, "batch_size=8", *more]


def test_the_stages_of_a_mixture_read_all_of_its_caches(tmp_path):
  paths = texts(tmp_path, "texts", "code")
  mixture = f"dataset_mixture=[[{paths[0]}, 1], [{paths[1]}, 1]]"
  data = configured(*keys_of(tmp_path, "dataset_path=stdlib", mixture)).data
  result = stages(ReadOrder(build_dataset(data, 16).train, 7), 4, 1.0, ticking())
  assert [stage.name for stage in result] == ["order", "read", "pack", "check"]


def test_of_data_that_take_too_long_to_tokenize_a_part_is_measured(tmp_path):
  paths = texts(tmp_path, "texts", "code")
  mixture = f"dataset_mixture=[[{paths[0]}, 3], [{paths[1]}, 1]]"
  data = configured(*keys_of(tmp_path, "dataset_path=stdlib", mixture)).data
  report = input_report(data, plan_of("batch_size=8"), 1)
  slow = [dataclasses.replace(one, rate=TokenizeRate(1.0, 1.0)) for one in report.sources]
  report = dataclasses.replace(report, sources=tuple(slow))
  seconds = sum(one.cold_seconds for one in slow)
  with rows_to_measure(data, 16, report, seconds / 10) as part:
    assert isinstance(part.rows, MixedRows)
    assert part.rows.rows(np.arange(3))["inputs"].shape == (3, 16)
    assert part.note.startswith("rows of a part that is tokenized for the measurement")
    num_rows = len(part.rows)
  assert not (tmp_path / "cache").exists()
  with (
    pytest.raises(UserError, match=r"even a part of it exceeds .* for example seconds=600"),
    rows_to_measure(data, 16, report, 1e-3),
  ):
    pass
  with rows_to_measure(data, 16, report, seconds) as whole:
    assert len(whole.rows) > 5 * num_rows
    assert not whole.note


def metrics(folder: pathlib.Path) -> pathlib.Path:
  """Of a run whose steps of 4 samples take 2 s, of which 1 s is waiting, and the first 60 s."""
  folder.mkdir()
  times = {"global_batch_to_train": 4, "data_wait_seconds": 1.0}
  records = [{"step": 0}, *({"step": n, "step_seconds": 2.0} | times for n in range(1, 4))]
  records[1] = records[1] | {"step_seconds": 60.0}
  (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
  return folder


def test_what_a_step_consumes_is_that_of_earlier_steps_without_their_waits(tmp_path):
  folder, plan = metrics(tmp_path / "run"), plan_of("batch_size=32")
  for path in (folder, folder / "metrics.jsonl"):
    need = from_metrics(str(path), plan)
    assert (need.samples, need.step_seconds, need.samples_per_second) == (32, 8.0, 4.0)


def test_what_a_step_consumes_is_that_of_a_compile_report(tmp_path):
  time = {"tokens_per_second": 256.0, "how": "estimate"}
  titled = {"title": "Compile report: tiny, rows of 16 tokens\n  8 × cpu: data 8", "time": time}
  (tmp_path / "compile_report.json").write_text(json.dumps([titled]))
  # Of which model and devices, so that another one's is noticed.
  said = from_report(str(tmp_path), plan_of()).how
  assert said.endswith("compile_report.json (estimate; tiny, rows of 16 tokens 8 × cpu: data 8)")
  (tmp_path / "compile_report.json").write_text(json.dumps([{}, {"time": time}]))
  need = from_report(str(tmp_path), plan_of("batch_size=32", "max_target_length=128"))
  assert (need.samples, need.step_seconds) == (32, 16.0)
  assert need.how.endswith("compile_report.json (estimate)")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def without_workers(monkeypatch):
  """Only what the configuration has is measured, which starts no process."""
  monkeypatch.setattr(analyze, "settings_to_measure", lambda given, _: [given, Setting(99)][:1])


def run(folder: pathlib.Path, *more: str) -> list[str]:
  return ["config=base", *keys_of(folder), "seconds=1", *more]


def test_what_it_recommends_is_a_configuration_that_loads_so(tmp_path, capsys, without_workers):
  given = run(tmp_path, f"run_metrics={metrics(tmp_path / 'run')}", "num_hosts=4")
  assert main([*given, "--json", "--plot", str(tmp_path / "input.html")]) == 0
  result = json.loads(capsys.readouterr().out)
  assert result["keeps_up"]
  assert result["need"]["samples_per_second"] == 4.0
  assert result["slurm"] == {"nodes": 4, "tasks_per_node": 1, "cpus_per_task": 2}
  assert result["loading_hosts"] == 1
  keys = [f"{name}={value}" for name, value in result["recommended"].items()]
  assert keys[0] == "grain_worker_count=0"
  config = load_config(["config=base", *keys_of(tmp_path), *keys])
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  assert len(loading_hosts(plan, 4)) == 1
  assert result["input_function"]["sources"][0]["num_files"] == 1
  page = (tmp_path / "input.html").read_text()
  assert "What a sample costs on its way" in page
  assert "samples per second" in page


def test_a_step_that_is_here_is_measured_and_rows_are_brought_to_it(
  tmp_path, capsys, without_workers
):
  assert main(run(tmp_path)) == 0
  said = capsys.readouterr().out
  assert said.startswith("Input analysis of first_run: the data ")
  for words in ("measured here", "to the devices", "Input function", "  grain_worker_count: 0\n"):
    assert words in said
  assert "#SBATCH --cpus-per-task=2\n  shards: any number of files" in said


def test_data_that_do_not_keep_up_are_called_so(tmp_path, capsys, without_workers):
  given = run(tmp_path, f"run_metrics={metrics(tmp_path / 'run')}")
  records = tmp_path / "run" / "metrics.jsonl"
  records.write_text(
    records.read_text().replace('"step_seconds": 2.0', '"step_seconds": 1.0000001')
  )
  assert main(given) == 0
  said = capsys.readouterr().out
  assert "the data DO NOT KEEP UP with a margin of 1.5: at most " in said
  assert "transfer" not in said


@pytest.mark.parametrize(
  "record",
  [
    {"step_seconds": 1.0},
    {"step_seconds": 0.0, "global_batch_to_train": 8},
    {"step_seconds": 1.0, "global_batch_to_train": 0},
    {"step_seconds": math.nan, "global_batch_to_train": 8},
    {"step_seconds": 1.0, "data_wait_seconds": 1.5, "global_batch_to_train": 8},
  ],
)
def test_steps_that_took_no_time_say_nothing_of_what_is_consumed(tmp_path, record):
  lines = [json.dumps({"step": step, **record}) + "\n" for step in range(3)]
  (tmp_path / "metrics.jsonl").write_text("".join(lines))
  with pytest.raises(UserError, match="with at least two steps that did more than wait for data"):
    from_metrics(str(tmp_path), plan_of())


@pytest.mark.parametrize("speed", ["-5", "NaN", "1e400", "true", "0"])
def test_a_report_whose_speed_is_none_is_refused(tmp_path, speed):
  file = tmp_path / "report.json"
  file.write_text(f'[{{"time": {{"how": "measured", "tokens_per_second": {speed}}}}}]')
  with pytest.raises(UserError, match="this is not a report with a step's time; for example"):
    from_report(str(file), plan_of())
  file.write_text("[" * 100_000)
  with pytest.raises(UserError, match="this is not a report with a step's time; for example"):
    from_report(str(file), plan_of())


@pytest.mark.parametrize(
  ("more", "error"),
  [
    (["--plot", "/absent/x.html"], "No such file or directory; for example --plot new-x.html"),
    (["run_metrics=/absent"], "run_metrics=/absent: no metrics.jsonl with at least two steps"),
    (["compile_report=/absent"], "compile_report=/absent: No such file or directory; for example"),
    (["compile_report=/etc/hostname"], "this is not a report with a step's time; for example"),
    (["run_metrics=a", "compile_report=b"], "one of them says what the step consumes"),
    (["num_devices=64"], "names devices that this machine does not have"),
    # Before the step is compiled.
    (["num_hosts=3"], "num_hosts=3 must divide the 8 devices evenly; for example num_hosts=2"),
    (["num_hosts=4", "tasks_per_node=3"], "tasks_per_node=3 must divide the 4 processes"),
    (["margin=0.5"], "margin must be at least 1"),
    (
      ["--plot", "x.txt"],
      "saves it as PNG; name a file that ends in .html; for example --plot input",
    ),
    (["--svg", "x.svg"], "--svg is called --plot now; --help says what it does"),
    (["run_metric=x"], "Did you mean run_metrics?"),
  ],
)
def test_mistakes_end_with_a_sentence(capsys, monkeypatch, more, error):
  monkeypatch.delattr("maxbatch.input_analyzer.measured")
  assert main(["config=base", *more]) == 2
  assert error in capsys.readouterr().err
