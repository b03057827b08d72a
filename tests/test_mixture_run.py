"""A run on a mixture: what it says of each source, and what its resume accepts."""

from pathlib import Path

import pytest
import several_processes
from processes import small_run

from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import main

MIXTURE = "dataset_mixture=[[numbers.txt, 3], [letters.txt, 1]]"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
  (tmp_path / "letters.txt").write_text("".join(chr(97 + n % 26) * 9 + "\n" for n in range(300)))
  monkeypatch.chdir(tmp_path)
  return tmp_path


def start(folder: Path, *arguments: str) -> int:
  keys = ["dataset_path=stdlib", MIXTURE, "grain_packing_type=best_fit", "steps=4"]
  run = small_run(folder / "runs", folder / "numbers.txt", folder / "cache")
  return main([*run, *keys, *arguments])


def records(folder: Path) -> list[dict[str, float]]:
  return several_processes.records(folder / "runs" / "first_run")


def test_sources_are_reported_and_evaluated_by_name(folder, capsys):
  assert start(folder, "metrics=[accuracy]", "mixture_schedule=[[24, 1, 3]]") == 0
  out = capsys.readouterr().out
  assert "mixture: 75% numbers" in out
  assert "from sample 24 on: 25% numbers" in out
  # 18 of 24 and then 2 of 8.
  assert "Samples by source: numbers 20 (62.50%, " in out
  last = records(folder)[-1]
  assert f"→ {last['eval/loss']:.3f} nats per token (numbers " in out
  for name in ("loss", "accuracy"):
    numbers, letters = last[f"eval/{name}/numbers"], last[f"eval/{name}/letters"]
    assert numbers != letters
    assert last[f"eval/{name}"] == pytest.approx(0.25 * numbers + 0.75 * letters)


def test_a_resume_goes_on_with_the_same_samples_and_refuses_other_weights(folder, capsys):
  assert start(folder, "run_name=whole", "checkpoint_period=100") == 0
  assert start(folder, "steps=2") == 0
  assert start(folder, "dataset_mixture=[[numbers.txt, 1], [letters.txt, 1]]") == 2
  assert (
    "dataset is not that of the checkpoint: dataset_mixture was [['numbers.txt', 3], "
    "['letters.txt', 1]] and is [['numbers.txt', 1], ['letters.txt', 1]]"
  ) in capsys.readouterr().err
  assert start(folder) == 0
  whole = read_metrics(folder / "runs" / "whole")
  assert [one["loss"] for one in records(folder)[1:]] == [one["loss"] for one in whole[1:]]


def test_a_phase_that_is_added_in_time_changes_no_sample_before_it(folder, capsys):
  schedule = "mixture_schedule=[[24, 1, 3]]"
  assert start(folder, "run_name=whole", "checkpoint_period=100", schedule) == 0
  assert start(folder, "steps=2") == 0
  assert start(folder, schedule) == 2
  assert start(folder, schedule, "allow_changed_resume=true") == 0
  whole = read_metrics(folder / "runs" / "whole")
  assert [one["loss"] for one in records(folder)[1:]] == [one["loss"] for one in whole[1:]]
