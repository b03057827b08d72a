"""Folders and pipes where files should be, and records of other types: a sentence, no waiting."""

import json
import os
import pathlib
import signal

import pytest

from maxbatch import pipeline
from maxbatch.compile import step_file
from maxbatch.config.load import load_config
from maxbatch.core.plan import Position
from maxbatch.errors import UserError
from maxbatch.experiments.origin import Checkpoint, record_origin
from maxbatch.plan import main as plan

PIPELINE = ["config=base", "pipeline_schedule=1f1b", "ici_pipeline_parallelism=2"]


@pytest.fixture(autouse=True)
def _no_waiting():
  def stop(*_: object) -> None:
    raise TimeoutError

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(30)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["folder", "pipe"])
def no_file(request, tmp_path: pathlib.Path) -> pathlib.Path:
  path = tmp_path / "here"
  if request.param == "folder":
    path.mkdir()
  else:
    os.mkfifo(path)
  return path


def test_a_configuration(no_file):
  with pytest.raises(UserError, match=f"config={no_file}: "):
    load_config([f"config={no_file}"])


def test_a_model(no_file):
  with pytest.raises(UserError, match="no such model"):
    load_config(["config=base", f"model_name={no_file}"])


def test_a_batch_schedule(no_file, capsys):
  keys = ["config=base", "batch_schedule=file", f"batch_schedule_file={no_file}"]
  assert plan(keys) == 2
  assert f"error: {no_file}: " in capsys.readouterr().err


def test_a_timetable(no_file, capsys):
  assert pipeline.main([*PIPELINE, "--check", str(no_file)]) == 2
  assert f"error: --check {no_file}: " in capsys.readouterr().err


def test_a_compiled_step(no_file):
  with pytest.raises(UserError, match=f"compiled_step={no_file}: "):
    step_file.made_from(str(no_file))


def checkpoint(folder: pathlib.Path) -> Checkpoint:
  return Checkpoint(folder, Position(1, 8), {}, "abc")


def test_the_record_of_where_branches_start(no_file):
  note = no_file.rename(no_file.with_name("origin.json"))
  with pytest.raises(UserError, match="does not say which checkpoint"):
    record_origin(note.parent, checkpoint(note.parent))


@pytest.mark.parametrize(
  "content", [None, [], {}, "abc", 3, {"checksum": 3}, {"checksum": None}], ids=json.dumps
)
def test_a_record_of_other_types_is_no_crash(tmp_path, content):
  note = tmp_path / "origin.json"
  note.write_text(json.dumps(content))
  with pytest.raises(UserError, match="or choose another run_name for new branches"):
    record_origin(tmp_path, checkpoint(tmp_path))
  assert json.loads(note.read_text()) == content


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe"])
def test_a_record_that_is_no_json_is_no_crash(tmp_path, content):
  (tmp_path / "origin.json").write_bytes(content)
  with pytest.raises(UserError, match="does not say which checkpoint"):
    record_origin(tmp_path, checkpoint(tmp_path))
