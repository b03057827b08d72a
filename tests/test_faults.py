"""What happens to all of several processes when something happens to one: real processes, real kills."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from processes import PATIENCE_SECONDS, small_run
from several_processes import Ended, records, start, wait

from maxbatch.checkpoints.newest import completed_steps
from maxbatch.errors import EXIT_PROCESS_FAILED
from maxbatch.run_folder.metrics import read_metrics

FAULTY = [sys.executable, str(pathlib.Path(__file__).with_name("faulty_train.py"))]
SILENCE = "jax_distributed_heartbeat_timeout_seconds=10"


@pytest.fixture
def arguments(tmp_path):
  """Of a run that would take long, saves often and has a device in each of two processes."""
  keys = "run_name=r num_simulated_devices=2 steps=5000 checkpoint_period=4 log_period=1000"
  return [*small_run(tmp_path, tmp_path / "text.txt", tmp_path / "cache"), *keys.split(), SILENCE]


def steps_done(folder: pathlib.Path) -> int:
  """The last step in metrics.jsonl."""
  found = read_metrics(folder / "r")
  return int(found[-1]["step"]) if found else -1


def after_steps(processes: list[subprocess.Popen[str]], folder: pathlib.Path, steps: int) -> None:
  """Waits until the run has made so many steps."""
  deadline = time.monotonic() + PATIENCE_SECONDS
  while steps_done(folder) < steps:
    assert all(process.poll() is None for process in processes), wait(processes)
    assert time.monotonic() < deadline
    time.sleep(0.1)


def logs(folder: pathlib.Path) -> list[str]:
  """What each process said."""
  return [path.read_text() for path in sorted((folder / "r" / "logs").iterdir())]


def codes(ended: list[Ended]) -> list[int]:
  return [process.exit_code for process in ended]


def test_a_signal_to_one_process_stops_all_after_the_same_step_and_saves_it(tmp_path, arguments):
  processes = start(2, arguments)
  after_steps(processes, tmp_path, 6)
  processes[1].send_signal(signal.SIGTERM)
  ended = wait(processes)
  assert codes(ended) == [0, 0], ended
  last = records(tmp_path / "r")[-1]
  assert "eval/loss" in last
  assert completed_steps(tmp_path / "r" / "checkpoints")[-1] == last["step"]
  assert f"Stopped after step {last['step']}:" in ended[0].output
  assert "a stop signal in process 1" in ended[0].output
  assert f"Stopped after step {last['step']}:" in logs(tmp_path)[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_by_the_other_and_a_restart_goes_on(tmp_path, arguments, victim):
  processes = start(2, arguments)
  after_steps(processes, tmp_path, 6)
  os.kill(processes[victim].pid, signal.SIGKILL)
  ended, other = wait(processes), 1 - victim
  assert codes(ended)[other] == EXIT_PROCESS_FAILED, ended
  reasons = ["has ended without a word", "has given no sign of life for 10 s"]
  (line,) = ended[other].errors.splitlines()
  assert line.startswith(f"stopped: process {victim} on ")
  assert reasons[victim] in line
  assert line in logs(tmp_path)[other]
  saved, done = completed_steps(tmp_path / "r" / "checkpoints"), steps_done(tmp_path)
  assert done - saved[-1] <= 8  # The save under way may be lost too.
  again = wait(start(2, [*arguments, f"steps={done + 2}"]))
  assert codes(again) == [0, 0], again
  assert f"Resuming after step {saved[-1]} ({saved[-1] * 8} samples)" in again[0].output
  assert [one["step"] for one in records(tmp_path / "r")] == list(range(done + 3))


@pytest.mark.parametrize(
  ("fault", "said"),
  [
    ("loader refuses", "reading samples 72 to 79 failed: [Errno 5] Input/output error: '/data/shard"),
    ("loader crashes", "failed: ZeroDivisionError: a bug"),
    ("save crashes", "failed: ZeroDivisionError: a bug"),
  ],
)
def test_an_error_in_one_process_ends_all_with_its_words(tmp_path, arguments, fault, said):
  step = 8 if fault.startswith("save") else 10
  ended = wait(start(2, arguments, command=[*FAULTY, fault, "1", str(step)]))
  assert codes(ended) == [EXIT_PROCESS_FAILED] * 2, ended
  assert "stopped: process 1 on " in ended[0].errors
  assert said in ended[0].errors
  assert said.removeprefix("failed: ") in logs(tmp_path)[1]
  assert set(completed_steps(tmp_path / "r" / "checkpoints")) <= {4, 8}
  assert steps_done(tmp_path) in (7, 8, 9)
