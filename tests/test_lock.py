"""Two starts of one run: the second is refused, whoever holds the folder and however it ends."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from test_interrupted import arguments, records
from test_lost_listener import UNTIL_STOPPED, command, ended, read_until, started

from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import locked
from maxbatch.run_folder.paths import RunFolder
from maxbatch.train import main

HOLDER = """
import pathlib, sys, time
from maxbatch.run_folder.atomic import locked
from maxbatch.run_folder.paths import RunFolder
with locked(RunFolder(pathlib.Path(sys.argv[1]))):
  print("held", flush=True)
  time.sleep(600)
"""


def test_a_second_start_of_a_run_is_refused(tmp_path):
  first = started(command(tmp_path, UNTIL_STOPPED), subprocess.PIPE)
  read_until(first, "step 3/")
  exit_code, errors = ended(started(command(tmp_path, UNTIL_STOPPED), subprocess.DEVNULL))
  assert exit_code == 2, errors
  assert errors.startswith(f"error: run_name=first_run base_output_directory={tmp_path}: this run ")
  assert f"by process {first.pid} on {socket.gethostname()} since 20" in errors
  assert errors.endswith("for example run_name=first_run-2\n")
  first.send_signal(signal.SIGTERM)
  assert first.stdout is not None
  first.stdout.read()
  assert ended(first)[0] == 0
  steps = [one["step"] for one in records(tmp_path)]
  assert steps == list(range(len(steps)))
  assert main([*arguments(tmp_path, len(steps) + 1), "checkpoint_period=1000000"]) == 0


def test_a_lock_ends_with_its_holder(tmp_path):
  holder = started([sys.executable, "-c", HOLDER, str(tmp_path / "run")], subprocess.PIPE)
  read_until(holder, "held")
  folder = RunFolder(tmp_path / "run")
  with pytest.raises(UserError, match=f"by process {holder.pid} on "), locked(folder):
    pass
  holder.kill()
  holder.communicate()
  with locked(folder):
    assert json.loads(folder.lock.read_text())["process"] == os.getpid()


def test_a_lock_is_not_held_by_the_workers_of_a_killed_holder(tmp_path):
  forking = HOLDER.replace("  time.sleep", "  import os; os.fork()\n  time.sleep")
  holder = subprocess.Popen(
    [sys.executable, "-c", forking, str(tmp_path / "run")],
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
    cwd=pathlib.Path(__file__).parents[1],
  )
  assert holder.stdout is not None
  assert holder.stdout.readline() == "held\n"
  time.sleep(0.5)
  holder.kill()
  holder.wait()
  try:
    with locked(RunFolder(tmp_path / "run")):
      pass
  finally:
    os.killpg(holder.pid, signal.SIGKILL)
    holder.stdout.close()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"process": 1}', "\0"])
def test_a_holder_without_a_name_is_refused_too(tmp_path, content):
  holder = started([sys.executable, "-c", HOLDER, str(tmp_path / "run")], subprocess.PIPE)
  read_until(holder, "held")
  folder = RunFolder(tmp_path / "run")
  folder.lock.write_text(content)
  try:
    with pytest.raises(UserError, match=r"by a process that .*lock does not name"), locked(folder):
      pass
  finally:
    holder.kill()
    holder.communicate()


def test_a_run_without_checkpoints_replaces_no_other(tmp_path, capsys):
  assert main(arguments(tmp_path, 2)) == 0
  folder = RunFolder(tmp_path / "first_run")
  before = [file.read_bytes() for file in (folder.metrics, folder.config)]
  capsys.readouterr()
  without = [*arguments(tmp_path, 3), "enable_checkpointing=false"]
  assert main(without) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: enable_checkpointing=false run_name=first_run: a run without ")
  assert [file.read_bytes() for file in (folder.metrics, folder.config)] == before
  assert main([*without, "validate_only=true"]) == 2
  assert capsys.readouterr().err == error
  offer = error.partition("for example ")[2].partition(",")[0]
  assert offer == "run_name=first_run-2"
  assert main([*without, offer]) == 0
  assert "enable_checkpointing=true" in error
  assert main([*without, "enable_checkpointing=true"]) == 0
  assert [one["step"] for one in records(tmp_path)] == [0, 1, 2, 3]
