"""What a command writes where it is asked to replaces nothing that is of another kind."""

import os

import pytest
from support import TINY

from maxbatch import pipeline, train
from maxbatch.plan import main as plan

PIPELINE = ["config=base", "pipeline_schedule=1f1b", "ici_pipeline_parallelism=2"]
OPTIONS = [
  (plan, "--plot", "a.html"),
  (pipeline.main, "--plot", "b.html"),
  (pipeline.main, "--csv", "a"),
  (pipeline.main, "--trace", "a"),
]
OTHERS = [
  b"import os\n",
  b'<!DOCTYPE html>\n<html lang="en">\n<head>\n',
  b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta name="generator" content="maxbatch report">',
  b"tick\n",
]


@pytest.mark.parametrize(("main", "option", "name"), OPTIONS)
def test_a_file_of_another_kind_stays(tmp_path, capsys, main, option, name):
  file = tmp_path / name
  said = ""
  for other in OTHERS:
    file.write_bytes(other)
    assert main([*PIPELINE, option, str(file)]) == 2
    assert file.read_bytes() == other
    said = capsys.readouterr().err
    assert "the existing file was not written by this command" in said
  offered = said.strip().rpartition(f"for example {option} ")[2]
  assert main([*PIPELINE, option, offered]) == 0
  assert main([*PIPELINE, option, offered]) == 0


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
  os.mkfifo(tmp_path / "pipe")
  assert pipeline.main([*PIPELINE, "--csv", str(tmp_path / "pipe")]) == 2
  assert "name another file" in capsys.readouterr().err


@pytest.mark.parametrize("there", ["file", "folder", "pipe"])
def test_a_compiled_step_replaces_nothing_else(tmp_path, capsys, there):
  target = tmp_path / "mine"
  if there == "file":
    target.write_text("import os")
  elif there == "folder":
    target.mkdir()
  else:
    os.mkfifo(target)
  assert train.main(["config=base", f"save_compiled_step={target}", "compile_only=true"]) == 2
  assert (
    "the existing file is not a compiled step and would be overwritten" in capsys.readouterr().err
  )


def test_a_plain_run_is_held_to_device_memory_gb(tmp_path, capsys):
  sizes = {**TINY, "steps": 1, "generate_length": 0, "dataset_type": "synthetic"}
  sizes |= {"base_output_directory": tmp_path, "device_memory_gb": 0.001}
  assert train.main(["config=base", *(f"{key}={value}" for key, value in sizes.items())]) == 2
  message = capsys.readouterr().err
  assert "the step needs 0.00" in message
  assert "which has 1,073,741 bytes; micro_batch_size=auto" in message
