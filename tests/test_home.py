"""~ is the user's home in every key and option that names a file or a folder, in files too."""

from pathlib import Path

import pytest
from support import SMALLEST

from maxbatch import pipeline, train
from maxbatch.config.load import load_config
from maxbatch.plan import main as plan_command
from maxbatch.run_folder.paths import compiled_programs


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """The home folder; the working directory is another one and stays empty."""
  folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
  folder.mkdir()
  elsewhere.mkdir()
  monkeypatch.setenv("HOME", str(folder))
  monkeypatch.chdir(elsewhere)
  (folder / "words.txt").write_text("".join(f"the number {n}\n" for n in range(900)))
  (folder / "unseen.txt").write_text("".join(f"the number {n}\n" for n in range(900, 999)))
  (folder / "schedule.yml").write_text("batch_schedule:\n- [0, 8]\n")
  keys = SMALLEST | {"dataset_path": "~/words.txt", "eval_dataset_path": "~/unseen.txt"}
  keys |= {"base_output_directory": "~/runs", "dataset_cache_directory": "~/tokens"}
  keys |= {"batch_schedule": "file", "batch_schedule_file": "~/schedule.yml", "batch_size": 8}
  keys |= {"steps": 1, "eval_samples": 8, "generate_length": 0, "model_name": "~/model.yml"}
  text = "".join(f"{key}: {value}\n" for key, value in keys.items())
  (folder / "model.yml").write_text("mlp_activation: gelu\n")
  (folder / "parent.yml").write_text(f"base_config: base\n{text}")
  (folder / "mine.yml").write_text("base_config: ~/parent.yml\n")
  return folder


def made(folder: Path) -> set[str]:
  return {path.name for path in folder.iterdir()}


def test_a_run_reads_and_writes_in_the_home_folder(home: Path, capsys):
  before = made(home)
  assert load_config(["config=~/mine.yml"]).model.mlp_activation == "gelu"
  assert train.main(["config=~/mine.yml", "save_compiled_step=~/step"]) == 0
  assert train.main(["config=~/mine.yml", "compiled_step=~/step", "run_name=again"]) == 0
  assert capsys.readouterr().err == ""
  assert made(home) - before >= {"runs", "tokens", "step"}
  assert made(home / "runs") == {"first_run", "again"}
  assert made(Path.cwd()) == set()


def test_options_write_in_the_home_folder(home: Path, capsys):
  assert plan_command(["config=~/mine.yml", "--plot", "~/batch.html"]) == 0
  keys = ["config=base", "pipeline_schedule=1f1b", "ici_pipeline_parallelism=2"]
  keys += ["num_pipeline_microbatches=4", "ici_data_parallelism=4"]
  assert pipeline.main([*keys, "--csv=~/table.csv"]) == 0
  assert pipeline.main([*keys, "--check", "~/table.csv"]) == 0
  assert capsys.readouterr().err == ""
  assert made(home) >= {"batch.html", "table.csv"}
  assert made(Path.cwd()) == set()


def test_the_compile_cache_is_in_the_home_folder(home: Path):
  assert compiled_programs("~/programs") == home / "programs"
