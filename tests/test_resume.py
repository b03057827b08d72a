"""A resumed run is the run that was begun, or it says in what it is another."""

import pathlib
import shutil

import pytest
import yaml
from support import SMALLEST

from maxbatch.config.load import load_config
from maxbatch.config.resume import CHANGEABLE, FIXED, OF_ONE_START
from maxbatch.config.schema import fields
from maxbatch.train import main

OTHER_TEXT = "".join(f"{n} comes before {n + 1}\n" for n in range(300))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
  """A folder with a text to train on, and one to validate on."""
  folder = tmp_path_factory.mktemp("text")
  (folder / "train.txt").write_text("".join(f"{n} follows {n - 1}\n" for n in range(300)))
  (folder / "valid.txt").write_text("".join(f"{n} follows {n - 1}\n" for n in range(300, 340)))
  return folder


def arguments(text: pathlib.Path, folder: pathlib.Path, **keys: object) -> list[str]:
  defaults: dict[str, object] = {
    "base_output_directory": folder,
    "dataset_path": text,
    "dataset_cache_directory": text.parent / "cache",
    "steps": 4,
    "eval_samples": 12,
    "checkpoint_period": 2,
    "generate_length": 0,
    "per_device_batch_size": 1,
    **SMALLEST,
  }
  return ["config=base", *(f"{key}={value}" for key, value in (defaults | keys).items())]


@pytest.fixture(scope="module")
def begun(text, tmp_path_factory) -> pathlib.Path:
  """A run of 2 steps."""
  folder = tmp_path_factory.mktemp("begun")
  assert main(arguments(text, folder, steps=2)) == 0
  return folder


@pytest.fixture
def folder(begun, tmp_path) -> pathlib.Path:
  """A copy of `begun` to go on with."""
  return shutil.copytree(begun, tmp_path / "runs")


def refused(capsys: pytest.CaptureFixture[str], given: list[str]) -> str:
  capsys.readouterr()
  assert main(given) == 2
  return capsys.readouterr().err


def test_every_key_is_in_one_class():
  classes = (FIXED, CHANGEABLE, OF_ONE_START)
  assert set(fields()) == frozenset().union(*classes)
  assert len(fields()) == sum(map(len, classes))


def test_what_changed_is_said_key_by_key(text, folder, capsys):
  changed = {"learning_rate": 3e-4, "dtype": "bfloat16", "lr_schedule_type": "constant"}
  given = arguments(text, folder, **changed)
  for more in (["validate_only=true"], []):
    capsys.readouterr()
    assert main([*given, *more]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {line for line in lines if " → " in line and "loss" not in line} == {
      "steps: 2 → 4",
      "learning_rate: 0.003 → 0.0003",
      "lr_schedule_type: cosine → constant",
      "dtype: float32 → bfloat16",
    }


def test_nothing_is_said_where_nothing_changed(text, folder, capsys):
  assert main(arguments(text, folder, steps=3)) == 0
  capsys.readouterr()
  given = arguments(text, folder, steps=3, run_name="moved")
  (folder / "first_run").rename(folder / "moved")
  assert main(given) == 0
  assert "→" not in capsys.readouterr().out


@pytest.mark.parametrize(
  ("keys", "line"),
  [
    ({"adam_b2": 0.99}, "adam_b2 is 0.95 in the checkpoint and 0.99 now"),
    ({"sgd_momentum": 0.5}, "sgd_momentum is 0.9 in the checkpoint and 0.5 now"),
    ({"opt_type": "sgd"}, "opt_type is adamw in the checkpoint and sgd now"),
    ({"weight_dtype": "bfloat16"}, "weight_dtype is float32 in the checkpoint and bfloat16 now"),
    ({"z_loss_multiplier": 0.1}, "z_loss_multiplier is 0.0 in the checkpoint and 0.1 now"),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_state_is_made_of_cannot_change(text, begun, capsys, keys, line):
  for more in ({}, {"validate_only": "true"}):
    assert f"  {line}\n" in refused(capsys, arguments(text, begun, **keys, **more))


def test_another_optimizer_constant_is_taken_when_allowed(text, folder, capsys):
  assert main(arguments(text, folder, adam_b2=0.99, allow_changed_resume="true")) == 0
  assert "adam_b2 is 0.95 in the checkpoint and 0.99 now" in capsys.readouterr().out


def test_other_validation_data_are_noticed_by_name_and_size(text, folder, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "text")
  (other / "valid.txt").write_text(OTHER_TEXT)
  given = arguments(other, folder)
  message = refused(capsys, given)
  assert (
    f"  validation is not that of the checkpoint: dataset_path was {text} and is {other}; "
    f"changed: valid.txt ({len(OTHER_TEXT):,} bytes, was 640)\n"
  ) in message
  assert "dataset is" not in message
  assert main([*given, "allow_changed_resume=true"]) == 0


def test_other_data_are_named_by_keys_and_files(text, begun, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "text")
  (other / "train.txt").rename(other / "train-1.txt")
  (other / "train-2.txt").write_text(OTHER_TEXT)
  size = (other / "train-1.txt").stat().st_size
  assert (
    f"  dataset is not that of the checkpoint: dataset_path was {text} and is {other}; gone: "
    f"train.txt ({size:,} bytes); new: train-1.txt ({size:,} bytes), train-2.txt "
    f"({len(OTHER_TEXT):,} bytes)\n"
  ) in refused(capsys, arguments(other, begun))


def test_an_edit_that_keeps_names_and_sizes_is_noticed(text, folder, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "text")
  assert main(arguments(other, folder, steps=3)) == 0
  content = (other / "train.txt").read_text()
  (other / "train.txt").write_text(content.replace("follows", "FOLLOWS"))
  assert (
    "  dataset is not that of the checkpoint: the same paths, names and sizes, with other "
    "contents\n"
  ) in refused(capsys, arguments(other, folder))


def test_moved_data_are_the_same_data(text, folder, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "elsewhere")
  assert main(arguments(other, folder)) == 0
  assert f"dataset_path: {text} → {other}" in capsys.readouterr().out


def test_the_configurations_of_all_starts_stay(text, folder):
  assert main(arguments(text, folder, learning_rate=3e-4)) == 0
  assert main(arguments(text, folder, learning_rate=3e-4)) == 0  # Complete: not a start.
  run = folder / "first_run"
  assert sorted(path.name for path in (run / "starts").iterdir()) == ["1.yml", "2.yml"]
  rates = [load_config([f"config={run}/starts/{n}.yml"]).optimizer.learning_rate for n in (1, 2)]
  assert rates == [3e-3, 3e-4]
  assert (run / "starts" / "2.yml").read_bytes() == (run / "config.yml").read_bytes()
  begins = [yaml.safe_load((run / "starts" / f"{n}.yml").read_text())["derived"] for n in (1, 2)]
  assert [each["begins_after_step"] for each in begins] == [0, 2]
