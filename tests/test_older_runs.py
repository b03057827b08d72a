"""Folders of runs that another version wrote: they are read, or refused with a sentence."""

import json
from pathlib import Path

import pytest
import yaml

from maxbatch import report, runs, train

CONTRACT = ("step", "samples", "tokens", "loss", "grad_norm", "learning_rate", "step_seconds")


@pytest.fixture
def older(tmp_path: Path) -> Path:
  """The folder of a run as the first version wrote it: no events, no starts, nothing derived."""
  folder = tmp_path / "runs" / "older"
  folder.mkdir(parents=True)
  keys = {"run_name": "older", "base_output_directory": str(tmp_path / "runs"), "steps": 3}
  (folder / "config.yml").write_text(yaml.safe_dump({"base_config": "base", **keys}))
  records = [dict.fromkeys(CONTRACT, 8.0 * step) | {"step": step} for step in range(4)]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
  return folder


def test_a_folder_without_what_came_later_is_listed_and_drawn(older, capsys):
  assert runs.main([str(older.parent)]) == 0
  assert "older" in capsys.readouterr().out
  assert report.main([str(older)]) == 0
  assert (older / "report.html").stat().st_size > 100_000


def test_a_record_with_keys_that_are_not_known_is_drawn(older):
  with (older / "metrics.jsonl").open("a") as file:
    file.write(json.dumps(dict.fromkeys(CONTRACT, 32.0) | {"step": 4, "later/figure": 1.5}) + "\n")
  assert report.main([str(older)]) == 0
  assert "later/figure" in (older / "report.html").read_text()


def test_a_key_that_was_removed_is_refused_by_name_file_and_line(older, capsys):
  config = older / "config.yml"
  config.write_text(config.read_text() + "learning_rates: 1.0e-3\n")
  assert train.main([f"config={config}", "validate_only=true"]) == 2
  said = capsys.readouterr().err
  assert f"{config}:5" in said
  assert "'learning_rates'" in said
  assert "Did you mean learning_rate?" in said


def test_records_of_another_layout_are_refused_before_they_are_gone_on_with(older, capsys):
  (older / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}\n')
  assert train.main([f"config={older / 'config.yml'}", "enable_checkpointing=false"]) == 2
  said = capsys.readouterr().err
  assert said.startswith("error: ")
  assert "metrics.jsonl" in said


def test_the_page_names_what_every_record_has():
  page = (Path(__file__).parents[1] / "docs" / "versions.md").read_text()
  assert all(f"`{key}`" in page for key in CONTRACT)
