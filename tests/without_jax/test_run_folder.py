"""Where a run writes, and how its files are called."""

import dataclasses
from pathlib import Path

import pytest

from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import Inside, RunFolder

CONTRACT = {
  "lock": "lock",
  "config": "config.yml",
  "starts": "starts",
  "metrics": "metrics.jsonl",
  "events": "events.jsonl",
  "generations": "generations",
  "report": "report.html",
  "tensorboard": "tensorboard",
  "checkpoints": "checkpoints",
  "compile_report_text": "compile_report.txt",
  "compile_report_json": "compile_report.json",
  "tensorboard_over_samples": "tensorboard/over_samples",
  "tensorboard_over_tokens": "tensorboard/over_tokens",
  "precision_report_text": "precision_report.txt",
  "precision_report_json": "precision_report.json",
  "exploration": "exploration.json",
  "exploration_log": "exploration.log",
  "profile": "profile",
  "profile_json": "profile.json",
  "text_before_training": "text_before_training.txt",
  "batch_schedule": "batch_schedule.yml",
  "hugging_face": "hugging_face",
  "examples_before": "examples_before_training.txt",
  "examples_after": "examples_after_training.txt",
}


def test_the_names_are_the_contract():
  folder = RunFolder(Path("runs/mine"))
  names = [name for name, kind in vars(RunFolder).items() if isinstance(kind, Inside)]
  results = {name: getattr(folder, name) for name in names}
  assert results == {name: Path("runs/mine") / file for name, file in CONTRACT.items()}


def test_a_run_s_folder_follows_from_two_keys(monkeypatch):
  run = load_config(["config=base", "base_output_directory=~/runs", "run_name=mine"]).run
  monkeypatch.setenv("HOME", "/home/somebody")
  assert RunFolder.of(run).path == Path("/home/somebody/runs/mine")
  here = dataclasses.replace(run, base_output_directory="runs")
  assert RunFolder.of(here).path == Path("runs/mine")


@pytest.mark.parametrize("url", ["gs://bucket/runs", "s3://bucket"])
def test_storage_that_is_no_folder_is_refused_by_name(url):
  with pytest.raises(UserError) as caught:
    load_config(["config=base", f"base_output_directory={url}"])
  assert str(caught.value).startswith(f"base_output_directory={url}: ")
  assert "for example base_output_directory=runs" in str(caught.value)
