"""The page of a run: what it says, what it escapes, what it says is missing, and when it is written."""

import collections
import html.parser
import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import jax
import numpy as np
import pytest
from hostile_places import BOMB
from hypothesis import given
from hypothesis import strategies as st
from support import SMALLEST
from written_runs import HOSTILE, write_run

from maxbatch import report, train
from maxbatch.core.plan import Position
from maxbatch.errors import TrainingDivergedError
from maxbatch.modes.run_log import open_run_log
from maxbatch.plots.chart import Cells
from maxbatch.plots.interactive import _Drawn
from maxbatch.plots.page import encoded
from maxbatch.run_folder.history import read_history, span, status_of
from maxbatch.run_report.background import BackgroundReport
from maxbatch.run_report.curves import expert_chart, thinned, training_chart
from maxbatch.run_report.page import page


class Page(html.parser.HTMLParser):
  """Tags, what they refer to, and the words outside of scripts and styles."""

  def __init__(self, text: str):
    super().__init__(convert_charrefs=True)
    self.tags: list[str] = []
    self.references: list[str] = []
    self.words = ""
    self._inside = ""
    self.feed(text)

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    self.tags.append(tag)
    self.references += [str(value) for name, value in attrs if name in ("src", "href", "action")]
    assert not [name for name, _ in attrs if name.startswith("on")]
    self._inside = tag if tag in ("script", "style") else self._inside

  def handle_endtag(self, tag: str) -> None:
    self._inside = "" if tag == self._inside else self._inside

  def handle_data(self, data: str) -> None:
    self.words += "" if self._inside else data


def page_of(*folders: Path) -> Page:
  return Page(encoded(page([read_history(folder) for folder in folders])).decode())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
  return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def plain(written) -> Page:
  return page_of(written)


def test_the_page_says_what_was_trained_and_how_it_went(plain):
  for words in (
    "mine", "finished", "40 of 40", "5.5 → 2.174", "python -m maxbatch.train config=base",
    "32 × gradient_accumulation_steps 1", "learning_rate: 0.003 → 0.001",
    "warning: the disk is full", "read back and verified", "def nothing", "def forward(self):",
    "waiting for data", "compiling", "1.000 GiB", "noise scale", "accuracy",
  ):  # fmt: skip
    assert words in plain.words, words


def test_it_needs_no_network(plain):
  assert all(one.startswith(("#", "data:")) for one in plain.references)


def test_what_is_hostile_is_text(tmp_path, plain):
  result = page_of(write_run(tmp_path / "<img src=x onerror=alert(3)>", text=HOSTILE))
  assert collections.Counter(result.tags) == collections.Counter(plain.tags)
  shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b").replace("\x00", "\\x00")
  assert result.words.count(shown) >= 4


@pytest.mark.parametrize(
  ("name", "content", "said"),
  [
    ("metrics.jsonl", '{"step": 0}\n{"step": 1, "loss": 2.5}\n{"step": 2, "lo', ": line 3 cannot be read"),
    ("metrics.jsonl", '[]\nnull\n{"step": true}\n', ": 3 lines, from 1 on, cannot be read"),
    ("metrics.jsonl", "", " has no step"),
    ("metrics.jsonl", None, " has no step"),
    ("events.jsonl", '{"event": "start"}\n{"time": 3}\nx\n', ": 3 lines cannot be read"),
    ("events.jsonl", None, " has no event"),
    ("config.yml", "a: [", " is damaged"),
    ("config.yml", "- 1", " is damaged"),
    # The first crashed the parser, the second has 9 to the power of 12 values.
    ("config.yml", "[" * 100_000, " is damaged"),
    ("config.yml", BOMB.decode(), " is damaged"),
    ("config.yml", None, " cannot be read: No such file"),
    ("compile_report.json", "{", " is damaged"),
    ("starts/2.yml", "\x00", " is damaged"),
  ],
)  # fmt: skip
def test_what_is_damaged_or_missing_is_said(tmp_path, written, name, content, said):
  folder = tmp_path / "mine"
  shutil.copytree(written, folder)
  replace(folder / name, content)
  missing = read_history(folder).missing
  assert any(line.startswith(Path(name).name + said) for line in missing), missing


def test_a_page_of_what_is_damaged(tmp_path):
  folder = write_run(tmp_path / "mine")
  wrong = {
    "metrics.jsonl": '{"step": 1, "samples": NaN, "loss": Infinity}\n[',
    "events.jsonl": '{"event": "start", "time": 1e300, "command": 3}\n{"event": "end", "time": 2}\n',
    "config.yml": "steps: 3\nderived: {num_devices: 8}",
    "compile_report.json": '[{"estimate": {"largest": [3, {"seconds": "x"}]}, "time": []}, 3]',
    "starts/2.yml": "- 1",
  }
  for name, content in wrong.items():
    replace(folder / name, content)
  words = page_of(folder).words
  for said in ("line 2 cannot be read", "cannot be derived from config.yml", "2.yml is damaged"):
    assert said in words


def replace(path: Path, content: str | None) -> None:
  path.unlink(missing_ok=True)
  if content is not None:
    path.write_text(content)


def test_an_empty_folder_has_a_page_too(tmp_path):
  assert "nothing was trained yet" in page_of(tmp_path).words


def test_several_runs_are_beside_each_other(tmp_path):
  runs = [
    write_run(tmp_path / f"lr-{n}", 40, f"learning_rate={rate}", loss=loss)
    for n, rate, loss in ((1, 0.001, 2.0), (2, 0.002, 1.5), (3, 0.004, 3.0))
  ]
  words = page_of(*runs).words
  assert "★ lr-2" in words
  assert words.count("★ lr-") == 1
  assert "What differs" in words
  assert words.index("learning_rate") < words.index("Training")


def test_loads_of_experts_are_layers_by_experts_at_the_end_and_their_spread_over_steps(tmp_path):
  folder = write_run(tmp_path / "experts")
  records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  for record in records[1:]:
    # Ten layers, of which eight are drawn, and layer 1 is even all the time; at the end 1/2 and 3/2.
    part = 0.5 if record["step"] > 20 else 0.0
    for layer in range(10):
      loads = [1.0, 1.0] if layer == 1 else [part, 2 - part]
      record |= {f"moe/load/{layer}/{expert}": load for expert, load in enumerate(loads)}
      record |= {f"moe/load_deviation/{layer}": layer / 10, "moe/dead_experts": 0}
      record |= {f"gns/expert/{layer}/{expert}": 7.0 for expert in range(len(loads))}
      record |= {"gns/router": 8.0}
  (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
  run = read_history(folder)
  chart, training = expert_chart(run), training_chart([run])
  assert chart
  assert training
  [[cells]] = [panel.marks for panel in chart.panels]
  assert isinstance(cells, Cells)
  assert list(cells.names) == [f"layer {layer}" for layer in range(10)]
  assert cells.values == [[1, 1] if layer == 1 else [0.5, 1.5] for layer in range(10)]
  assert cells.high == 2
  titles = {panel.title: panel for panel in training.panels}
  assert not [title for title in titles if title.startswith(("moe/load", "moe/max_load"))]
  assert "moe/dead_experts" in titles
  [groups] = [panel for title, panel in titles.items() if title.startswith("noise scale by group")]
  assert [mark.label for mark in groups.marks] == ["router"]
  [spread] = [panel for title, panel in titles.items() if title.startswith("spread")]
  assert [mark.label for mark in spread.marks] == [f"layer {layer}" for layer in range(2, 10)]
  # As it is drawn: a rectangle for each, its color from 0 to the highest.
  figures: Any = _Drawn(chart).models()
  [drawn] = [part for part in figures[0].renderers if hasattr(part.glyph, "fill_color")]
  columns = drawn.data_source.data
  assert (columns["y"][2:5], columns["x"][2:5].tolist()) == (
    ["layer 1", "layer 1", "layer 2"],
    [0, 1, 0],
  )
  assert columns["value"][2:5].tolist() == [1, 1, 0.5]
  mapper = drawn.glyph.fill_color.transform
  assert (drawn.glyph.fill_color.field, mapper.low, mapper.high) == ("value", 0, 2)
  assert "Experts" in page_of(folder).words


@given(
  st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.sampled_from([4, 8, 40, 400])
)  # fmt: skip
def test_of_a_thinned_curve_the_ends_and_extremes_stay(values, most):
  y = np.asarray(values)
  places = thinned(y, most)
  assert len(places) <= max(most, 4)
  assert list(places) == sorted(set(places.tolist()))
  assert {places[0], places[-1]} == {0, len(y) - 1}
  assert (y[places].min(), y[places].max()) == (y.min(), y.max())
  assert len(y) > most or len(places) == len(y)


def test_the_state_of_a_run(tmp_path):
  run = write_run(tmp_path / "mine")
  assert status_of(read_history(run)).state == "finished"
  other = write_run(tmp_path / "other", ended=False)
  result = status_of(read_history(other))
  assert (result.state, result.go_on) == ("running", "")
  later = status_of(read_history(other), now=4e9)
  assert later.state == "silent"
  assert later.go_on.startswith("python -m maxbatch.train config=base")


@pytest.mark.parametrize(
  ("seconds", "shown"),
  [(0.1234, "0.123 s"), (59.6, "1 min"), (61, "1 min 1 s"), (7300, "2 h 1 min"), (1e5, "1 d 3 h")],
)
def test_a_span_of_time(seconds, shown):
  assert span(seconds) == shown


def test_the_command_writes_into_the_run_s_folder(tmp_path, capsys):
  folder = write_run(tmp_path / "a[1]")
  assert report.main([str(folder)]) == 0
  assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
  assert report.main([str(tmp_path / "a*"), str(folder), "--out", str(tmp_path / "all.html")]) == 0
  assert str(tmp_path / "all.html") in capsys.readouterr().out
  for wrong, said in (([], "give a run's folder"), (["nowhere"], "there is no such folder"),
                      ([str(tmp_path)], "not a run's folder"), ([str(folder), "--uot", "x"], "Did you mean --out"),
                      ([str(tmp_path / "all*")], "none of these")):  # fmt: skip
    assert report.main(wrong) == 2
    assert said in capsys.readouterr().err
  other = tmp_path / "theirs.html"
  other.write_text("<!DOCTYPE html>\n<p>")
  assert report.main([str(folder), "--out", str(other)]) == 2


def test_a_run_writes_its_page_in_a_process_of_its_own(tmp_path):
  said: list[str] = []
  folder = write_run(tmp_path / "mine")
  background = BackgroundReport(folder, said.append)
  background.update()
  first = background._process
  background.update()  # It is being written.
  assert background._process is first
  assert background.finish()
  background.update()  # It was written a moment ago.
  assert background._process is None
  assert (folder / "report.html").stat().st_size > 1e6
  assert not said


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho 'error: no space' >&2\nexit 2\n")
  python.chmod(python.stat().st_mode | stat.S_IXUSR)
  for executable, why in ((python, "error: no space"), (tmp_path / "none", "No such file")):
    said: list[str] = []
    monkeypatch.setattr(sys, "executable", str(executable))
    background = BackgroundReport(tmp_path, said.append)
    background.update()
    assert not background.finish()
    background.update()
    [line] = said
    assert line.startswith(f"warning: {tmp_path}/report.html could not be written ({why}")


def test_a_run_tells_its_own_story(tmp_path, monkeypatch, capsys):
  page = Mock(spec=BackgroundReport)
  constructor = Mock(return_value=page)
  monkeypatch.setattr("maxbatch.modes.run_log.BackgroundReport", constructor)
  text = tmp_path / "text.txt"
  text.write_text("the number follows\n" * 300)
  keys = [f"{key}={value}" for key, value in SMALLEST.items()]
  keys += [
    "steps=4",
    "eval_interval=2",
    "generate_length=4",
    "batch_size=8",
    "eval_samples=8",
    "run_name=r",
  ]
  places = [f"dataset_path={text}", f"dataset_cache_directory={tmp_path}"]
  assert train.main(["config=base", *keys, *places, f"base_output_directory={tmp_path}"]) == 0
  run = read_history(tmp_path / "r")
  kinds = [event["event"] for event in run.events]
  for kind, count in {"start": 1, "compiled": 1, "text": 3, "evaluated": 3, "end": 1}.items():
    assert kinds.count(kind) == count, kinds
  assert kinds.count("saved") == kinds.count("verified") == 1
  [start] = run.of_kind("start")
  assert start["about"].startswith("Model   default: ")
  assert "Data    " in start["about"]
  assert status_of(run).state == "finished"
  constructor.assert_called_once_with(tmp_path / "r", ANY, enabled=True)
  assert [call[0] for call in page.method_calls] == [
    "update",
    "finish",
  ]  # at step 2, and at the end
  assert not run.missing
  assert "Finished after step 4" in capsys.readouterr().out


def test_a_run_that_fails_says_so_itself(tmp_path):
  def fail() -> None:
    with open_run_log(tmp_path / "r", write_report=False) as run_log:
      run_log.begin(Position(3, 24), jax.devices(), "a model")
      run_log.say("warning: x")
      raise TrainingDivergedError("the loss is nan")

  with pytest.raises(TrainingDivergedError):
    fail()
  run = read_history(tmp_path / "r")
  assert [(one["event"], one.get("text")) for one in run.events[1:]] == [
    ("notice", "warning: x"),
    ("end", "the loss is nan"),
  ]
  result = status_of(run)
  assert (result.state, result.sentence) == ("diverged", "the loss is nan")
  assert result.go_on
