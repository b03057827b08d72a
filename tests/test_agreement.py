"""Processes that were not started alike do not train: each difference is named with its host."""

import pathlib
import shutil
import socket
import sys
import types

import jax
import pytest
from processes import REPOSITORY, small_run
from several_processes import train

from maxbatch.config.load import load_config
from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.modes import start

HOST = socket.gethostname()


MEASURE = """
import my_scale
from maxbatch.training.metrics import TokenMetric
margin = TokenMetric(lambda tokens: my_scale.SCALE * tokens.max_logit_BC)
"""
"""A metric of the user's own, in a file that needs another one."""


def own_module(folder: pathlib.Path, *, measure: str = MEASURE, scale: int = 1) -> None:
  """Writes the metric's files, which a process that is started there finds."""
  folder.mkdir(exist_ok=True)
  (folder / "my_measure.py").write_text(measure)
  (folder / "my_scale.py").write_text(f"SCALE = {scale}\n")


def test_another_key_and_another_source_are_named(tmp_path):
  other = tmp_path / "other"
  shutil.copytree(REPOSITORY / "maxbatch", other / "maxbatch")
  shutil.copytree(REPOSITORY / "configs", other / "configs")
  with (other / "maxbatch" / "training" / "loss.py").open("a") as file:
    file.write("# Another checkout.\n")
  folders = {number: tmp_path / str(number) for number in range(2)}
  for number, folder in folders.items():
    own_module(folder, measure=f"{MEASURE}# {number}\n")
  first, second = train(
    2,
    [
      *small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache"),
      *["num_simulated_devices=2", "metrics=[my_measure:margin]"],
    ],
    own={1: ["learning_rate=0.5"]},
    variables={1: {"PYTHONPATH": str(other)}},
    folders=folders,
  )
  assert (first.exit_code, second.exit_code) == (2, 2)
  assert first.errors.splitlines()[0] == (
    f"error: the processes were started differently; compared with process 0 on {HOST}:"
  )
  assert f"  process 1 on {HOST}: learning_rate=0.5 instead of 0.003\n" in first.errors
  assert f"  process 1 on {HOST}: maxbatch/training/loss.py=" in first.errors
  assert f"  process 1 on {HOST}: my_measure.py=" in first.errors
  assert len(first.errors.splitlines()) == 5, first.errors
  assert (first.output, second.output, second.errors) == ("", "", "")
  log = (tmp_path / "first_run" / "logs" / "process_00001.log").read_text()
  assert f" on {HOST}, " in log.splitlines()[0]
  assert "error: the processes were started differently; compared with process 0" in log
  assert not (tmp_path / "first_run" / "metrics.jsonl").exists()


def test_other_data_and_another_schedule_under_the_same_name_are_named(tmp_path):
  arguments = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  schedule = ["batch_schedule=file", "batch_schedule_file=batches.yml", "batch_size=-1"]
  folders = {number: tmp_path / str(number) for number in range(2)}
  for number, folder in folders.items():
    own_module(folder, scale=number)
    (folder / "words.txt").write_text(f"a word and {number} more\n" * 300 + "." * number)
    (folder / "batches.yml").write_text(f"batch_schedule: [[0, 8], [16, {16 + 8 * number}]]")
  ended = train(
    2,
    [
      *[*arguments, "dataset_path=words.txt", "num_simulated_devices=2", *schedule],
      "metrics=[my_measure:margin]",
    ],
    folders=folders,
  )
  assert [one.exit_code for one in ended] == [2, 2]
  errors = ended[0].errors
  size = f"  process 1 on {HOST}: training data, bytes of words.txt (its first 95%)="
  assert size in errors
  assert f"  process 1 on {HOST}: validation data, fingerprint=" in errors
  assert f"  process 1 on {HOST}: plan, total_samples=" in errors
  assert f"  process 1 on {HOST}: my_scale.py=" in errors
  assert ended[1].errors == ""
  assert not (tmp_path / "first_run" / "metrics.jsonl").exists()


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
  arguments = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  folders = {number: tmp_path / str(number) for number in range(2)}
  for folder in folders.values():
    folder.mkdir()
  ended = train(
    2,
    [*arguments, "base_output_directory=runs", "num_simulated_devices=2"],
    folders=folders,
  )
  assert [one.exit_code for one in ended] == [2, 2]
  assert ended[0].errors.startswith("error: base_output_directory=runs: every process writes its ")
  assert f"and process 1 on {HOST} cannot see" in ended[0].errors
  assert ended[1].errors == ""


def test_processes_with_different_numbers_of_devices_are_refused(tmp_path):
  arguments = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  ended = train(2, arguments, own={n: [f"num_simulated_devices={2 * n + 2}"] for n in range(2)})
  assert [one.exit_code for one in ended] == [2, 2]
  assert ended[0].errors == (
    "error: process 0 has 1 device and process 1 has 2: all must have as many "
    "(num_simulated_devices=2 here)\n"
  )
  assert ended[1].errors == ""


def test_a_module_that_only_some_processes_have_imported_so_far_is_no_difference(
  tmp_path, monkeypatch
):
  """Such as what a tokenizer imports when it is first used: in the process that tokenizes."""
  own_module(tmp_path)
  late = types.ModuleType("my_late")
  late.__file__ = str(tmp_path / "my_late.py")
  pathlib.Path(late.__file__).touch()
  monkeypatch.syspath_prepend(str(tmp_path))
  config = load_config(["config=base", "metrics=[my_measure:margin]"])
  monkeypatch.setitem(sys.modules, "my_late", late)
  assert sorted(start.own_modules(config)) == ["my_late.py", "my_measure.py"]
  monkeypatch.setattr(start, "gather", lambda names: [names, []])
  assert sorted(start.own_modules(config)) == ["my_measure.py"]


@pytest.mark.parametrize(("number", "kind"), [(0, UserError), (1, SaidByAnotherError)])
def test_an_error_of_all_processes_is_said_by_the_first(monkeypatch, number, kind):
  monkeypatch.setattr(start, "start_devices", lambda _: None)
  monkeypatch.setattr(start, "check_alike", lambda _: None)
  monkeypatch.setattr(start, "connect_processes", lambda *_: None)
  monkeypatch.setattr(jax, "process_index", lambda: number)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(start, "gather", lambda value: [value])
  config = load_config(["config=base"])
  with (
    pytest.raises(UserError, match="batch_size=7") as caught,
    start.started(config, leaves_files=False),
  ):
    raise UserError("batch_size=7")
  assert type(caught.value) is kind
