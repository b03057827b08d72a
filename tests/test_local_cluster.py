"""scripts/local_cluster.sh: N processes, one exit code, and none that stays behind."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import several_processes
from processes import PATIENCE_SECONDS, REPOSITORY

# Stands for a training process: what it is told, its signals and its exit code are what is tested.
STUB = """
import os, signal, sys, time
keys = dict(key.split("=", 1) for key in sys.argv[1:])
own = keys["process_id"]
def say(*words):
  os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # Whole lines: the processes share a pipe.
signal.signal(signal.SIGTERM, lambda *_: (say("saved", own), sys.exit(0)))
say(own, os.getpid(), keys["num_processes"], keys["coordinator_address"])
if "fails" in keys:
  sys.exit(int(own) + 3 if own == keys["fails"] else 0)
while "waits" in keys:
  time.sleep(0.05)
"""

TRAIN = [sys.executable, "-m", "maxbatch.train"]


@pytest.fixture
def cluster(tmp_path):
  """Starts the script's program beside a stub of the package."""
  for folder in ("scripts", "maxbatch"):
    (tmp_path / folder).mkdir()
  shutil.copy(REPOSITORY / "scripts" / "local_cluster.py", tmp_path / "scripts")
  (tmp_path / "maxbatch" / "__init__.py").touch()
  (tmp_path / "maxbatch" / "train.py").write_text(STUB)

  def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
      [
        sys.executable,
        tmp_path / "scripts" / "local_cluster.py",
        *arguments[:1],
        *TRAIN,
        *arguments[1:],
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )

  return start


def first_lines(process: subprocess.Popen[str], count: int) -> list[list[str]]:
  """What each process says of itself, in their order."""
  assert process.stdout is not None
  return sorted(process.stdout.readline().split() for _ in range(count))


def test_processes_are_told_their_places(cluster):
  with cluster("3") as process:
    said = first_lines(process, 3)
  assert process.returncode == 0
  assert [(own, number) for own, _, number, _ in said] == [("0", "3"), ("1", "3"), ("2", "3")]
  (address,) = {line[3] for line in said}
  assert address.startswith("localhost:")


def test_no_two_tests_get_the_same_port(monkeypatch):
  first = several_processes.free_port(8)
  monkeypatch.setattr(several_processes, "PORTS", range(max(20_000, first - 8), first + 16))
  second = several_processes.free_port(8)
  assert abs(second - first) >= 8


def test_the_exit_code_is_that_of_the_process_that_fails(cluster):
  process = cluster("3", "fails=1")
  process.communicate(timeout=PATIENCE_SECONDS)
  assert process.returncode == 4


def test_a_signal_reaches_every_process_once(cluster):
  with cluster("2", "waits=") as process:
    first_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    said = process.stdout.read()
  assert process.returncode == 0
  assert sorted(said.splitlines()) == ["saved 0", "saved 1"]


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv of util-linux")
def test_no_process_outlives_the_script(cluster):
  with cluster("2", "waits=") as process:
    pids = [int(line[1]) for line in first_lines(process, 2)]
    process.kill()
  for pid in pids:
    while is_alive(pid):
      time.sleep(0.05)


def is_alive(pid: int) -> bool:
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
  except FileNotFoundError:
    return False
  return state != "Z"


@pytest.mark.parametrize("arguments", [[], ["0"], ["steps=3"]])
def test_the_number_comes_first(cluster, arguments):
  with cluster(*arguments) as process:
    assert process.stderr.read().startswith("usage: scripts/local_cluster.sh N [COMMAND] [key")
  assert process.returncode == 2
